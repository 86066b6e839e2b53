"""The trained model: generation, log-probabilities and updates on verl's engine workers."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from verl import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.core_algos import agg_loss
from verl.utils import tensordict_utils as tu
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.utils.profiler import DistProfiler
from verl.utils.skip.skip_manager import SkipManager
from verl.workers.engine_workers import ActorRolloutRefWorker

from recipe.cpu.process import join_on_cpu
from recipe.ppo import rollout, rollout_skip
from recipe.ppo.engine_batch import (
    SEQUENCE,
    metrics_of,
    micro_batch,
    of_responses,
    without_padding,
)
from recipe.tasks.prompts import encode_chats
from tq_redis.bridge import meta_dispatch, tqbridge

# verl makes these at run time, or without types.
_Dispatch: Any = Dispatch
_Worker: Any = ActorRolloutRefWorker
_Profiler: Any = DistProfiler
_Skip: Any = SkipManager


class ActorWorker(_Worker):
    """verl's hybrid worker with the columns that each of its tasks reads and writes.

    Args:
        config: the whole configuration.
        role: verl's name for what is in this process.

    Shapes: B rows, P prompt and R response tokens.
    """

    def __init__(self, config: DictConfig, role: str) -> None:
        super().__init__(config.actor_rollout_ref, role)
        rollout_skip.start(config, self.rank)

    @register(dispatch_mode=_Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the model, its optimizer and the rollout, and seed this process."""
        rollout.register()
        join_on_cpu()
        super().init_model()
        self.model_config = self.rollout.model_config
        if self.ref is None:
            self.set_dispatch_collect(mesh_name="ref", **self.actor.get_dispatch_collect())
        # Each rank draws its own samples; verl's checkpoint keeps this generator's state.
        torch.manual_seed(self.config.rollout.seed + self.rank)

    @register(dispatch_mode=meta_dispatch("actor", pad=True))
    @tqbridge(
        reads=("raw_prompt",), writes=(*SEQUENCE, "rollout_log_probs"), tags=("total_lengths",)
    )
    def generate_sequences(self, data: DataProto) -> DataProto:
        """Answer chats with the rollout in this process.

        ``meta_info["validate"]`` decodes as ``rollout.val_kwargs`` says, ``meta_info["greedy"]``
        takes the most likely token.
        """
        rollout_skip.note_step(data)
        ids, mask = encode_chats(
            self.model_config.tokenizer,
            data.non_tensor_batch["raw_prompt"].tolist(),
            self.config.rollout.prompt_length,
        )
        prompts = DataProto.from_dict({"input_ids": ids, "attention_mask": mask})
        prompts.meta_info = {"temperature": self._temperature(data.meta_info), **data.meta_info}
        output = self._generate(prompts)
        output.batch["total_lengths"] = output.batch["attention_mask"].sum(dim=1)
        return output

    @_Skip.annotate(role="rollout")
    def _generate(self, prompts: DataProto) -> DataProto:
        return self.rollout.generate_sequences(prompts)

    def _temperature(self, info: dict[str, Any]) -> float:
        settings = self.config.rollout.val_kwargs if info.get("validate") else self.config.rollout
        greedy = info.get("greedy") or not settings.do_sample
        return 0.0 if greedy else settings.temperature

    @register(dispatch_mode=meta_dispatch("actor", pad=True))
    @_Profiler.annotate(color="blue", role="actor_compute_log_prob")
    @tqbridge(
        reads=SEQUENCE,
        may_read=("rollout_log_probs",),
        writes=("old_log_probs",),
    )
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """(B, R) float32 log-probabilities of the responses under the actor, in nats.

        The metrics compare them with the rollout's own: with the same weights they agree to
        rounding.
        """
        actor = self.config.actor
        size = micro_batch(data, self.config.rollout.log_prob_micro_batch_size_per_gpu)
        batch = self._without_padding(data, calculate_entropy=True, compute_loss=False, **size)
        output = self.actor.infer_batch(batch)
        if output is None:
            return DataProto()
        log_probs = of_responses(output, "log_probs", batch)
        metrics: dict[str, Any] = {}
        if "rollout_log_probs" in data.batch:
            data.batch["old_log_probs"] = log_probs
            metrics = calculate_debug_metrics(data)
        metrics["actor/entropy"] = agg_loss(
            loss_mat=of_responses(output, "entropy", batch),
            loss_mask=data.batch["response_mask"],
            loss_agg_mode=actor.loss_agg_mode,
            loss_scale_factor=actor.loss_scale_factor,
        ).item()
        mfu = tu.get(output, "metrics").get("mfu")
        if mfu is not None:
            metrics["perf/mfu/actor_infer"] = mfu
        return DataProto.from_dict({"old_log_probs": log_probs}, meta_info={"metrics": metrics})

    @register(dispatch_mode=meta_dispatch("ref", pad=True))
    @_Profiler.annotate(color="olive", role="ref_compute_log_prob")
    @tqbridge(reads=SEQUENCE, writes=("ref_log_prob",))
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """(B, R) float32 log-probabilities of the responses under the reference model, in nats.

        With LoRA the reference model is the actor without its adapter.
        """
        in_actor = self.ref is None
        model = self.actor if in_actor else self.ref
        size = micro_batch(data, model.engine_config.infer_micro_batch_size_per_gpu)
        batch = self._without_padding(
            data, calculate_entropy=False, compute_loss=False, no_lora_adapter=in_actor, **size
        )
        output = model.infer_batch(batch)
        if output is None:
            return DataProto()
        return DataProto.from_dict({"ref_log_prob": of_responses(output, "log_probs", batch)})

    @register(dispatch_mode=meta_dispatch("actor"))
    @_Profiler.annotate(color="red", role="actor_update", scheduled=True)
    @tqbridge(
        reads=(*SEQUENCE, "old_log_probs", "advantages"),
        may_read=("ref_log_prob", "rollout_is_weights"),
        writes=(),
    )
    def update_actor(self, data: DataProto) -> DataProto:
        """Optimizer steps over the batch in mini-batches, with verl's PPO loss."""
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
        return DataProto(meta_info={"metrics": metrics_of(output, "actor")})

    def _without_padding(self, data: DataProto, **settings: Any) -> Any:
        return without_padding(data, temperature=self.config.rollout.temperature, **settings)
