"""The recipe as a user runs it: two steps with a tiny model, a crash, a wrong address."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from recipe.ppo.checkpoints import Checkpoints
from recipe.ppo.plot import VAL_ACCURACY
from recipe.ppo.records import Records

pytestmark = [pytest.mark.recipe, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]

Start = Callable[..., subprocess.Popen[str]]

PROGRAM = ("-m", "recipe.ppo.main_ppo")

# Runs the recipe, and after every task looks for tensors that are alive in this process.
WATCHED = """
import gc, json, runpy, sys
from recipe.ppo.environment import prepare_environment
prepare_environment()
import torch
from recipe.ppo import step

seen = []
start_task = step.Step.start

def watched(self, name, *args, **kwargs):
    wait = start_task(self, name, *args, **kwargs)
    shapes = []
    seen.append([self.name, name, self.size, shapes])

    def look():
        found = wait()
        alive = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        shapes.extend(list(t.shape) for t in alive)
        return found

    return look

step.Step.start = watched
runpy.run_module("recipe.ppo.main_ppo", run_name="__main__")
with open(sys.argv[-1].partition("=")[2] + "/seen.json", "w") as file:
    json.dump(seen, file)
"""

# 12 rows in two workers: verl's data set makes a placeholder of one byte a prompt. With a reference
# model in reward and loss, so that those tasks run as well.
OVERRIDES = (
    "trainer.total_training_steps=4",
    "tq_redis.step.save_rollouts=true",
    "algorithm.use_kl_in_reward=true",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "data.train_batch_size=3",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=3",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=6",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=6",
    "data.val_max_samples=12",
    "data.test_max_samples=12",
)


@dataclass(frozen=True)
class Place:
    """Where a run puts its files, its temporary ones and its queue."""

    output: Path
    temporary: Path
    redis_url: str
    namespace: str

    def start(self, *overrides: str, program: tuple[str, ...] = PROGRAM) -> subprocess.Popen[str]:
        """A training process of its own."""
        return subprocess.Popen(
            [
                *(sys.executable, *program, "+experiment=smoke"),
                f"tq_redis.redis.url={self.redis_url}",
                f"tq_redis.redis.namespace={self.namespace}",
                *overrides,
                f"output_dir={self.output}",
            ],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "TMPDIR": str(self.temporary),
                "HOME": str(self.temporary),
                # torch makes this folder, and keeps it, as soon as tensordict is imported.
                "TORCHINDUCTOR_CACHE_DIR": str(self.output.parent / "torch"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def place(tmp_path: Path, redis_url: str, namespace: str) -> Iterator[Place]:
    """A short path for temporary files, for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="tq-") as folder:
        yield Place(tmp_path / "run", Path(folder), redis_url, namespace)


@pytest.fixture
def output(place: Place) -> Path:
    return place.output


@pytest.fixture
def temporary(place: Place) -> Path:
    return place.temporary


@pytest.fixture
def start(place: Place) -> Iterator[Start]:
    """``start(override, ...)``: a training process of its own; ended when the test ends."""
    started: list[subprocess.Popen[str]] = []

    def begin(*overrides: str) -> subprocess.Popen[str]:
        started.append(place.start(*overrides))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@dataclass(frozen=True)
class Resumed:
    """A run that was killed, and continued to its end; then the driver was watched.

    Attributes:
        saved: the step of the checkpoint that it continued from.
        said: what the second run printed.
        made: what both left in the repository.
    """

    place: Place
    saved: int
    said: str
    made: set[Path]


@pytest.fixture(scope="module")
def resumed(
    tmp_path_factory: pytest.TempPathFactory, redis_url: str, wait_until: Callable[..., None]
) -> Iterator[Resumed]:
    output = tmp_path_factory.mktemp("resumed") / "run"
    before = set(ROOT.iterdir())
    checkpoints = Checkpoints(output / "checkpoints", keep=2)
    with tempfile.TemporaryDirectory(prefix="tq-") as folder:
        place = Place(output, Path(folder), redis_url, f"test-{uuid.uuid4().hex[:12]}")
        first = place.start(*OVERRIDES)
        try:
            wait_until(lambda: inside(checkpoints) or first.poll() is not None, 800.0)
        finally:
            first.kill()
            first.communicate()
        wait_until(lambda: not list(place.temporary.iterdir()), 30.0, "files of a killed run")
        saved = inside(checkpoints)
        assert saved is not None, "the run was not killed inside a step"
        said = finish(place.start(*OVERRIDES, program=("-c", WATCHED)))
        yield Resumed(place, saved, said, set(ROOT.iterdir()) - before)


def inside(checkpoints: Checkpoints) -> int | None:
    """The step of the last checkpoint, if the answers of the step after it are there too."""
    latest = checkpoints.latest
    if latest is None or latest < 2:
        return None
    manifest = checkpoints.folder(latest) / "queue" / "manifest.json"
    try:
        partitions = json.loads(manifest.read_text())["partitions"]
    except FileNotFoundError:  # it is being replaced
        return None
    return latest if [p["name"] for p in partitions] == [f"train_{latest + 1}"] else None


def finish(process: subprocess.Popen[str]) -> str:
    try:
        out, err = process.communicate(timeout=800)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, f"{out}\n{err}"
    return out


def test_a_killed_run_continues_and_finishes(resumed: Resumed) -> None:
    output, checkpoints = resumed.place.output, Checkpoints(resumed.place.output / "checkpoints", 2)
    assert f"resumed after step {resumed.saved}" in resumed.said
    assert f"step {resumed.saved + 1} goes on with the samples that are there" in resumed.said
    records = Records(output / "metrics.jsonl").read()
    assert [record["step"] for record in records] == list(range(5))
    # The rollout had the actor's weights: the same tokens are as likely to both.
    assert all(record["training/rollout_probs_diff_max"] < 1e-5 for record in records[1:])
    assert all(VAL_ACCURACY in record for record in records)
    assert (output / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in checkpoints.root.glob("global_step_*")) == [
        "global_step_3",
        "global_step_4",
    ]
    assert checkpoints.latest == 4


def test_it_says_how_to_watch_it_and_leaves_nothing(resumed: Resumed) -> None:
    assert f"HGETALL 'tq:{resumed.place.namespace}:{{train_1}}'" in resumed.said
    assert resumed.made == set()
    assert list(resumed.place.temporary.iterdir()) == []


def test_the_same_command_again_finds_nothing_to_do(resumed: Resumed) -> None:
    records = Records(resumed.place.output / "metrics.jsonl")
    before = records.read()

    assert "held-out accuracy, greedy:" in finish(resumed.place.start(*OVERRIDES))
    assert records.read() == before


def test_the_driver_holds_no_column(resumed: Resumed) -> None:
    """No tensor column is ever in the process that drives the training."""
    seen = json.loads((resumed.place.output / "seen.json").read_text())
    tasks = [(step, name) for step, name, _, _ in seen if step.startswith("train")]
    names = ["gen", "reward", "old_log_prob", "ref", "kl", "adv", "update_actor", "metrics"]
    steps = range(resumed.saved + 1, 5)
    assert tasks == [(f"train_{step}", name) for step in steps for name in names]
    for step, name, rows, shapes in seen:
        columns = [shape for shape in shapes if shape and shape[0] in (rows, rows // 2)]
        assert columns == [], f"{step}, after {name}"


def test_a_wrong_address_is_one_line(start: Start, output: Path) -> None:
    process = start("tq_redis.redis.url=redis://127.0.0.1:1/0")

    _, err = process.communicate(timeout=300)

    assert process.returncode == 2
    message = err.strip().splitlines()[-1]
    assert message.startswith("ServerUnavailableError:")
    assert "redis://127.0.0.1:1/0" in message
    assert "Traceback" not in err
    assert not (output / "metrics.jsonl").exists()
