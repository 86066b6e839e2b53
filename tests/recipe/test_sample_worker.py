"""Rewards and advantages on plain batches, as verl would pass them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hydra import compose, initialize_config_dir
from verl import DataProto
from verl.trainer.ppo import core_algos

import recipe.ppo
from recipe.ppo.sample_worker import SampleWorker
from recipe.tasks.spell_backward import DATA_SOURCE
from recipe.tasks.tiny_model import ModelSettings, byte_tokenizer, random_model

WIDTH = 10


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    variables = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    tokenizer = byte_tokenizer()
    random_model(ModelSettings(16, 32, 1, 1), tokenizer).config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    folder = Path(str(recipe.ppo.__file__)).parent / "config"
    with initialize_config_dir(str(folder), version_base=None):
        config = compose("ppo")
    worker: Any = SampleWorker(config, str(tmp_path))
    yield worker
    # verl's reward manager takes the loop of this thread, or makes one.
    worker.rewards.loop.close()
    asyncio.set_event_loop(None)


def answered(tokenizer: Any, pairs: list[tuple[str, str]]) -> DataProto:
    """Responses and the right answers; each response ends with the end token."""
    responses = torch.full((len(pairs), WIDTH), tokenizer.pad_token_id)
    mask = torch.zeros((len(pairs), WIDTH), dtype=torch.int64)
    for row, (response, _) in enumerate(pairs):
        tokens = [*tokenizer(response)["input_ids"], tokenizer.eos_token_id]
        responses[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
    columns = {
        "data_source": [DATA_SOURCE] * len(pairs),
        "reward_model": [{"ground_truth": answer} for _, answer in pairs],
        "extra_info": [{}] * len(pairs),
    }
    tensors = {"responses": responses, "response_mask": mask, "attention_mask": mask}
    return DataProto.from_dict(tensors, columns)


def scored(worker: Any, data: DataProto) -> DataProto:
    return worker.compute_reward(data)


def test_the_score_stands_at_the_last_token_of_the_response(worker: Any) -> None:
    output = scored(worker, answered(worker.tokenizer, [("nus", "nus"), ("nxx", "nus")]))

    scores = output.batch["token_level_scores"]
    assert scores.dtype == torch.float32
    assert scores[:, 3].tolist() == pytest.approx([1.0, 1 / 3])
    assert scores.sum().item() == pytest.approx(4 / 3)
    assert [row["acc"] for row in output.non_tensor_batch["reward_extra_info"]] == [1.0, 0.0]


def test_an_answer_that_goes_on_is_not_exact(worker: Any) -> None:
    output = scored(worker, answered(worker.tokenizer, [("abcdefx", "abcdef")]))

    assert output.batch["token_level_scores"].sum().item() == pytest.approx(0.8)
    assert output.non_tensor_batch["reward_extra_info"][0]["acc"] == 0.0


def test_a_reward_function_may_score_each_token(worker: Any) -> None:
    worker.rewards.compute_score = lambda **given: list(range(len(given["solution_str"]) + 1))

    output = scored(worker, answered(worker.tokenizer, [("abc", ""), ("a", "")]))

    assert output.batch["token_level_scores"][:, :5].tolist() == [[0, 1, 2, 3, 0], [0, 1, 0, 0, 0]]


def test_another_number_of_scores_than_tokens_is_an_error(worker: Any) -> None:
    worker.rewards.compute_score = lambda **given: [1.0, 2.0]

    with pytest.raises(ValueError, match="gave 2 scores for a response of 4 tokens"):
        scored(worker, answered(worker.tokenizer, [("abc", "")]))


def test_the_reward_models_score_comes_before_the_function(worker: Any) -> None:
    data = answered(worker.tokenizer, [("nus", "nus")])
    data.batch["rm_scores"] = torch.full(data.batch["responses"].shape, 0.25)

    output = scored(worker, data)

    assert torch.equal(output.batch["token_level_scores"], data.batch["rm_scores"])


def rated(scores: list[float], uids: list[str], **columns: torch.Tensor) -> DataProto:
    token_scores = torch.zeros(len(scores), 3)
    token_scores[:, 1] = torch.tensor(scores)
    mask = torch.tensor([[1, 1, 0]] * len(scores))
    return DataProto.from_dict(
        {"token_level_scores": token_scores, "response_mask": mask, **columns},
        {"uid": numpy.array(uids, dtype=object)},
    )


def test_advantages_compare_the_samples_of_a_prompt(worker: Any) -> None:
    output = worker.compute_advantage(rated([1.0, 0.0, 0.5, 0.5], ["a", "a", "b", "b"]))

    half = 0.5**0.5  # (1 - mean) / standard deviation of (1, 0)
    expected = torch.tensor([[half, half, 0], [-half, -half, 0], [0, 0, 0], [0, 0, 0]])
    torch.testing.assert_close(output.batch["advantages"], expected, atol=1e-5, rtol=0)


def test_a_group_need_not_lie_together(worker: Any) -> None:
    output = worker.compute_advantage(rated([1.0, 0.5, 0.0, 0.5], ["a", "b", "a", "b"]))

    assert output.batch["advantages"][:, 0].sign().tolist() == [1, 0, -1, 0]


def test_remax_takes_off_the_reward_of_the_greedy_answer_to_the_same_prompt(worker: Any) -> None:
    worker.config.algorithm.adv_estimator = "remax"
    samples = rated([1.0, 0.0, 0.5], ["a", "b", "a"])
    greedy = rated([0.25, 0.75], ["b", "a"])

    baselines = worker.compute_baselines(samples, greedy).batch["reward_baselines"]
    samples.batch["reward_baselines"] = baselines
    output = worker.compute_advantage(samples)

    assert baselines.tolist() == [0.75, 0.25, 0.75]
    assert output.batch["advantages"][:, 1].tolist() == [0.25, -0.25, -0.25]


def test_the_kl_divergence_is_taken_off_and_an_adaptive_controller_remembers(
    worker: Any, tmp_path: Path
) -> None:
    worker.config.algorithm.kl_ctrl = {
        **worker.config.algorithm.kl_ctrl,
        "type": "adaptive",
        "kl_coef": 0.5,
        "target_kl": 0.1,
        "horizon": 10,
    }
    worker.kl_in_reward = core_algos.get_kl_controller(worker.config.algorithm.kl_ctrl)
    log_probs = torch.tensor([[-1.0, -1.0, 0.0]] * 2)
    data = rated(
        [1.0, 1.0], ["a", "a"], old_log_probs=log_probs, ref_log_prob=log_probs - log_probs * 0.5
    )

    output = worker.penalize_kl(data)

    # Each token's divergence is -0.5 nats (the simple estimate), its price 0.5.
    assert output.batch["token_level_rewards"][0].tolist() == [0.25, 1.25, 0.0]
    assert output.meta_info["metrics"]["actor/reward_kl_penalty_coeff"] == 0.5
    learned = worker.kl_in_reward.value
    assert learned != 0.5
    worker.save(str(tmp_path / "samples.json"))
    worker.kl_in_reward.value = 0.0
    worker.load(str(tmp_path / "samples.json"))
    assert worker.kl_in_reward.value == learned


def test_generations_are_written_in_the_order_of_the_samples(worker: Any, tmp_path: Path) -> None:
    data = answered(worker.tokenizer, [("nus", "nus"), ("x", "noom"), ("rats", "rats")])
    prompts = worker.tokenizer(["s", "m", "r"], return_tensors="pt")["input_ids"]
    data.batch["prompts"] = prompts
    data.batch["attention_mask"] = torch.cat(
        [torch.ones_like(prompts), data.batch["response_mask"]], dim=1
    )
    data = data.union(scored(worker, data))
    data.non_tensor_batch["uid"] = numpy.array(["0", "1", "2"], dtype=object)
    data.meta_info = {"folder": str(tmp_path / "dump"), "global_steps": 7}

    worker.write_generations(data)

    lines = [json.loads(line) for line in (tmp_path / "dump" / "7.jsonl").read_text().splitlines()]
    assert [line["output"] for line in lines] == ["nus", "x", "rats"]
    assert [line["gts"] for line in lines] == ["nus", "noom", "rats"]
    assert [line["acc"] for line in lines] == [1.0, 0.0, 1.0]
    assert [path.name for path in (tmp_path / "dump").iterdir()] == ["7.jsonl"]


def test_validation_metrics_have_verls_names(worker: Any) -> None:
    data = rated([1.0, 0.0, 0.5], ["a", "b", "c"])
    data.non_tensor_batch["data_source"] = numpy.array(["x", "x", "y"], dtype=object)
    extra = numpy.empty(3, dtype=object)
    extra[:] = [{"acc": 1.0, "pred": "p"}, {"acc": 0.0, "pred": "q"}, {"acc": 0.5, "pred": "r"}]
    data.non_tensor_batch["reward_extra_info"] = extra

    metrics = worker.validate(data).meta_info["metrics"]

    assert metrics["val-core/x/acc/mean@1"] == 0.5
    assert metrics["val-aux/y/reward/mean@1"] == 0.5
