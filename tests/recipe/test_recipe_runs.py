"""The recipe as a user runs it: two steps with a tiny model, a crash, a wrong address."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recipe.ppo.checkpoints import Checkpoints
from recipe.ppo.records import Records

pytestmark = [pytest.mark.recipe, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The run's home and its place for temporary files. A short path, for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="tq-") as folder:
        yield Path(folder)


@pytest.fixture
def start(output: Path, temporary: Path, redis_url: str, namespace: str) -> Iterator[Start]:
    """``start(override, ...)``: a training process of its own; ended when the test ends."""
    started: list[subprocess.Popen[str]] = []

    def begin(*overrides: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "recipe.ppo.main_ppo", "+experiment=smoke"),
                f"output_dir={output}",
                f"tq_redis.redis.url={redis_url}",
                f"tq_redis.redis.namespace={namespace}",
                *overrides,
            ],
            cwd=ROOT,
            env={
                **os.environ,
                "TMPDIR": str(temporary),
                "HOME": str(temporary),
                # torch makes this folder, and keeps it, as soon as tensordict is imported.
                "TORCHINDUCTOR_CACHE_DIR": str(output.parent / "torch"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=800)
    assert process.returncode == 0, f"{out}\n{err}"
    return out


def test_two_steps_and_nothing_left(
    start: Start, output: Path, temporary: Path, namespace: str
) -> None:
    before = set(ROOT.iterdir())

    said = finish(start())

    assert f"HGETALL 'tq:{namespace}:{{train_1}}'" in said
    assert "held-out accuracy, greedy:" in said
    records = Records(output / "metrics.jsonl").read()
    assert [record["step"] for record in records] == [0, 1, 2]
    # The rollout had the actor's weights: the same tokens are as likely to both.
    assert all(record["training/rollout_probs_diff_max"] < 1e-5 for record in records[1:])
    assert all("tuning/acc" in record for record in records)
    assert (output / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert Checkpoints(output / "checkpoints", keep=2).latest == 2
    assert set(ROOT.iterdir()) == before
    assert list(temporary.iterdir()) == []

    # The same command again finds that there is nothing to do.
    assert "held-out accuracy, greedy:" in finish(start())
    assert Records(output / "metrics.jsonl").read() == records


def test_a_killed_run_continues_and_finishes(
    start: Start, output: Path, temporary: Path, wait_until: Callable[..., None]
) -> None:
    """With the reference model in reward and loss, so that those tasks run as well."""
    overrides = [
        "trainer.total_training_steps=6",
        "algorithm.use_kl_in_reward=true",
        "actor_rollout_ref.actor.use_kl_loss=true",
    ]
    checkpoints = Checkpoints(output / "checkpoints", keep=2)
    first = start(*overrides)
    wait_until(lambda: (checkpoints.latest or 0) >= 2 or first.poll() is not None, 800.0)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    wait_until(lambda: not list(temporary.iterdir()), 30.0, "temporary files of a killed run")
    saved = checkpoints.latest
    assert saved is not None
    assert saved < 6

    said = finish(start(*overrides))

    assert f"resumed after step {saved}" in said
    records = Records(output / "metrics.jsonl").read()
    assert [record["step"] for record in records] == list(range(7))
    assert checkpoints.latest == 6
    assert sorted(path.name for path in checkpoints.root.glob("global_step_*")) == [
        "global_step_5",
        "global_step_6",
    ]
    # No tensor passes through the driver, so it has nothing to grow with.
    memory = [record["driver/rss_mb"] for record in records if record["step"] > saved]
    assert memory[-1] - memory[0] < 20


def test_a_wrong_address_is_one_line(start: Start, output: Path) -> None:
    process = start("tq_redis.redis.url=redis://127.0.0.1:1/0")

    _, err = process.communicate(timeout=300)

    assert process.returncode == 2
    message = err.strip().splitlines()[-1]
    assert message.startswith("ServerUnavailableError:")
    assert "redis://127.0.0.1:1/0" in message
    assert "Traceback" not in err
    assert not (output / "metrics.jsonl").exists()
