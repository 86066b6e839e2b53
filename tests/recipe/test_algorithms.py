"""Every algorithm trains, and the queue changes no number. Two steps each, of a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.recipe.trainings import TRAININGS

pytestmark = [pytest.mark.recipe, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Trained:
    """Trainings that are over.

    Attributes:
        output: a folder for each.
        left: keys of the queue that are still there, and do not expire.
    """

    output: Path
    left: list[str]
    reports: dict[str, Any]

    def steps(self, name: str) -> list[dict[str, float]]:
        """The records of a training, that of step 0 first."""
        return self.reports[name]["steps"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Trained]:
    output = tmp_path_factory.mktemp("trained")
    namespace = f"test-{uuid.uuid4().hex[:12]}"
    with tempfile.TemporaryDirectory(prefix="tq-") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.recipe.trainings", str(output), redis_url, namespace],
            cwd=ROOT,
            env={
                **os.environ,
                "TMPDIR": folder,
                "HOME": folder,
                "MPLCONFIGDIR": folder,
                "VERL_FILE_LOGGER_PATH": str(output / "tracking.jsonl"),
                "TENSORBOARD_DIR": str(output / "tensorboard"),
            },
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        with redis.Redis.from_url(redis_url, decode_responses=True) as admin:
            keys = list(admin.scan_iter(f"tq:{namespace}:*"))
            left = [key for key in keys if admin.ttl(key) == -1]  # -2: it expired meanwhile
        yield Trained(output, left, json.loads((output / "reports.json").read_text()))


@pytest.mark.parametrize("name", TRAININGS)
def test_two_steps(trained: Trained, name: str) -> None:
    steps = trained.steps(name)

    assert [record["step"] for record in steps] == [0, 1, 2]
    for record in steps[1:]:
        assert {"critic/advantages/mean", "timing_s/step", "perf/throughput"} <= record.keys()
    assert "actor/grad_norm" in steps[2]


@pytest.mark.parametrize("name", ["grpo_twice", "gae_twice"])
def test_without_the_queue_every_number_is_the_same(trained: Trained, name: str) -> None:
    report = trained.reports[name]

    compared = {"critic/score/mean", "critic/advantages/max", "actor/loss", "actor/grad_norm"}
    assert compared <= report["gaps"].keys()
    assert {metric: gap for metric, gap in report["gaps"].items() if gap > 1e-5} == {}
    assert report["weight_gap"] <= 1e-5


@pytest.mark.parametrize("name", ["grpo_twice", "gae_twice"])
def test_no_tensor_passes_through_the_driver(trained: Trained, name: str) -> None:
    traffic = trained.reports[name]["traffic"]

    assert traffic["queue"][0] == 0
    assert traffic["plain"][0] > 50_000


def test_the_samples_are_balanced_over_the_ranks(trained: Trained) -> None:
    for record in trained.steps("grpo_twice")[1:]:
        assert record["global_seqlen/balanced_max"] - record["global_seqlen/balanced_min"] <= 5


def test_the_critic_warms_up_before_the_actor_moves(trained: Trained) -> None:
    first, second = trained.steps("gae_twice")[1:]

    assert "actor/grad_norm" not in first
    assert {"critic/vf_loss", "critic/values/mean", "critic/vf_explained_var"} <= first.keys()
    assert "actor/grad_norm" in second


def test_a_reward_model_scores_the_answers_in_validation_too(trained: Trained) -> None:
    steps = trained.steps("reward_model")

    assert all(record["critic/score/mean"] != 0 for record in steps[1:])
    # Three rows at a time, on two ranks: some are filled up, and none is counted twice.
    assert "val-core/reasoning_gym/spell_backward/reward/mean@1" in steps[0]


def test_remax_has_a_baseline_and_kl_in_the_reward(trained: Trained) -> None:
    for record in trained.steps("remax")[1:]:
        assert {"timing_s/baselines", "actor/reward_kl_penalty"} <= record.keys()
    coefficients = [r["actor/reward_kl_penalty_coeff"] for r in trained.steps("remax")[1:]]
    assert coefficients[0] != coefficients[1]  # the controller adapted it


def test_lora_and_rollout_correction(trained: Trained) -> None:
    for record in trained.steps("reinforce")[1:]:
        assert {"actor/kl_loss", "rollout_corr/rollout_is_mean"} <= record.keys()
    # The base is the reference: before the first update the adapter changes nothing.
    assert abs(trained.steps("reinforce")[1]["actor/kl_loss"]) < 1e-6


def test_bypass_takes_no_log_probabilities_of_the_actor(trained: Trained) -> None:
    for record in trained.steps("rloo")[1:]:
        assert "actor/entropy" not in record
        assert "actor/reward_kl_penalty" in record


def test_generations_are_written_for_people(trained: Trained) -> None:
    folder = trained.output / "rloo"
    for name, count in (("rollouts/1.jsonl", 8), ("validations/val/0.jsonl", 8)):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        assert len(lines) == count
        assert all(line["input"].startswith("user") or "Spell" in line["input"] for line in lines)
        # Samples of one prompt follow each other, as they were put.
        assert [line["uid"] for line in lines] == sorted(line["uid"] for line in lines)


def test_a_rollout_is_kept_for_the_next_run(trained: Trained) -> None:
    kept = list((trained.output / "rloo" / "skip").rglob("gen_batch.dp"))
    assert len(kept) == 1  # of step 1, by the only training process


def test_the_profiler_records_the_step_that_was_asked_for(trained: Trained) -> None:
    assert [path for path in (trained.output / "rloo" / "profile").rglob("*") if path.is_file()]


def test_agent_loops_hold_conversations(trained: Trained) -> None:
    for record in trained.steps("agent_loop")[1:]:
        # A model that knows nothing is asked twice.
        assert record["num_turns/mean"] == 4
        assert record["training/rollout_probs_diff_max"] < 1e-4
    assert "val-core/reasoning_gym/spell_backward/acc/mean@2" in trained.steps("agent_loop")[0]


def test_a_step_is_generated_while_the_one_before_is_trained(trained: Trained) -> None:
    gaps = [record["training/rollout_probs_diff_max"] for record in trained.steps("ahead")[1:]]

    assert gaps[0] < 1e-4  # generated with the weights that it trained
    assert gaps[1] > 1e-4  # with those of before the first update


def test_what_was_generated_ahead_is_in_the_checkpoint(trained: Trained) -> None:
    first = trained.steps("ahead")[-1]
    (resumed,) = trained.steps("resumed")

    assert resumed["step"] == 2
    # The same answers, although the weights that gave them are gone, and the same weights.
    for name in ("response_length/mean", "training/rollout_probs_diff_max", "actor/entropy"):
        assert resumed[name] == pytest.approx(first[name], rel=1e-3)
    assert resumed["training/rollout_probs_diff_max"] > 1e-4


def test_metrics_go_to_the_backends_of_verls_tracking(trained: Trained) -> None:
    assert list((trained.output / "tensorboard").rglob("events.out.*"))
    assert (trained.output / "tracking.jsonl").stat().st_size > 0


def test_nothing_is_left_in_redis(trained: Trained) -> None:
    assert trained.left == []
