"""Generation with a cache against the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recipe.generation import generate
from recipe.tasks.prompts import decode_responses, encode_chats
from recipe.tasks.tiny_model import ModelSettings, byte_tokenizer, random_model

CHATS = [
    [{"role": "user", "content": "druse"}],
    [{"role": "user", "content": "spell"}],
    [{"role": "user", "content": "druse"}],
    [{"role": "user", "content": "no"}],
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    torch.manual_seed(0)
    settings = ModelSettings(hidden=32, intermediate=64, layers=2, heads=2)
    return random_model(settings, tokenizer).eval()


def run(model: Any, tokenizer: Any, temperature: float, eos: int | None = None) -> Any:
    ids, mask = encode_chats(tokenizer, CHATS, 48)
    generated = generate(
        model,
        ids,
        mask,
        max_tokens=6,
        temperature=temperature,
        eos_token_id=tokenizer.eos_token_id if eos is None else eos,
        pad_token_id=tokenizer.pad_token_id,
    )
    return ids, mask, generated


def log_probs_without_cache(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, generated: Any, temperature: float
) -> torch.Tensor:
    full = torch.cat([ids, generated.responses], dim=1)
    full_mask = torch.cat([mask, generated.mask], dim=1)
    positions = (full_mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(full, attention_mask=full_mask, position_ids=positions).logits
    before = logits[:, ids.shape[1] - 1 : -1] / temperature
    chosen = generated.responses[..., None]
    return before.log_softmax(dim=-1).gather(2, chosen)[..., 0] * generated.mask


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_model_without_a_cache(
    model: Any, tokenizer: Any, temperature: float
) -> None:
    ids, mask, generated = run(model, tokenizer, temperature)

    expected = log_probs_without_cache(model, ids, mask, generated, temperature)

    torch.testing.assert_close(generated.log_probs, expected, atol=1e-5, rtol=0)


def test_greedy_takes_the_most_likely_token_and_repeats_itself(model: Any, tokenizer: Any) -> None:
    _, _, first = run(model, tokenizer, 0.0)
    _, _, second = run(model, tokenizer, 0.0)

    assert torch.equal(first.responses, second.responses)
    assert torch.equal(first.responses[0], first.responses[2])


def test_samples_of_the_same_prompt_differ(model: Any, tokenizer: Any) -> None:
    torch.manual_seed(1)

    _, _, generated = run(model, tokenizer, 1.0)

    assert not torch.equal(generated.responses[0], generated.responses[2])


def test_nothing_follows_the_end_token(model: Any, tokenizer: Any) -> None:
    _, _, free = run(model, tokenizer, 0.0)
    end = int(free.responses[0, 1])
    first = free.responses[0].tolist().index(end)

    _, _, generated = run(model, tokenizer, 0.0, eos=end)

    assert generated.mask[0].tolist() == [1] * (first + 1) + [0] * (5 - first)
    assert (generated.responses[0, first + 1 :] == tokenizer.pad_token_id).all()
    assert (generated.log_probs[0, first + 1 :] == 0).all()


def test_a_prompt_over_the_limit_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="the limit is 8"):
        encode_chats(tokenizer, CHATS, 8)


def test_text_survives_the_tokenizer(tokenizer: Any) -> None:
    ids = torch.tensor([[*tokenizer("esurd")["input_ids"], tokenizer.eos_token_id]])

    assert decode_responses(tokenizer, ids, torch.ones_like(ids)) == ["esurd"]
