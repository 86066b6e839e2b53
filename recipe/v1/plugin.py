"""What verl loads in each process that knows the model: ``model.external_lib=recipe.v1.plugin``.

Importing this module registers the CPU engine, the rollout ``transformers_server`` and the agent
loop ``seeded_single_turn``.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from verl.utils.device import get_device_name
from verl.workers import engine_workers
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.replica import RolloutReplicaRegistry

from recipe.v1.agent_loop import SeededAgentLoop
from recipe.v1.replica import NAME, TransformersReplica
from recipe.v1.weights import ServerWeights

__all__ = ["SeededAgentLoop", "ServerWeights", "TransformersReplica"]

_workers: Any = engine_workers


def _register_rollout() -> None:
    RolloutReplicaRegistry.register(NAME, lambda: TransformersReplica)
    rollout_base._ROLLOUT_REGISTRY[NAME, "async"] = (
        f"{ServerWeights.__module__}.{ServerWeights.__name__}"
    )


def _use_cpu() -> None:
    # verl would ask torch for the backend "cpu:gloo,cpu:gloo", which torch refuses.
    _workers.initialize_global_process_group_ray = partial(
        _workers.initialize_global_process_group_ray, backend="gloo"
    )
    importlib.import_module("recipe.cpu.engine")  # registers itself


_register_rollout()
if get_device_name() == "cpu":
    _use_cpu()
