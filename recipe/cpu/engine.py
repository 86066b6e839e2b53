"""verl's FSDP2 engines on the CPU. Import this module to register them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from transformers import AutoModelForTokenClassification
from verl.utils import model as model_loading
from verl.utils.torch_functional import logprobs_from_logits_naive
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl

_implementation: Any = transformer_impl
_FSDPEngine: Any = transformer_impl.FSDPEngineWithLMHead
_FSDPValueEngine: Any = transformer_impl.FSDPEngineWithValueHead


def _unpinned_offload(pin_memory: bool = False) -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return CPUOffloadPolicy(pin_memory=False)


def _logprobs_from_logits(
    logits: torch.Tensor, labels: torch.Tensor, inplace_backward: bool = True
) -> torch.Tensor:
    return logprobs_from_logits_naive(logits, labels)


def _load_value_model(
    local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool
) -> Any:
    return AutoModelForTokenClassification.from_pretrained(
        local_path,
        torch_dtype=torch_dtype,
        config=model_config,
        attn_implementation="sdpa",
        trust_remote_code=trust_remote_code,
    )


class _OnCPU:
    """Unchanged math: verl lists its engines for CUDA and NPU only, but FSDP2 runs over gloo.

    Functions that need an accelerator are exchanged while an engine calls them.
    """

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        # verl keeps a reference model in pinned host memory.
        with _exchanged(_implementation, "CPUOffloadPolicy", _unpinned_offload):
            untyped: Any = super()
            return untyped._build_fsdp_module(module)

    def _build_module(self) -> torch.nn.Module:
        # verl asks for flash attention, whatever the model's configuration says.
        with _exchanged(model_loading, "load_valuehead_model", _load_value_model):
            untyped: Any = super()
            return untyped._build_module()

    def prepare_model_outputs(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Log-probabilities of all tokens at once.

        Without flash attention verl takes them token by token, to save memory with large
        vocabularies: 21,000 operators and as many backward nodes an update of the default sizes.
        """
        with _exchanged(_implementation, "logprobs_from_logits", _logprobs_from_logits):
            untyped: Any = super()
            return untyped.prepare_model_outputs(*args, **kwargs)


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class CPUEngine(_OnCPU, _FSDPEngine):
    """Of the actor and the reference model."""


@EngineRegistry.register(model_type="value_model", backend="fsdp2", device="cpu")
class CPUValueEngine(_OnCPU, _FSDPValueEngine):
    """Of the critic and the reward model: one number a token."""


@contextmanager
def _exchanged(module: ModuleType, name: str, replacement: Any) -> Generator[None]:
    """Let ``module`` have ``replacement`` under ``name`` for the length of the block."""
    original = getattr(module, name)
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)
