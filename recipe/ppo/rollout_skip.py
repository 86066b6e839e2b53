"""verl's RolloutSkip (``skip.rollout``), in the processes that generate.

A step whose answers are on disk is not generated again. Each process keeps its own part of the
batch, in a folder of its own under ``skip.rollout.dump_dir``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl import DataProto
from verl.utils.skip.skip_manager import SkipManager

_manager: Any = SkipManager


def start(config: DictConfig, rank: int) -> None:
    """Do in this process as ``skip`` in the whole configuration says."""
    own = OmegaConf.masked_copy(config, ["skip", "trainer", "actor_rollout_ref", "data"])
    own.skip.rollout.dump_dir = str(Path(own.skip.rollout.dump_dir) / f"rank_{rank}")
    _manager.init(own)


def note_step(data: DataProto) -> None:
    """Which step the answers are for. Greedy baselines are always generated."""
    _manager.set_step(-1 if data.meta_info.get("greedy") else data.meta_info["global_steps"])
