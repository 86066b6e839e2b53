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
from recipe.ppo.prompts import Prompts, TrainingPrompts
from recipe.ppo.queue_step import QueueStep
from recipe.tasks.spell_backward import Problem, write_parquet
from recipe.tasks.tiny_model import byte_tokenizer
from tq_redis import Client, ConfigError

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


FIELDS = ("raw_prompt", "reward_model", "extra_info")


def read(data: DictConfig, cache: Path) -> Prompts:
    return Prompts(data, byte_tokenizer(), None, FIELDS, cache)


def batches(prompts: TrainingPrompts, count: int) -> list[list[Any]]:
    return [
        [chat[0]["content"] for chat in batch["raw_prompt"]] for batch in islice(prompts, count)
    ]


def test_batches_go_on_over_epochs_in_a_seeded_order(data: DictConfig, tmp_path: Path) -> None:
    first = batches(read(data, tmp_path).training(), 6)
    second = batches(read(data, tmp_path).training(), 6)

    assert first == second
    assert len({question for batch in first[:2] for question in batch}) == 8


@pytest.mark.parametrize("done", [1, 2, 3])
def test_a_checkpoint_continues_with_the_next_batch(
    data: DictConfig, tmp_path: Path, done: int
) -> None:
    """Also between two epochs: an epoch has two batches here."""
    whole = read(data, tmp_path).training()
    expected = batches(whole, 6)
    before = read(data, tmp_path).training()
    running = iter(before)
    for _ in range(done):
        next(running)
    torch.save(before.state_dict(), tmp_path / "data.pt")

    after = read(data, tmp_path).training()
    after.load_state_dict(torch.load(tmp_path / "data.pt", weights_only=False))

    assert batches(after, 6 - done) == expected[done:]


def test_too_few_prompts_for_a_batch_are_refused(data: DictConfig, tmp_path: Path) -> None:
    data.train_batch_size = 64

    with pytest.raises(ConfigError, match="has 10 prompts, a batch needs 64"):
        read(data, tmp_path).training()


def test_a_held_out_set_is_read_in_its_order_in_batches(data: DictConfig, tmp_path: Path) -> None:
    data.val_batch_size = 4

    found = read(data, tmp_path).held_out(data.train_files, -1)

    assert [len(columns["raw_prompt"]) for columns in found] == [4, 4, 2]
    answers = [row["ground_truth"] for columns in found for row in columns["reward_model"]]
    assert answers == [word[::-1] for word in WORDS]


def test_only_what_tasks_read_is_taken_from_the_dataset(data: DictConfig, tmp_path: Path) -> None:
    (columns,) = read(data, tmp_path).held_out(data.train_files, 3)

    assert sorted(columns) == sorted(FIELDS)
    assert read(data, tmp_path).held_out(None, -1) == []


CURRICULUM = """
from torch.utils.data import SequentialSampler

class LongestLast(SequentialSampler):
    reads = ("uid", "length")

    def __init__(self, dataset, config):
        super().__init__(dataset)
        self.seen = []

    def update(self, batch):
        self.seen.append(list(batch.non_tensor_batch["length"]))
"""


def test_a_sampler_of_ones_own_sees_the_columns_that_it_names(
    data: DictConfig, tmp_path: Path, client: Client
) -> None:
    (tmp_path / "curriculum.py").write_text(CURRICULUM)
    data.sampler = {"path": str(tmp_path / "curriculum.py"), "name": "LongestLast"}

    prompts = read(data, tmp_path).training()

    assert batches(prompts, 1)[0] == [f"Spell: {word}" for word in WORDS[:4]]
    (watcher,) = prompts.watchers
    with QueueStep(client, "train_1") as step:
        step.put({"length": [1, 2], "other": [0, 0]}, ["a", "b"])
        step.run("curriculum", watcher.see, watcher)
    sampler: Any = prompts._loader.sampler
    assert sampler.seen == [[1, 2]]
