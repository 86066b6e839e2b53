"""Generation inside the training process, as a verl rollout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl import DataProto
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.base import BaseRollout

from recipe.generation import generate

NAME = "transformers"


class TransformersRollout(BaseRollout):
    """A second copy of the actor's model that generates with a KV cache.

    verl pushes the actor's weights into it with :meth:`update_weights`; until then its weights are
    random. Chosen with ``actor_rollout_ref.rollout.name=transformers``.

    Raises:
        ValueError: a way of sampling is configured that this rollout does not have.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        if self.config.top_k != -1 or self.config.top_p != 1:
            raise ValueError("The transformers rollout samples by temperature only")
        if self.config.tensor_model_parallel_size != 1:
            raise ValueError("The transformers rollout holds the whole model in each process")
        hf_config: Any = self.model_config.hf_config
        model: Any = AutoModelForCausalLM.from_config(hf_config)
        self.model = model.requires_grad_(False).eval()

    async def resume(self, tags: list[str]) -> None:
        """Nothing to do: the weights stay in memory."""

    async def release(self) -> None:
        """Nothing to do: the weights stay in memory."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        **unused: Any,
    ) -> None:
        """Copy the actor's weights.

        Every rank must consume ``weights`` to the end: gathering a sharded tensor is a collective.

        Raises:
            ValueError: the weights come in another wire format, or an adapter without its model.
            KeyError: the actor has a weight that this model has not.
        """
        if wire_format != "named_tensors":
            raise ValueError(f"The transformers rollout cannot read {wire_format!r} weights")
        if unused.get("peft_config") is not None:
            raise ValueError(
                "The transformers rollout has no adapters: set actor_rollout_ref.model.lora.merge"
            )
        own = self.model.state_dict()
        for name, weight in weights:
            own[name].copy_(weight)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Continue left-padded prompts.

        Args:
            prompts: ``input_ids`` and ``attention_mask``, both (B, P). ``meta_info["temperature"]``
                replaces the configured one; 0 is greedy.

        Returns:
            ``prompts`` (B, P), ``responses`` (B, R), ``response_mask`` (B, R), ``input_ids``,
            ``attention_mask`` and ``position_ids`` (B, P + R), all int64; ``rollout_log_probs``
            (B, R) float32.
        """
        prompt_ids, prompt_mask = prompts.batch["input_ids"], prompts.batch["attention_mask"]
        generated = generate(
            self.model,
            prompt_ids,
            prompt_mask,
            max_tokens=self.config.response_length,
            temperature=prompts.meta_info.get("temperature", self.config.temperature),
            eos_token_id=self.model_config.tokenizer.eos_token_id,
            pad_token_id=self.model_config.tokenizer.pad_token_id,
        )
        attention_mask = torch.cat([prompt_mask, generated.mask], dim=1)
        columns = {
            "prompts": prompt_ids,
            "responses": generated.responses,
            "response_mask": generated.mask,
            "input_ids": torch.cat([prompt_ids, generated.responses], dim=1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),
            "rollout_log_probs": generated.log_probs,
        }
        return DataProto(batch=TensorDict(columns, batch_size=len(prompt_ids)))


def register() -> None:
    """Make verl find this rollout under the name ``transformers``."""
    rollout_base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.{TransformersRollout.__name__}"
