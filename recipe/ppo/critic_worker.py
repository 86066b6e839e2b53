"""The critic and the reward model: verl's engine with one number a token."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.profiler import DistProfiler
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import value_loss

from recipe.cpu.process import join_on_cpu
from recipe.ppo.engine_batch import (
    SEQUENCE,
    at_the_end,
    metrics_of,
    micro_batch,
    of_responses,
    response_attention,
    without_padding,
)
from tq_redis.bridge import meta_dispatch, tqbridge

_Dispatch: Any = Dispatch
_Worker: Any = TrainingWorker
_Profiler: Any = DistProfiler
_WorkerConfig: Any = TrainingWorkerConfig


class ValueWorker(_Worker):
    """A model that gives one number for each token.

    Args:
        config: in the form of verl's ``critic`` block.
        seed: of the layer that makes the number, where the checkpoint has none.

    Shapes: B rows, R response tokens.
    """

    def __init__(self, config: DictConfig, seed: int) -> None:
        join_on_cpu()
        settings: Any = omega_conf_to_dataclass(config)
        engine = settings.engine
        engine.infer_max_token_len_per_gpu = settings.ppo_infer_max_token_len_per_gpu
        engine.infer_micro_batch_size_per_gpu = settings.forward_micro_batch_size_per_gpu
        engine.max_token_len_per_gpu = settings.ppo_max_token_len_per_gpu
        engine.micro_batch_size_per_gpu = settings.ppo_micro_batch_size_per_gpu
        engine.use_dynamic_bsz = settings.use_dynamic_bsz
        profiler = config.get("profiler")
        super().__init__(
            _WorkerConfig(
                model_type="value_model",
                model_config=settings.model,
                engine_config=engine,
                optimizer_config=settings.optim,
                checkpoint_config=settings.checkpoint,
                profiler_config=omega_conf_to_dataclass(profiler) if profiler else None,
            )
        )
        self.settings = settings
        self.seed = seed

    @register(dispatch_mode=_Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model; the same on all ranks."""
        torch.manual_seed(self.seed)
        self.reset()
        self.set_loss_fn(partial(value_loss, config=self.settings))

    def _infer(self, data: DataProto) -> tuple[TensorDict, TensorDict | None]:
        """The batch in the engine's layout, and its output; None on ranks that have none."""
        size = micro_batch(data, self.engine_config.infer_micro_batch_size_per_gpu)
        batch = without_padding(data, compute_loss=False, **size)
        return batch, self.infer_batch(batch)


class CriticWorker(ValueWorker):
    """How good a state is: the expected return after each token of a response."""

    @register(dispatch_mode=meta_dispatch("train", pad=True))
    @_Profiler.annotate(color="cyan", role="compute_values")
    @tqbridge(reads=SEQUENCE, writes=("values",))
    def compute_values(self, data: DataProto) -> DataProto:
        """(B, R) float32 values before each token of the response."""
        batch, output = self._infer(data)
        if output is None:
            return DataProto()
        return DataProto.from_dict({"values": of_responses(output, "values", batch)})

    @register(dispatch_mode=meta_dispatch("train"))
    @_Profiler.annotate(color="pink", role="critic_update")
    @tqbridge(reads=(*SEQUENCE, "values", "returns"), writes=())
    def update_critic(self, data: DataProto) -> DataProto:
        """Optimizer steps over the batch in mini-batches, with verl's value loss."""
        rows = self.settings.ppo_mini_batch_size * self.settings.rollout_n
        batch = without_padding(
            data,
            global_batch_size=rows,
            mini_batch_size=rows,
            epochs=self.settings.ppo_epochs,
            seed=self.settings.data_loader_seed,
            dataloader_kwargs={"shuffle": self.settings.shuffle},
        )
        output = self.train_mini_batch(batch)
        return DataProto(meta_info={"metrics": metrics_of(output, "critic")})


class RewardModelWorker(ValueWorker):
    """A model that scores whole answers: its number at their last token."""

    @register(dispatch_mode=meta_dispatch("train", pad=True))
    @tqbridge(reads=SEQUENCE, writes=("rm_scores",))
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """(B, R) float32: the score at the last token of the response, 0 elsewhere."""
        _, output = self._infer(data)
        if output is None:
            return DataProto()
        of_tokens = tu.get(output, "values")
        scores = of_tokens.values()[of_tokens.offsets()[1:] - 1].float()
        return DataProto.from_dict({"rm_scores": at_the_end(scores, response_attention(data))})
