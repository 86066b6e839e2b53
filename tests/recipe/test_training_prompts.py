"""Prompts from verl's dataset, and the place in it that a checkpoint keeps."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

import recipe.ppo
from recipe.ppo.prompts import TrainingPrompts, read_prompts, repeat
from recipe.tasks.spell_backward import Problem, write_parquet
from recipe.tasks.tiny_model import byte_tokenizer

WORDS = ["sun", "moon", "star", "druse", "comet", "orbit", "phase", "light", "night", "dusk"]


@pytest.fixture
def data(tmp_path: Path) -> DictConfig:
    problems = [Problem(f"Spell: {word}", word[::-1]) for word in WORDS]
    write_parquet(problems, "train", tmp_path / "train.parquet")
    folder = Path(str(recipe.ppo.__file__)).parent / "config"
    with initialize_config_dir(str(folder), version_base=None):
        config = compose(
            "ppo",
            overrides=[
                f"data.train_files={tmp_path}/train.parquet",
                "data.train_batch_size=4",
                "data.max_prompt_length=48",
            ],
        )
    return config.data


def batches(prompts: TrainingPrompts, count: int) -> list[list[Any]]:
    return [
        [chat[0]["content"] for chat in batch["raw_prompt"]] for batch in islice(prompts, count)
    ]


def test_batches_go_on_over_epochs_in_a_seeded_order(data: DictConfig, tmp_path: Path) -> None:
    first = batches(TrainingPrompts(data, byte_tokenizer(), tmp_path), 6)
    second = batches(TrainingPrompts(data, byte_tokenizer(), tmp_path), 6)

    assert first == second
    assert len({question for batch in first[:2] for question in batch}) == 8


@pytest.mark.parametrize("done", [1, 2, 3])
def test_a_checkpoint_continues_with_the_next_batch(
    data: DictConfig, tmp_path: Path, done: int
) -> None:
    """Also between two epochs: an epoch has two batches here."""
    whole = TrainingPrompts(data, byte_tokenizer(), tmp_path)
    expected = batches(whole, 6)
    before = TrainingPrompts(data, byte_tokenizer(), tmp_path)
    running = iter(before)
    for _ in range(done):
        next(running)
    torch.save(before.state_dict(), tmp_path / "data.pt")

    after = TrainingPrompts(data, byte_tokenizer(), tmp_path)
    after.load_state_dict(torch.load(tmp_path / "data.pt", weights_only=False))

    assert batches(after, 6 - done) == expected[done:]


def test_too_few_prompts_for_a_batch_are_refused(data: DictConfig, tmp_path: Path) -> None:
    data.train_batch_size = 64

    with pytest.raises(ValueError, match="has 10 prompts, a batch needs 64"):
        TrainingPrompts(data, byte_tokenizer(), tmp_path)


def test_a_held_out_set_is_read_in_its_order(data: DictConfig, tmp_path: Path) -> None:
    columns = read_prompts(data.train_files, data, byte_tokenizer(), tmp_path, -1)

    assert [row["ground_truth"] for row in columns["reward_model"]] == [w[::-1] for w in WORDS]


def test_repeat_keeps_the_samples_of_a_prompt_together() -> None:
    columns = repeat({"raw_prompt": ["a", "b"]}, ["1", "2"], 2)

    assert columns == {"raw_prompt": ["a", "a", "b", "b"], "uid": ["1", "1", "2", "2"]}
