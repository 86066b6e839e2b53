"""No tensor column is ever in the process that drives the training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.recipe, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]

# Runs the recipe, and after every task looks for tensors that are alive in this process.
_WATCHED_RUN = """
import gc, json, runpy, sys
from recipe.ppo.environment import prepare_environment
prepare_environment()
import torch
from recipe.ppo import step

seen = []
run_task = step.Step.run

def watched(self, name, *args, **kwargs):
    run_task(self, name, *args, **kwargs)
    alive = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    seen.append([self.partition, name, self.size, [list(t.shape) for t in alive]])

step.Step.run = watched
runpy.run_module("recipe.ppo.main_ppo", run_name="__main__")
with open(sys.argv[-1].partition("=")[2] + "/seen.json", "w") as file:
    json.dump(seen, file)
"""


def test_the_driver_holds_no_column(tmp_path: Path, redis_url: str, namespace: str) -> None:
    output = tmp_path / "run"
    done = subprocess.run(
        [
            *(sys.executable, "-c", _WATCHED_RUN, "+experiment=smoke"),
            # 12 rows in two workers: verl's data set makes a placeholder of one byte a prompt.
            "data.train_batch_size=3",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=3",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=6",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=6",
            "data.val_max_samples=12",
            "data.test_max_samples=12",
            f"tq_redis.redis.url={redis_url}",
            f"tq_redis.redis.namespace={namespace}",
            f"output_dir={output}",
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads((output / "seen.json").read_text())

    tasks = [(partition, name) for partition, name, _, _ in seen if partition.startswith("train")]
    names = ["generate", "reward", "old_log_prob", "advantage", "update_actor"]
    assert tasks == [(f"train_{step}", name) for step in (1, 2) for name in names]
    for partition, name, rows, shapes in seen:
        columns = [shape for shape in shapes if shape and shape[0] in (rows, rows // 2)]
        assert columns == [], f"{partition}, after {name}"
