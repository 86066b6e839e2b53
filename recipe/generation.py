"""Batched sampling from a causal language model with a KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache


@dataclass(frozen=True, slots=True)
class Generated:
    """Responses to a batch of B prompts, at most R tokens each.

    Attributes:
        responses: (B, R) int64, the pad token after the end.
        mask: (B, R) int64, 1 up to and including the end token.
        log_probs: (B, R) float32, of each token under the distribution it was drawn from
            (the plain softmax for greedy decoding); 0 after the end.
    """

    responses: torch.Tensor
    mask: torch.Tensor
    log_probs: torch.Tensor


@torch.no_grad()
def generate(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    max_tokens: int,
    temperature: float,
    eos_token_id: int,
    pad_token_id: int,
    draws: torch.Tensor | None = None,
) -> Generated:
    """Continue left-padded prompts until the end token or ``max_tokens``.

    A prompt that occurs several times is read once: the samples of one GRPO group share it. Not
    with ``draws``: a row's answer then depends on that row and on the shape of the batch, and on
    no other row.

    Args:
        model: a transformers causal language model in eval mode.
        input_ids: (B, P) int64, padded on the left.
        attention_mask: (B, P), 1 where there is a token.
        max_tokens: the response length R.
        temperature: 0 takes the most likely token.
        eos_token_id: ends a response.
        pad_token_id: fills what follows the end.
        draws: (B, R) float64 in [0, 1), which choose the tokens; by default torch's global
            generator does.
    """
    prompts, mask, row_of = _prompts_to_read(input_ids, attention_mask, shared=draws is None)

    cache = DynamicCache()
    kept: dict[str, Any] = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(prompts, attention_mask=mask, position_ids=positions, **kept).logits[:, -1]
    cache.batch_select_indices(row_of)
    logits, mask = logits[row_of], mask[row_of]

    size = len(row_of)
    responses = torch.full((size, max_tokens), pad_token_id, dtype=torch.int64)
    response_mask = torch.zeros((size, max_tokens), dtype=torch.int64)
    log_probs = torch.zeros((size, max_tokens), dtype=torch.float32)
    running = torch.ones(size, dtype=torch.bool)
    for step in range(max_tokens):
        draw = None if draws is None else draws[:, step]
        token, log_prob = _choose(logits.float(), temperature, draw)
        responses[:, step] = torch.where(running, token, pad_token_id)
        response_mask[:, step] = running
        log_probs[:, step] = torch.where(running, log_prob, 0.0)
        running &= token != eos_token_id
        if step + 1 == max_tokens or not running.any():
            break
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        positions = mask.sum(dim=1, keepdim=True) - 1
        following = responses[:, step : step + 1]
        logits = model(following, attention_mask=mask, position_ids=positions, **kept).logits[:, -1]
    return Generated(responses, response_mask, log_probs)


def _prompts_to_read(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, *, shared: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompts, their mask, and for each row of the batch (B,) which of these is its own."""
    mask = attention_mask.to(input_ids.dtype)
    if not shared:
        return input_ids, mask, torch.arange(len(input_ids))
    both = torch.stack([input_ids, mask], dim=1)
    distinct, row_of = torch.unique(both, dim=0, return_inverse=True)
    prompts, mask = distinct.unbind(dim=1)
    return prompts, mask, row_of


def _choose(
    logits: torch.Tensor, temperature: float, draw: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row of (B, V) logits, and its log probability."""
    if temperature == 0:
        log_probs = logits.log_softmax(dim=-1)
        token = log_probs.argmax(dim=-1)
    else:
        log_probs = (logits / temperature).log_softmax(dim=-1)
        token = _sample(log_probs.exp(), draw)
    return token, log_probs.gather(1, token[:, None])[:, 0]


def _sample(probabilities: torch.Tensor, draw: torch.Tensor | None) -> torch.Tensor:
    """One token a row of (B, V); a draw (B,) picks it from the cumulated probabilities."""
    if draw is None:
        return torch.multinomial(probabilities, num_samples=1)[:, 0]
    cumulated = probabilities.double().cumsum(dim=-1)
    # The sum is 1 but for rounding, and a draw is less than 1.
    return (cumulated <= draw[:, None] * cumulated[:, -1:]).sum(dim=-1)
