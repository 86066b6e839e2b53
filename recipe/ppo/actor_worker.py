"""The trained model: generation, log-probabilities and updates on verl's engine workers."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed
from tensordict import TensorDict
from verl import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils as tu
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.utils.device import get_device_name, get_nccl_backend
from verl.utils.metric import reduce_metrics
from verl.utils.torch_functional import masked_mean
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from recipe.ppo import rollout
from recipe.tasks.prompts import encode_chats
from tq_redis.bridge import meta_dispatch, tqbridge

# What verl's engine needs to run the model over prompt and response.
SEQUENCE = (
    "prompts",
    "responses",
    "response_mask",
    "input_ids",
    "attention_mask",
    "position_ids",
)

# verl makes these at run time, or without types.
_Dispatch: Any = Dispatch
_Worker: Any = ActorRolloutRefWorker


class ActorWorker(_Worker):
    """verl's hybrid worker with the columns that each of its tasks reads and writes.

    Shapes: B rows, P prompt and R response tokens.
    """

    @register(dispatch_mode=_Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the model, its optimizer and the rollout, and seed this process."""
        rollout.register()
        if get_device_name() == "cpu":
            # verl would ask for the backend "cpu:gloo,cpu:gloo", which torch refuses.
            torch.distributed.init_process_group(
                get_nccl_backend(), rank=self.rank, world_size=self.world_size
            )
            importlib.import_module("recipe.cpu.engine")  # registers itself
        super().init_model()
        self.model_config = self.rollout.model_config
        # Each rank draws its own samples; verl's checkpoint keeps this generator's state.
        torch.manual_seed(self.config.rollout.seed + self.rank)

    @register(dispatch_mode=meta_dispatch("actor"))
    @tqbridge(reads=("raw_prompt",), writes=(*SEQUENCE, "rollout_log_probs"))
    def generate_sequences(self, data: DataProto) -> DataProto:
        """Answer chats. ``meta_info["validate"]`` decodes as ``rollout.val_kwargs`` says."""
        ids, mask = encode_chats(
            self.model_config.tokenizer,
            data.non_tensor_batch["raw_prompt"].tolist(),
            self.config.rollout.prompt_length,
        )
        prompts = DataProto.from_dict({"input_ids": ids, "attention_mask": mask})
        prompts.meta_info["temperature"] = self._temperature(data.meta_info.get("validate", False))
        output = self.rollout.generate_sequences(prompts)
        lengths = output.batch["response_mask"].sum(dim=1).float()
        output.meta_info = {"metrics": {"response_length/mean": lengths.mean().item()}}
        return output

    def _temperature(self, validate: bool) -> float:
        if not validate:
            return self.config.rollout.temperature
        greedy = not self.config.rollout.val_kwargs.do_sample
        return 0.0 if greedy else self.config.rollout.val_kwargs.temperature

    @register(dispatch_mode=meta_dispatch("actor"))
    @tqbridge(reads=(*SEQUENCE, "rollout_log_probs"), writes=("old_log_probs",))
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """(B, R) float32 log-probabilities of the responses under the actor, in nats.

        The metrics compare them with the rollout's own: with the same weights they agree to
        rounding.
        """
        batch = self._without_padding(data, calculate_entropy=True, compute_loss=False)
        output = self.actor.infer_batch(batch)
        entropy = no_padding_2_padding(tu.get(output, "entropy"), batch)
        log_probs = no_padding_2_padding(tu.get(output, "log_probs"), batch).float()
        data.batch["old_log_probs"] = log_probs
        metrics = calculate_debug_metrics(data)
        metrics["actor/entropy"] = masked_mean(entropy, data.batch["response_mask"]).item()
        return DataProto.from_dict({"old_log_probs": log_probs}, meta_info={"metrics": metrics})

    @register(dispatch_mode=meta_dispatch("ref"))
    @tqbridge(reads=SEQUENCE, writes=("ref_log_prob",))
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """(B, R) float32 log-probabilities of the responses under the reference model, in nats."""
        batch = self._without_padding(data, calculate_entropy=False, compute_loss=False)
        output = self.ref.infer_batch(batch)
        log_probs = no_padding_2_padding(tu.get(output, "log_probs"), batch).float()
        return DataProto.from_dict({"ref_log_prob": log_probs})

    @register(dispatch_mode=meta_dispatch("actor"))
    @tqbridge(reads=(*SEQUENCE, "old_log_probs", "advantages"), writes=())
    def update_actor(self, data: DataProto) -> DataProto:
        """Optimizer steps over the batch in mini-batches, with verl's PPO loss."""
        return self._update(data)

    @register(dispatch_mode=meta_dispatch("actor"))
    @tqbridge(reads=(*SEQUENCE, "old_log_probs", "advantages", "ref_log_prob"), writes=())
    def update_actor_with_kl(self, data: DataProto) -> DataProto:
        """The same, with the KL divergence from the reference model in the loss."""
        return self._update(data)

    def _update(self, data: DataProto) -> DataProto:
        actor = self.config.actor
        rows = actor.ppo_mini_batch_size * self.config.rollout.n
        batch = self._without_padding(
            data,
            calculate_entropy=actor.calculate_entropy or actor.entropy_coeff != 0,
            compute_loss=True,
            global_batch_size=rows,
            mini_batch_size=rows,
            epochs=actor.ppo_epochs,
            seed=actor.data_loader_seed,
            dataloader_kwargs={"shuffle": actor.shuffle},
        )
        output = self.actor.train_mini_batch(batch)
        metrics = {
            name if name.startswith("actor/") else f"actor/{name}": float(value)
            for name, value in reduce_metrics(tu.get(output, "metrics")).items()
        }
        return DataProto(meta_info={"metrics": metrics})

    def _without_padding(self, data: DataProto, **settings: Any) -> TensorDict:
        """The columns in the layout of verl's engine, with its settings for this call."""
        batch = left_right_2_no_padding(DataProto(batch=data.batch).to_tensordict())
        tu.assign_non_tensor(batch, temperature=self.config.rollout.temperature, **settings)
        return batch
