"""Rewards, advantages and metrics: small math on CPUs, beside the models."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from omegaconf import DictConfig
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo import core_algos, metric_utils, ray_trainer
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils import hf_tokenizer

from recipe.ppo.engine_batch import at_the_end, response_attention
from recipe.ppo.validation import dump, generations, validation_metrics
from tq_redis.bridge import meta_dispatch, tqbridge

# verl makes these at run time, or without types.
_Dispatch: Any = Dispatch
_metrics: Any = metric_utils
_trainer: Any = ray_trainer


class SampleWorker(Worker):
    """Tasks that look at samples, and at no model.

    Rewards can be shared by several processes; all else needs whole groups, and so one process.

    Shapes: B rows, P prompt and R response tokens.
    """

    def __init__(self, config: DictConfig, model_path: str) -> None:
        super().__init__()
        self.config = config
        self.tokenizer = hf_tokenizer(model_path)
        self.rewards: Any = load_reward_manager(config, self.tokenizer)
        self.kl_in_reward: Any = core_algos.get_kl_controller(config.algorithm.kl_ctrl)
        self._register_dispatch_collect_info("sample", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=meta_dispatch("sample", pad=True), blocking=False)
    @tqbridge(
        reads=("prompts", "responses", "attention_mask", "data_source", "reward_model"),
        may_read=("extra_info", "__num_turns__", "rm_scores"),
        writes=("token_level_scores", "reward_extra_info"),
    )
    def compute_reward(self, data: DataProto) -> DataProto:
        """Score each response, with the reward model's score where there is one.

        Writes ``token_level_scores`` (B, R) float32, and ``reward_extra_info``, what the reward
        function says besides. A score for the whole response stands at its last token; a reward
        function may also give one score for each token.
        """
        extra: Any = numpy.empty(len(data), dtype=object)
        if "rm_scores" in data.batch:
            extra[:] = [{} for _ in extra]
            return DataProto.from_dict(
                {"token_level_scores": data.batch["rm_scores"]}, {"reward_extra_info": extra}
            )

        async def score() -> list[dict[str, Any]]:
            rows = [data[row : row + 1] for row in range(len(data))]
            return await asyncio.gather(*[self.rewards.run_single(row) for row in rows])

        results = self.rewards.loop.run_until_complete(score())
        extra[:] = [dict(result["reward_extra_info"]) for result in results]
        scores = _token_scores(
            [result["reward_score"] for result in results], response_attention(data)
        )
        return DataProto.from_dict({"token_level_scores": scores}, {"reward_extra_info": extra})

    @register(dispatch_mode=meta_dispatch("sample"))
    @tqbridge(reads=("uid",), may_read=("token_level_scores",), writes=("reward_baselines",))
    def compute_baselines(self, data: DataProto, greedy: DataProto) -> DataProto:
        """(B,) float32: the reward of the greedy answer to the same prompt, for REMAX.

        Args:
            greedy: the greedy answers: ``uid`` and ``token_level_scores``.
        """
        totals = greedy.batch["token_level_scores"].sum(dim=1).tolist()
        reward = dict(zip(greedy.non_tensor_batch["uid"], totals, strict=True))
        baselines = [reward[uid] for uid in data.non_tensor_batch["uid"]]
        return DataProto.from_dict({"reward_baselines": torch.tensor(baselines)})

    @register(dispatch_mode=meta_dispatch("sample"))
    @tqbridge(reads=("rollout_log_probs",), writes=("old_log_probs",))
    def take_rollout_log_probs(self, data: DataProto) -> DataProto:
        """Bypass mode of rollout correction: the rollout's log-probabilities are the old ones."""
        return DataProto.from_dict({"old_log_probs": data.batch["rollout_log_probs"]})

    @register(dispatch_mode=meta_dispatch("sample"))
    @tqbridge(
        reads=("old_log_probs", "rollout_log_probs", "response_mask"),
        writes=("response_mask",),
        may_write=("rollout_is_weights",),
    )
    def correct_rollout(self, data: DataProto) -> DataProto:
        """Importance weights and rejection of what the rollout sampled with another policy."""
        data, metrics = compute_rollout_correction_and_add_to_batch(
            data, self.config.algorithm.rollout_correction
        )
        data.meta_info = {"metrics": metrics}
        return data

    @register(dispatch_mode=meta_dispatch("sample"))
    @tqbridge(
        reads=("token_level_scores", "response_mask", "old_log_probs", "ref_log_prob"),
        writes=("token_level_rewards",),
    )
    def penalize_kl(self, data: DataProto) -> DataProto:
        """(B, R) float32: the scores less the KL divergence from the reference model."""
        data, metrics = _trainer.apply_kl_penalty(
            data, self.kl_in_reward, kl_penalty=self.config.algorithm.kl_penalty
        )
        data.meta_info = {"metrics": metrics}
        return data

    @register(dispatch_mode=meta_dispatch("sample"))
    @tqbridge(
        reads=("token_level_scores", "response_mask", "uid"),
        may_read=("token_level_rewards", "values", "reward_baselines"),
        writes=("advantages", "returns"),
    )
    def compute_advantage(self, data: DataProto) -> DataProto:
        """(B, R) float32 advantages and returns, as ``algorithm.adv_estimator`` makes them."""
        algorithm = self.config.algorithm
        data.batch["token_level_rewards"] = _rewards(data)
        data = _trainer.compute_advantage(
            data,
            adv_estimator=algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            num_repeat=self.config.actor_rollout_ref.rollout.n,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            config=algorithm,
        )
        return DataProto.from_dict(
            {name: data.batch[name].float() for name in ("advantages", "returns")}
        )

    @register(dispatch_mode=meta_dispatch("sample"))
    @tqbridge(
        reads=(
            *("prompts", "responses", "attention_mask", "response_mask", "uid"),
            *("token_level_scores", "advantages", "returns"),
        ),
        may_read=("token_level_rewards", "values", "__num_turns__", "reward_extra_info"),
        writes=(),
    )
    def compute_metrics(self, data: DataProto) -> DataProto:
        """verl's metrics of the samples, and means of what the reward function says."""
        data.batch["token_level_rewards"] = _rewards(data)
        if "__num_turns__" in data.non_tensor_batch:
            turns = data.non_tensor_batch["__num_turns__"]
            data.non_tensor_batch["__num_turns__"] = turns.astype(numpy.int64)
        found = _metrics.compute_data_metrics(data, use_critic="values" in data.batch)
        found["groups/with_signal"] = _groups_with_signal(
            data.batch["token_level_rewards"].sum(dim=1), data.non_tensor_batch["uid"]
        )
        found |= _means(data.non_tensor_batch.get("reward_extra_info", ()))
        return DataProto(meta_info={"metrics": {key: float(value) for key, value in found.items()}})

    @register(dispatch_mode=meta_dispatch("sample"))
    @tqbridge(
        reads=(
            *("prompts", "responses", "attention_mask", "uid", "data_source"),
            *("token_level_scores", "reward_extra_info"),
        ),
        may_read=("__num_turns__",),
        writes=(),
    )
    def validate(self, data: DataProto) -> DataProto:
        """verl's validation metrics; with ``meta_info["log"]``, so many answers as text too."""
        info: dict[str, Any] = {"metrics": validation_metrics(data)}
        if data.meta_info.get("log"):
            info["generations"] = generations(self.tokenizer, data, data.meta_info["log"])
        return DataProto(meta_info=info)

    @register(dispatch_mode=meta_dispatch("sample"))
    @tqbridge(
        reads=(
            *("prompts", "responses", "attention_mask", "token_level_scores"),
            *("reward_model", "reward_extra_info", "uid"),
        ),
        writes=(),
    )
    def write_generations(self, data: DataProto) -> DataProto:
        """Write a JSONL file in ``meta_info["folder"]``: a line a sample, in their order."""
        dump(self.tokenizer, data, Path(data.meta_info["folder"]), data.meta_info["global_steps"])
        return DataProto()

    @register(dispatch_mode=_Dispatch.ONE_TO_ALL)
    def save(self, path: str) -> None:
        """Keep what this worker learned: the coefficient of an adaptive KL controller."""
        Path(path).write_text(json.dumps({"kl_coefficient": self.kl_in_reward.value}))

    @register(dispatch_mode=_Dispatch.ONE_TO_ALL)
    def load(self, path: str) -> None:
        """Continue where :meth:`save` was called."""
        self.kl_in_reward.value = json.loads(Path(path).read_text())["kl_coefficient"]


def _token_scores(scores: list[Any], attention: torch.Tensor) -> torch.Tensor:
    """(B, R) float32 from one score a row, or one a token, as the reward function gave them."""
    if not any(isinstance(score, list | tuple | torch.Tensor | numpy.ndarray) for score in scores):
        return at_the_end(torch.tensor(scores, dtype=torch.float32), attention)
    spread = torch.zeros(attention.shape, dtype=torch.float32)
    for row, (score, tokens) in enumerate(zip(scores, attention.sum(dim=1).tolist(), strict=True)):
        values = torch.as_tensor(score, dtype=torch.float32).reshape(-1)
        if len(values) != tokens:
            raise ValueError(
                f"The reward function gave {len(values)} scores for a response of {tokens} tokens "
                f"(row {row}); give one for each token, or one number"
            )
        spread[row, :tokens] = values
    return spread


def _rewards(data: DataProto) -> torch.Tensor:
    """(B, R): the scores, with the KL penalty where there is one."""
    if "token_level_rewards" in data.batch:
        return data.batch["token_level_rewards"]
    return data.batch["token_level_scores"]


def _groups_with_signal(rewards: torch.Tensor, uid: numpy.ndarray) -> float:
    """The share of groups in which not all rewards are equal: only those change the policy."""
    groups: dict[Any, set[float]] = defaultdict(set)
    for group, reward in zip(uid, rewards.tolist(), strict=True):
        groups[group].add(reward)
    return sum(len(values) > 1 for values in groups.values()) / len(groups)


def _means(extra: Any) -> dict[str, float]:
    """Of each number that the reward function gave for every row."""
    rows: list[Mapping[str, Any]] = list(extra)
    names = set.intersection(*[set(row) for row in rows]) if rows else set[str]()
    return {
        f"reward/{name}/mean": float(numpy.mean([row[name] for row in rows]))
        for name in sorted(names)
        if all(isinstance(row[name], int | float) for row in rows)
    }
