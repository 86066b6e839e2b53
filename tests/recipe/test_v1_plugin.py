"""What verl finds exchanged on a machine without an accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from verl.utils import fsdp_utils

from recipe.v1 import plugin

_distributed: Any = torch.distributed


@pytest.fixture
def one_process() -> Iterator[DeviceMesh]:
    store = _distributed.HashStore()
    _distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    _distributed.destroy_process_group()


def test_weights_that_verl_keeps_do_not_change_with_the_model(one_process: DeviceMesh) -> None:
    fsdp: Any = fsdp_utils
    model: Any = fully_shard(torch.nn.Linear(2, 2), mesh=one_process)
    before = [weight.full_tensor().clone() for weight in model.parameters()]

    kept = fsdp.fsdp2_sharded_save_to_cpu(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1)
    fsdp.fsdp2_sharded_load_from_cpu(model, *kept)

    assert fsdp.fsdp2_sharded_save_to_cpu is plugin.copied_to_cpu
    for weight, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(weight.full_tensor(), value)
