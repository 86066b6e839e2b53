"""A training process of verl on the CPU."""

from __future__ import annotations

import importlib
import os

import torch.distributed
from verl.utils.device import get_device_name, get_nccl_backend


def join_on_cpu() -> None:
    """Join the process group and register the engines, where there is no accelerator.

    verl would ask for the backend ``cpu:gloo,cpu:gloo``, which torch refuses. It leaves a process
    group alone that is there.
    """
    if get_device_name() != "cpu":
        return
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            get_nccl_backend(),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            init_method=os.environ.get("DIST_INIT_METHOD"),
        )
    importlib.import_module("recipe.cpu.engine")  # registers itself
