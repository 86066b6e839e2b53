"""A language model small enough to train on two cores: Qwen2 over single bytes."""

from __future__ import annotations

from typing import Any

import msgspec
from tokenizers import pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

_PAD, _START, _END = "<pad>", "<|im_start|>", "<|im_end|>"
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MAX_TOKENS = 512


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The size of the model (the defaults give 198,336 parameters)."""

    hidden: int = 64
    intermediate: int = 128
    layers: int = 4
    heads: int = 4


def byte_tokenizer() -> Qwen2Tokenizer:
    """One token a byte and no merges: 259 tokens, the first of which are pad, start and end.

    transformers loads the tokenizer of a ``qwen2`` model as Qwen2Tokenizer whatever its file says,
    so this is one too.
    """
    tokens = [_PAD, _START, _END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        unk_token=_PAD,
        pad_token=_PAD,
        eos_token=_END,
        additional_special_tokens=[_START],
        model_max_length=_MAX_TOKENS,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def random_model(settings: ModelSettings, tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """A model with random float32 weights from torch's global generator."""
    special: dict[str, Any] = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=_MAX_TOKENS,
        tie_word_embeddings=False,
        **special,
    )
    return Qwen2ForCausalLM(config)
