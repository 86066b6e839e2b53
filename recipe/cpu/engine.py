"""verl's FSDP2 engine on the CPU. Import this module to register it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from verl.utils.torch_functional import logprobs_from_logits_naive
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl

_implementation: Any = transformer_impl
_FSDPEngine: Any = transformer_impl.FSDPEngineWithLMHead


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class CPUEngine(_FSDPEngine):
    """Unchanged math: verl lists its engine for CUDA and NPU only, but FSDP2 runs over gloo.

    Two functions that the engine calls are exchanged while it calls them.
    """

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        # verl keeps a reference model in pinned host memory, and pinning needs an accelerator.
        policy = _implementation.CPUOffloadPolicy
        with _exchanged("CPUOffloadPolicy", lambda pin_memory=False: policy(pin_memory=False)):
            return super()._build_fsdp_module(module)

    def prepare_model_outputs(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Log-probabilities of all tokens at once.

        Without flash attention verl takes them token by token, to save memory with large
        vocabularies: 21,000 operators and as many backward nodes an update of the default sizes.
        """
        with _exchanged("logprobs_from_logits", _logprobs_from_logits):
            return super().prepare_model_outputs(*args, **kwargs)


def _logprobs_from_logits(
    logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True
) -> torch.Tensor:
    return logprobs_from_logits_naive(logits, labels)


@contextmanager
def _exchanged(name: str, replacement: Any) -> Generator[None]:
    """Let the engine's module see ``replacement`` under ``name`` for the length of the block."""
    original = getattr(_implementation, name)
    setattr(_implementation, name, replacement)
    try:
        yield
    finally:
        setattr(_implementation, name, original)
