"""verl's own trainer, killed in the middle of a step: the same command goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from recipe.tasks.tiny_model import ModelSettings
from recipe.tasks.warm_start import WarmStartSettings
from recipe.v1.main import METRICS, environment
from recipe.v1.prepare import prepare
from tests.recipe.held_back import GENERATED, HOLD

pytestmark = [pytest.mark.recipe, pytest.mark.slow, pytest.mark.timeout(1800)]

WaitUntil = Callable[..., None]

# (row of the data set, session) of an answer.
Answer = tuple[str, str]

PROMPTS, SESSIONS = 4, 2
# So many answers of a step are generated before the run is killed: a group of two is half done.
BEFORE_THE_KILL = 5

SETTINGS = [
    f"data.train_batch_size={PROMPTS}",
    f"actor_rollout_ref.rollout.n={SESSIONS}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.agent.default_agent_loop=held_back",
    "actor_rollout_ref.model.external_lib=tests.recipe.held_back",
    # Columns outlive the run's Ray cluster.
    "++transfer_queue.tq_redis.data.backend=zmq",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=1",
    "trainer.total_training_steps=4",
]


@dataclass
class Trainer:
    """Runs of one and the same training, one after the other."""

    task: Path
    output: Path
    home: Path
    server: Any
    redis_url: str
    namespace: str
    process: subprocess.Popen[bytes] | None = None

    @property
    def said(self) -> Path:
        return self.output / "said"

    def start(self, state: str, hold: str) -> None:
        """``hold``: as the agent loop takes it."""
        folders = ["--task", str(self.task), "--output", str(self.output)]
        (self.output / "generated").unlink(missing_ok=True)
        settings = [*SETTINGS, f"trainer.rollout_data_dir={self.output}/trained"]
        variables = {
            **environment(self.output),
            "TQ_REDIS_URL": self.redis_url,
            "TQ_REDIS_NAMESPACE": self.namespace,
            "TMPDIR": str(self.home),
            "HOME": str(self.home),
            GENERATED: str(self.output / "generated"),
            HOLD: hold,
        }
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "recipe.v1.main", *folders, "--state", state, *settings],
                env=variables,
                cwd=self.home,
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    def generated(self, step: int) -> list[Answer]:
        """Answers of this run."""
        path = self.output / "generated"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(row, session) for at, row, session in map(str.split, lines) if at == str(step)]

    def trained(self, step: int) -> Counter[str]:
        """How many answers to each prompt the step trained on."""
        lines = (self.output / "trained" / f"{step}.jsonl").read_text().splitlines()
        return Counter(json.loads(line)["input"] for line in lines)

    def in_queue(self) -> int:
        """Answers in the queue, as redis-cli shows them."""
        return int(self.server.hget(f"tq:{self.namespace}:{{train}}", "produced:responses") or 0)

    def has(self, step: int, answers: int) -> bool:
        """Whether so many of the step are generated, and as many in the queue."""
        assert self.process is not None
        assert self.process.poll() is None, self.said.read_text()
        return len(self.generated(step)) == answers and self.in_queue() >= answers

    def kill(self) -> None:
        """kill -9 to all its processes, those of its Ray cluster too."""
        assert self.process is not None
        first = psutil.Process(self.process.pid)
        family = [first, *first.children(recursive=True)]
        for member in family:
            if member.is_running():
                os.kill(member.pid, signal.SIGKILL)
        self.process.wait()
        psutil.wait_procs(family, timeout=30)


@pytest.fixture
def unit(redis_url: str, namespace: str) -> Iterator[None]:
    """A storage unit outside Ray, which outlives the training."""
    variables = {"TQ_REDIS_URL": redis_url, "TQ_REDIS_NAMESPACE": namespace}
    process = subprocess.Popen(
        [sys.executable, "-m", "tq_redis", "storage-unit", "--capacity", "0.1"],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield
    process.terminate()
    process.communicate(timeout=30)


@pytest.fixture
def trainer(tmp_path: Path, redis_url: str, namespace: str, unit: None) -> Iterator[Trainer]:
    model = ModelSettings(hidden=32, intermediate=64, layers=2, heads=2)
    prepare(tmp_path / "task", WarmStartSettings(model=model, max_steps=3))
    server: Any = redis.Redis.from_url(redis_url, decode_responses=True)
    # A short path, for Ray's sockets.
    with tempfile.TemporaryDirectory(prefix="tq-") as home, server:
        trainer = Trainer(
            tmp_path / "task", tmp_path / "run", Path(home), server, redis_url, namespace
        )
        yield trainer
        if trainer.process is not None and trainer.process.poll() is None:
            trainer.kill()
        for key in server.scan_iter(f"tq:{namespace}:*"):
            server.unlink(key)


def test_a_killed_run_generates_again_what_was_not_finished_or_all(
    trainer: Trainer, wait_until: WaitUntil
) -> None:
    everything = PROMPTS * SESSIONS
    trainer.start("fresh", hold=f"2:{BEFORE_THE_KILL}")
    wait_until(lambda: trainer.has(2, BEFORE_THE_KILL), 600.0)
    before = trainer.generated(2)
    trainer.kill()
    assert trainer.in_queue() == BEFORE_THE_KILL

    # Finished trajectories are kept; the run is killed again, one step later.
    trainer.start("resume", hold=f"3:{BEFORE_THE_KILL}")
    wait_until(lambda: trainer.has(3, BEFORE_THE_KILL), 600.0)
    again = trainer.generated(2)
    assert trainer.generated(1) == []
    assert len(again) == everything - BEFORE_THE_KILL
    assert len({*before, *again}) == everything
    assert list(trainer.trained(2).values()) == [SESSIONS] * PROMPTS
    trainer.kill()

    # Nothing is kept.
    trainer.start("fresh", hold="0:0")
    assert trainer.process is not None
    assert trainer.process.wait(600.0) == 0, trainer.said.read_text()
    assert trainer.generated(2) == []
    assert len(set(trainer.generated(3))) == len(trainer.generated(3)) == everything
    assert list(trainer.trained(3).values()) == [SESSIONS] * PROMPTS
    checkpoints = trainer.output / "checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "4"
    records = [json.loads(line) for line in (trainer.output / METRICS).read_text().splitlines()]
    assert [record["step"] for record in records] == [3, 4]
    for record in records:
        # The rollout had the actor's weights: the same tokens are as likely to both.
        assert record["data"]["training/rollout_probs_diff_max"] < 1e-5
    assert not trainer.server.exists(f"tq:{trainer.namespace}:partitions")
