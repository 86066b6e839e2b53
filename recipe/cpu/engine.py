"""verl's FSDP2 engine on the CPU. Import this module to register it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class CPUEngine(FSDPEngineWithLMHead):
    """Unchanged math: verl lists its engine for CUDA and NPU only, but FSDP2 runs over gloo."""

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        with _unpinned_offload():
            return super()._build_fsdp_module(module)


@contextmanager
def _unpinned_offload() -> Iterator[None]:
    """verl keeps a reference model in pinned host memory, and pinning needs an accelerator."""
    policy: Any = transformer_impl.CPUOffloadPolicy
    transformer_impl.CPUOffloadPolicy = lambda pin_memory=False: policy(pin_memory=False)
    try:
        yield
    finally:
        transformer_impl.CPUOffloadPolicy = policy
