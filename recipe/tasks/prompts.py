"""Chats to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Chat = Sequence[dict[str, str]]


def encode_chats(
    tokenizer: Any, chats: Sequence[Chat], width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids that ask each chat, padded on the left to ``width``.

    Returns:
        ids (B, width) int64, and their mask (B, width) int64.

    Raises:
        ValueError: a chat is longer than ``width`` tokens.
    """
    ids = torch.full((len(chats), width), tokenizer.pad_token_id, dtype=torch.int64)
    mask = torch.zeros((len(chats), width), dtype=torch.int64)
    for row, chat in enumerate(chats):
        text = tokenizer.apply_chat_template(list(chat), add_generation_prompt=True, tokenize=False)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(tokens) > width:
            raise ValueError(f"A prompt has {len(tokens)} tokens, the limit is {width}: {text!r}")
        ids[row, width - len(tokens) :] = torch.tensor(tokens)
        mask[row, width - len(tokens) :] = 1
    return ids, mask


def decode_responses(tokenizer: Any, responses: torch.Tensor, mask: torch.Tensor) -> list[str]:
    """The text of each response, without its special tokens.

    Args:
        responses: (B, R) token ids.
        mask: (B, R), 1 where there is a token; a prefix of each row.
    """
    lengths = mask.sum(dim=1).tolist()
    return [
        tokenizer.decode(row[:length].tolist(), skip_special_tokens=True)
        for row, length in zip(responses, lengths, strict=True)
    ]
