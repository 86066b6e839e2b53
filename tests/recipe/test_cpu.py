"""verl on a machine without an accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from verl.plugin.platform import get_platform
from verl.utils.device import get_device_name, get_nccl_backend, get_torch_device
from verl.utils.torch_functional import logprobs_from_logits
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl

from recipe.cpu.engine import CPUEngine, _exchanged, _logprobs_from_logits

needs_cpu = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="verl chooses the accelerator of this machine"
)


@needs_cpu
def test_verl_chooses_the_cpu() -> None:
    assert get_device_name() == "cpu"
    assert get_nccl_backend() == "gloo"
    assert torch.ones(1, device=get_platform().current_device()).device.type == "cpu"


@needs_cpu
def test_the_engine_is_found_for_the_cpu() -> None:
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is CPUEngine


@needs_cpu
def test_the_device_module_answers_what_verl_asks_of_cuda() -> None:
    device = get_torch_device()

    assert device.max_memory_allocated() > 0
    assert device.mem_get_info() == (0, 0)
    assert device.is_available()  # torch.cpu's own
    device.empty_cache()


def test_log_probs_of_all_tokens_at_once_are_verls() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(50, 259), torch.randint(259, (50,))

    ours = _logprobs_from_logits(logits, labels, inplace_backward=False)

    torch.testing.assert_close(ours, logprobs_from_logits(logits, labels))


def test_the_exchange_ends_with_the_block_also_after_an_error() -> None:
    implementation: Any = transformer_impl
    original = implementation.logprobs_from_logits

    with (
        pytest.raises(ArithmeticError),
        _exchanged(implementation, "logprobs_from_logits", _logprobs_from_logits),
    ):
        assert implementation.logprobs_from_logits is _logprobs_from_logits
        raise ArithmeticError

    assert implementation.logprobs_from_logits is original
