"""A short supervised start, so that reinforcement learning has some right answers to begin with.

A random model never spells a word backward, so every reward would be noise. Training on labelled
words is stopped on purpose while accuracy rises: at the first check at which sampled answers to
the validation words are right in a given share. It is a stop rule and not a step count because
accuracy jumps within about 50 steps, and when it does depends on the seed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as functional

from recipe.generation import generate
from recipe.tasks.prompts import decode_responses, encode_chats
from recipe.tasks.spell_backward import Problem, Splits, messages, score_response
from recipe.tasks.tiny_model import ModelSettings, byte_tokenizer, random_model

_REPORT = "warm_start.json"


class WarmStartSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that decides the result; a hash of it names the cached model.

    Attributes:
        seed: of the weights and of the order of the labelled words.
        model: the size of the model.
        batch_size: labelled words a step.
        learning_rate: of AdamW, reached after ``warmup_steps``.
        warmup_steps: linear rise of the learning rate.
        max_steps: end here even if the stop rule never holds.
        stop_accuracy: end when this share of sampled answers to the validation words is right.
        check_every: steps between checks, once the loss is below ``check_below``.
        check_below: a loss in nats a token.
        prompt_length: tokens of a padded prompt.
        response_length: tokens of a sampled answer.
    """

    seed: int = 0
    model: ModelSettings = ModelSettings()
    batch_size: int = 64
    learning_rate: float = 2e-3
    warmup_steps: int = 50
    max_steps: int = 600
    stop_accuracy: float = 0.2
    check_every: int = 5
    check_below: float = 0.7
    prompt_length: int = 80
    response_length: int = 16


class WarmStartReport(msgspec.Struct, frozen=True):
    """How a warm start ended: its steps, and its sampled accuracy on the validation words."""

    steps: int
    accuracy: float | None


def warm_start(
    settings: WarmStartSettings,
    splits: Splits,
    cache: Path,
    progress: Callable[[str], None] = print,
) -> Path:
    """The folder of a model and tokenizer in transformers' format, trained now or found in cache.

    Args:
        settings: what to train; the same settings find the same folder.
        splits: labelled words and validation words.
        cache: folder in which the results of earlier calls lie.
        progress: told one line at each check.
    """
    folder = cache / f"warm_start-{_fingerprint(settings)}"
    if (folder / _REPORT).exists():
        progress(f"warm start: found in {folder}")
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".warm_start-", dir=cache))
    try:
        torch.manual_seed(settings.seed)
        tokenizer = byte_tokenizer()
        model = random_model(settings.model, tokenizer)
        report = _train(model, tokenizer, settings, splits, progress)
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        (unfinished / _REPORT).write_bytes(msgspec.json.encode(report))
        unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _fingerprint(settings: WarmStartSettings) -> str:
    text = json.dumps(msgspec.to_builtins(settings), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _train(
    model: Any,
    tokenizer: Any,
    settings: WarmStartSettings,
    splits: Splits,
    progress: Callable[[str], None],
) -> WarmStartReport:
    prompts, prompt_mask = _encode(tokenizer, splits.warm_start, settings)
    answers, answer_mask = _encode_answers(tokenizer, splits.warm_start)
    ids = torch.cat([prompts, answers], dim=1)
    mask = torch.cat([prompt_mask, answer_mask], dim=1)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=0.01, betas=(0.9, 0.99)
    )
    order = torch.Generator().manual_seed(settings.seed)
    step, accuracy = 0, None
    for step in range(1, settings.max_steps + 1):
        rows = torch.randint(len(ids), (settings.batch_size,), generator=order)
        optimizer.param_groups[0]["lr"] = settings.learning_rate * min(
            1.0, step / settings.warmup_steps
        )
        loss = _answer_loss(model, ids[rows], mask[rows], answers.shape[1])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % settings.check_every == 0 and loss.item() < settings.check_below:
            accuracy = _sampled_accuracy(model, tokenizer, splits.validation, settings)
            progress(f"warm start: step {step}, loss {loss.item():.3f}, accuracy {accuracy:.3f}")
            if accuracy >= settings.stop_accuracy:
                break
        elif step % 50 == 0:
            progress(f"warm start: step {step}, loss {loss.item():.3f}")
    return WarmStartReport(steps=step, accuracy=accuracy)


def _encode(
    tokenizer: Any, problems: Sequence[Problem], settings: WarmStartSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    return encode_chats(tokenizer, [messages(p) for p in problems], settings.prompt_length)


def _encode_answers(
    tokenizer: Any, problems: Sequence[Problem]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers with their end token, padded on the right: ids and mask, (problems, longest)."""
    rows = [
        [*tokenizer(p.answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        for p in problems
    ]
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id, dtype=torch.int64)
    mask = torch.zeros((len(rows), width), dtype=torch.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = 1
    return ids, mask


def _answer_loss(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, answer_length: int
) -> torch.Tensor:
    """Mean cross-entropy over the answer tokens, in nats."""
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(
        ids, attention_mask=mask, position_ids=positions, logits_to_keep=answer_length + 1
    ).logits[:, :-1]
    weight = mask[:, -answer_length:].float()
    token_loss = functional.cross_entropy(
        logits.transpose(1, 2), ids[:, -answer_length:], reduction="none"
    )
    return (token_loss * weight).sum() / weight.sum()


def _sampled_accuracy(
    model: Any, tokenizer: Any, problems: Sequence[Problem], settings: WarmStartSettings
) -> float:
    model.eval()
    prompts, mask = _encode(tokenizer, problems, settings)
    generated = generate(
        model,
        prompts,
        mask,
        max_tokens=settings.response_length,
        temperature=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.train()
    texts = decode_responses(tokenizer, generated.responses, generated.mask)
    scores = [score_response(t, p.answer) for t, p in zip(texts, problems, strict=True)]
    return sum(score == 1.0 for score in scores) / len(scores)
