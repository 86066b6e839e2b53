"""Answers that are on disk are not generated again, in the process that generated them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from verl import DataProto
from verl.utils.skip.skip_manager import SkipManager

import recipe.ppo
from recipe.ppo import rollout_skip

_skip: Any = SkipManager


class Rollout:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    @_skip.annotate(role="rollout")
    def generate(self, prompts: DataProto) -> DataProto:
        self.asked += 1
        return DataProto.from_dict({"responses": torch.full((2,), self.asked)})

    def answer(self, **info: Any) -> list[int]:
        prompts = DataProto.from_dict({"x": torch.zeros(2)}, meta_info=info)
        rollout_skip.note_step(prompts)
        return self.generate(prompts).batch["responses"].tolist()


@pytest.fixture
def config(tmp_path: Path) -> Iterator[DictConfig]:
    folder = Path(str(recipe.ppo.__file__)).parent / "config"
    settings = [
        "skip.rollout.enable=true",
        "skip.rollout.steps=[1,2]",
        f"skip.rollout.dump_dir={tmp_path}",
    ]
    with initialize_config_dir(str(folder), version_base=None):
        config = compose("ppo", overrides=settings)
    OmegaConf.resolve(config)
    yield config
    _skip.skip_instances = {}


def test_a_step_is_generated_once(config: DictConfig) -> None:
    rollout = Rollout()
    rollout_skip.start(config, rank=0)
    assert rollout.answer(global_steps=1) == [1, 1]
    rollout_skip.start(config, rank=0)  # the next run
    assert rollout.answer(global_steps=1) == [1, 1]
    assert rollout.answer(global_steps=2) == [2, 2]
    assert rollout.answer(global_steps=3) == [3, 3]  # a step that is not named
    assert rollout.answer(global_steps=3) == [4, 4]


def test_each_process_keeps_its_own_part(config: DictConfig) -> None:
    rollout = Rollout()
    for rank in (0, 1, 0):
        rollout_skip.start(config, rank)
        assert rollout.answer(global_steps=1) == [rank + 1] * 2


def test_validation_and_greedy_baselines_are_always_generated(config: DictConfig) -> None:
    rollout = Rollout()
    rollout_skip.start(config, rank=0)
    for info in ({"validate": True}, {"greedy": True}):
        before = rollout.asked
        for _ in range(2):
            rollout.answer(global_steps=1, **info)
        assert rollout.asked == before + 2
