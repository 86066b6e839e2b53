"""verl's own trainer on tq_redis in its asynchronous modes: two steps with a tiny model.

The synchronous mode runs in test_v1_resume.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from recipe.tasks.tiny_model import ModelSettings
from recipe.tasks.warm_start import WarmStartSettings
from recipe.v1.main import METRICS, TQ_REDIS, command, environment
from recipe.v1.prepare import prepare

pytestmark = [pytest.mark.recipe, pytest.mark.slow, pytest.mark.timeout(900)]

WaitUntil = Callable[..., None]

COUNTS = ("samples", "produced:responses", "produced:old_log_probs", "produced:advantages")

# One process trains: two of them, as in test_v1_resume, take longer to start.
SMALL = [
    "trainer.n_gpus_per_node=1",
    "data.train_batch_size=4",
    "data.val_max_samples=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    # Answers of a model that has learned nothing score alike: the weights change by decay alone.
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.actor.optim.weight_decay=1",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.test_freq=2",
    "trainer.save_freq=2",
]

# Mode -> prompts that an update trains on.
MODES = {"colocate_async": 4, "separate_async": 2}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words, and a model that has learned nothing."""
    folder = tmp_path_factory.mktemp("task")
    model = ModelSettings(hidden=32, intermediate=64, layers=2, heads=2)
    prepare(folder, WarmStartSettings(model=model, max_steps=3))
    return folder


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The run's home and its place for temporary files. A short path, for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="tq-") as folder:
        yield Path(folder)


@pytest.fixture(params=MODES)
def training(
    request: pytest.FixtureRequest,
    task: Path,
    tmp_path: Path,
    temporary: Path,
    redis_url: str,
    namespace: str,
) -> Iterator[subprocess.Popen[bytes]]:
    """The training process; what it says goes to the file ``said``."""
    module, *before = TQ_REDIS
    options = ["--redis-url", redis_url, "--namespace", namespace]
    mode = request.param
    settings = [
        f"mode={mode}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={MODES[mode]}",
        *SMALL,
    ]
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(
            command([module, *options, *before], task, tmp_path, settings),
            env={**environment(tmp_path), "TMPDIR": str(temporary), "HOME": str(temporary)},
            cwd=temporary,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        yield process
        process.kill()
        process.wait()


def test_two_steps_of_verls_own_trainer(
    training: subprocess.Popen[bytes],
    tmp_path: Path,
    redis_url: str,
    namespace: str,
    wait_until: WaitUntil,
) -> None:
    server: Any = redis.Redis.from_url(redis_url, decode_responses=True)
    most = dict.fromkeys(COUNTS, 0)

    def ended() -> bool:
        summary = server.hgetall(f"tq:{namespace}:{{train}}")
        for name in COUNTS:
            most[name] = max(most[name], int(summary.get(name, 0)))
        return training.poll() is not None

    wait_until(ended, 800.0)

    assert training.returncode == 0, (tmp_path / "said").read_text()
    assert f"HGETALL 'tq:{namespace}:{{train}}'" in (tmp_path / "said").read_text()
    # What redis-cli showed meanwhile: of the next step there are answers too, but no advantages.
    assert most["samples"] > 8
    assert most["produced:responses"] > 8
    assert most["produced:old_log_probs"] == most["produced:advantages"] == 8
    assert not server.exists(f"tq:{namespace}:partitions")
    server.close()
    records = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    one, two = (record["data"] for record in records)
    # The rollout had the actor's first weights: the same tokens are as likely to both. It had
    # begun with the second step before the first one's update.
    difference = "training/rollout_probs_diff_max"
    assert one[difference] < 1e-7 < two[difference]
    assert one["training/off_policy/trajectory_staleness_worst/max"] == 0
    assert two["training/off_policy/trajectory_staleness_worst/max"] == 1
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "2"
