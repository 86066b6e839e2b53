"""``import transfer_queue`` finds the drop-in, wherever the program's code runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tq_redis.compat
from tests.compat.peer import IS_PEER
from tq_redis.compat.drop_in import ray_runtime_env

pytestmark = pytest.mark.skipif(IS_PEER, reason="ours alone")

OURS = "tq_redis.compat.transfer_queue"
SHIM = str(Path(tq_redis.compat.__file__).parent / "path")
AT_WORK = Path(__file__).parent / "drop_in_at_work.py"


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process that has the package, and these variables."""
    root = str(Path(tq_redis.compat.__file__).parents[2])
    path = os.pathsep.join([variables.pop("PYTHONPATH", ""), root]).strip(os.pathsep)
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": path} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture
def real(tmp_path: Path) -> str:
    """A folder with something else of that name."""
    (tmp_path / "transfer_queue").mkdir()
    (tmp_path / "transfer_queue" / "__init__.py").write_text("REAL = True\n")
    return str(tmp_path)


def test_the_modules_are_the_same_objects(real: str) -> None:
    code = f"""
import tq_redis.compat
tq_redis.compat.install()
tq_redis.compat.install()
import transfer_queue, transfer_queue.sampler.base, {OURS} as ours
from transfer_queue.metadata import KVBatchMeta
assert transfer_queue is ours and KVBatchMeta is ours.KVBatchMeta
assert transfer_queue.sampler.base.BaseSampler is ours.BaseSampler
assert ours.__spec__.name == ours.__name__ == {OURS!r}
try:
    import transfer_queue.nothing
except ModuleNotFoundError as error:
    assert error.name == 'transfer_queue.nothing', error.name
else:
    raise AssertionError
"""
    done = python("-c", code, PYTHONPATH=real)
    assert done.returncode == 0, done.stderr


def test_installing_imports_nothing_heavy() -> None:
    code = "import sys, tq_redis.compat as c; c.install(); sys.exit('torch' in sys.modules)"
    assert python("-c", code).returncode == 0


def test_it_is_too_late_when_the_other_is_imported(real: str) -> None:
    code = "import transfer_queue, tq_redis.compat; tq_redis.compat.install()"
    done = python("-c", code, PYTHONPATH=real)
    assert "ConfigError: transfer_queue is imported already" in done.stderr
    assert real in done.stderr


def test_the_folder_on_the_path_is_enough(real: str) -> None:
    code = "import transfer_queue as t; from transfer_queue.client import TransferQueueClient as C"
    done = python("-c", f"{code}; print(C.__module__)", PYTHONPATH=f"{SHIM}{os.pathsep}{real}")
    assert done.stdout.strip() == f"{OURS}.client", done.stderr


@pytest.mark.parametrize("way", [["-m", "program", "a", "b"], ["{folder}/program.py", "a", "b"]])
def test_programs_can_be_started_with_it(real: str, way: list[str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import sys, transfer_queue\n"
        "if __name__ == '__main__':\n"
        "    print(transfer_queue.__name__, sys.argv[1:])\n"
    )
    arguments = [word.format(folder=tmp_path) for word in way]
    done = python("-m", "tq_redis.compat", *arguments, PYTHONPATH=real)
    assert done.stdout.strip() == f"{OURS} ['a', 'b']", done.stderr
    assert "python -m tq_redis.compat" in python("-m", "tq_redis.compat").stderr


def test_workers_and_their_children_find_it(
    ray_session: None, redis_url: str, namespace: str
) -> None:
    """In a Ray cluster that was started without it."""
    import ray

    address = ray.get_runtime_context().gcs_address
    done = python("-m", "tq_redis.compat", str(AT_WORK), address, redis_url, namespace)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen == {
        "here": OURS,
        "child": f"{OURS}.metadata",
        "workers": [[OURS, True, f"{OURS}.metadata"]] * 2,
        "y": [1, 1],
    }


def test_a_job_with_a_hook_of_its_own_gets_the_path() -> None:
    own = {"worker_process_setup_hook": "mine.hook", "env_vars": {"PYTHONPATH": "/mine", "A": "1"}}
    env = ray_runtime_env(own)
    assert env["worker_process_setup_hook"] == "mine.hook"
    assert env["env_vars"] == {"PYTHONPATH": f"{SHIM}{os.pathsep}/mine", "A": "1"}
    assert ray_runtime_env({"worker_process_setup_hook": "m"})["env_vars"] == {
        "PYTHONPATH": f"{SHIM}{os.pathsep}${{PYTHONPATH}}"
    }
    assert ray_runtime_env(None) == {"worker_process_setup_hook": "tq_redis.compat.drop_in.install"}
