"""Rewards and advantages on plain batches, as verl would pass them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hydra import compose, initialize_config_dir
from verl import DataProto

import recipe.ppo
from recipe.ppo.sample_worker import SampleWorker
from recipe.tasks.spell_backward import DATA_SOURCE
from recipe.tasks.tiny_model import ModelSettings, byte_tokenizer, random_model

WIDTH = 10


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    variables = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    tokenizer = byte_tokenizer()
    random_model(ModelSettings(16, 32, 1, 1), tokenizer).config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    folder = Path(str(recipe.ppo.__file__)).parent / "config"
    with initialize_config_dir(str(folder), version_base=None):
        config = compose("ppo")
    return SampleWorker(config, str(tmp_path))


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
    return DataProto.from_dict({"responses": responses, "response_mask": mask}, columns)


def test_the_score_stands_at_the_last_token_of_the_response(worker: Any) -> None:
    output = worker.compute_reward(answered(worker.tokenizer, [("nus", "nus"), ("nxx", "nus")]))

    scores = output.batch["token_level_scores"]
    assert scores.dtype == torch.float32
    assert scores[:, 3].tolist() == pytest.approx([1.0, 1 / 3])
    assert scores.sum().item() == pytest.approx(4 / 3)
    assert output.batch["acc"].tolist() == [1.0, 0.0]
    assert output.meta_info["metrics"]["acc/mean"] == 0.5


def test_an_overlong_answer_is_not_exact_although_float32_would_round_it(worker: Any) -> None:
    output = worker.compute_reward(answered(worker.tokenizer, [("abcdefx", "abcdef")]))

    assert output.batch["token_level_scores"].sum().item() == 1.0
    assert output.batch["acc"].item() == 0.0


def advantages(worker: Any, scores: list[float], uids: list[str]) -> DataProto:
    token_scores = torch.zeros(len(scores), 3)
    token_scores[:, 1] = torch.tensor(scores)
    mask = torch.tensor([[1, 1, 0]] * len(scores))
    return worker.compute_advantage(
        DataProto.from_dict(
            {"token_level_scores": token_scores, "response_mask": mask},
            {"uid": numpy.array(uids, dtype=object)},
        )
    )


def test_advantages_compare_the_samples_of_a_prompt(worker: Any) -> None:
    output = advantages(worker, [1.0, 0.0, 0.5, 0.5], ["a", "a", "b", "b"])

    half = 0.5**0.5  # (1 - mean) / standard deviation of (1, 0)
    expected = torch.tensor([[half, half, 0], [-half, -half, 0], [0, 0, 0], [0, 0, 0]])
    torch.testing.assert_close(output.batch["advantages"], expected, atol=1e-5, rtol=0)
    assert output.meta_info["metrics"]["groups/with_signal"] == 0.5


def test_a_group_need_not_lie_together(worker: Any) -> None:
    output = advantages(worker, [1.0, 0.5, 0.0, 0.5], ["a", "b", "a", "b"])

    assert output.batch["advantages"][:, 0].sign().tolist() == [1, 0, -1, 0]
