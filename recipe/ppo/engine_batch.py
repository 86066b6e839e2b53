"""Between the padded columns of the queue and verl's engine, which computes without padding."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

import torch
from tensordict import TensorDict
from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

# What the engine needs to run a model over prompt and response.
SEQUENCE = (
    "prompts",
    "responses",
    "response_mask",
    "input_ids",
    "attention_mask",
    "position_ids",
)


def without_padding(data: DataProto, temperature: float = 1.0, **settings: Any) -> TensorDict:
    """The columns in the engine's layout, with its settings for this call.

    Args:
        temperature: that logits are divided by; values have none, but the engine asks for it.
    """
    batch = left_right_2_no_padding(DataProto(batch=data.batch).to_tensordict())
    tu.assign_non_tensor(batch, temperature=temperature, **settings)
    return batch


def micro_batch(data: DataProto, configured: int | None) -> dict[str, int]:
    """The setting for batches whose number of rows is no multiple of the configured size: of a
    validation, or the rest of a step that a crash interrupted. Empty where none is configured."""
    return {} if configured is None else {"micro_batch_size_per_gpu": gcd(len(data), configured)}


def of_responses(output: TensorDict, name: str, batch: TensorDict) -> torch.Tensor:
    """(B, R) float32: what the engine says of each response token; 0 after the response."""
    return no_padding_2_padding(tu.get(output, name), batch).float()


def metrics_of(output: TensorDict | None, role: str) -> dict[str, float]:
    """The engine's metrics of an update, named as verl's trainer names them.

    Empty on ranks that have no output.
    """
    found: Mapping[str, Any] = {} if output is None else reduce_metrics(tu.get(output, "metrics"))
    named = {
        name if name.startswith(f"{role}/") else f"{role}/{name}": float(value)
        for name, value in found.items()
    }
    if f"{role}/mfu" in named:
        named[f"perf/mfu/{role}"] = named.pop(f"{role}/mfu")
    return named


def response_attention(data: DataProto) -> torch.Tensor:
    """(B, R): 1 for each token of the response, also for those that tools gave."""
    return data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :]


def at_the_end(scores: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    """(B, R) float32: each row's score at the last token that ``attention`` (B, R) knows."""
    spread = torch.zeros(attention.shape, dtype=torch.float32)
    last = (attention.sum(dim=1) - 1).clamp(min=0)
    spread[torch.arange(len(spread)), last] = scores.float()
    return spread
