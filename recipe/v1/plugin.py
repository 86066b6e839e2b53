"""What verl loads in each process that knows the model: ``model.external_lib=recipe.v1.plugin``.

Importing this module registers the CPU engine, the rollout ``transformers_server``, the checkpoint
engine ``gloo`` and the agent loop ``seeded_single_turn``.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.utils import fsdp_utils
from verl.utils.device import get_device_name
from verl.workers import engine_workers
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.replica import RolloutReplicaRegistry

from recipe.v1.agent_loop import SeededAgentLoop
from recipe.v1.checkpoint_engine import BACKEND, GlooCheckpointEngine
from recipe.v1.replica import NAME, TransformersReplica
from recipe.v1.weights import ServerWeights

__all__ = ["GlooCheckpointEngine", "SeededAgentLoop", "ServerWeights", "TransformersReplica"]

_engines: Any = CheckpointEngineRegistry
_workers: Any = engine_workers
_fsdp: Any = fsdp_utils
_save_to_cpu: Any = fsdp_utils.fsdp2_sharded_save_to_cpu


def _register_rollout() -> None:
    RolloutReplicaRegistry.register(NAME, lambda: TransformersReplica)
    rollout_base._ROLLOUT_REGISTRY[NAME, "async"] = (
        f"{ServerWeights.__module__}.{ServerWeights.__name__}"
    )
    _engines.register(BACKEND)(GlooCheckpointEngine)


def _use_cpu() -> None:
    # verl would ask torch for the backend "cpu:gloo,cpu:gloo", which torch refuses.
    _workers.initialize_global_process_group_ray = partial(
        _workers.initialize_global_process_group_ray, backend="gloo"
    )
    _fsdp.fsdp2_sharded_save_to_cpu = copied_to_cpu
    importlib.import_module("recipe.cpu.engine")  # registers itself


def copied_to_cpu(model: Any) -> Any:
    """What verl keeps of a model that it will come back to, in the mode ``separate_async``.

    verl moves the weights to the CPU. Where they are there already, that gives the weights
    themselves, which training goes on to change.
    """
    shards, layout = _save_to_cpu(model)
    copies = {name: (shard.clone(), spec) for name, (shard, spec) in shards.items()}
    return copies, layout


_register_rollout()
if get_device_name() == "cpu":
    _use_cpu()
