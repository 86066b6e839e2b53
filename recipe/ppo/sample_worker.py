"""Rewards and advantages: small math over whole groups, in one CPU process."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from omegaconf import DictConfig
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import register
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.utils import hf_tokenizer

from recipe.tasks.prompts import decode_responses
from tq_redis.bridge import meta_dispatch, tqbridge


class SampleWorker(Worker):
    """One process, because a group's advantage needs all of its samples.

    Shapes: B rows, R response tokens.
    """

    def __init__(self, config: DictConfig, model_path: str) -> None:
        super().__init__()
        self.config = config
        self.tokenizer = hf_tokenizer(model_path)
        self.compute_score: Any = get_custom_reward_fn(config)
        self.kl_in_reward: Any = core_algos.get_kl_controller(config.algorithm.kl_ctrl)
        self._register_dispatch_collect_info("sample", dp_rank=0, is_collect=True)

    @register(dispatch_mode=meta_dispatch("sample"))
    @tqbridge(
        reads=("responses", "response_mask", "data_source", "reward_model", "extra_info"),
        writes=("token_level_scores", "acc"),
    )
    def compute_reward(self, data: DataProto) -> DataProto:
        """Score each response with the task's reward function.

        Writes ``token_level_scores`` (B, R) float32, the score at the last token of the response
        and 0 elsewhere, and ``acc`` (B,) float32, 1 for an exact answer.
        """
        mask = data.batch["response_mask"]
        texts = decode_responses(self.tokenizer, data.batch["responses"], mask)
        rows = data.non_tensor_batch
        results = [
            self.compute_score(
                data_source=source,
                solution_str=text,
                ground_truth=reward_model["ground_truth"],
                extra_info=extra_info,
            )
            for text, source, reward_model, extra_info in zip(
                texts,
                rows["data_source"],
                rows["reward_model"],
                rows["extra_info"],
                strict=True,
            )
        ]
        # Exactness was decided on the float64 score: the columns only store it.
        scores = torch.tensor([result["score"] for result in results], dtype=torch.float64)
        exact = torch.tensor([result["acc"] for result in results], dtype=torch.float64)
        token_scores = torch.zeros(mask.shape, dtype=torch.float32)
        token_scores[torch.arange(len(mask)), mask.sum(dim=1) - 1] = scores.float()
        metrics = {"reward/mean": scores.mean().item(), "acc/mean": exact.mean().item()}
        return DataProto.from_dict(
            {"token_level_scores": token_scores, "acc": exact.float()},
            meta_info={"metrics": metrics},
        )

    @register(dispatch_mode=meta_dispatch("sample"))
    @tqbridge(reads=("token_level_scores", "response_mask", "uid"), writes=("advantages",))
    def compute_advantage(self, data: DataProto) -> DataProto:
        """(B, R) float32 advantages of the scores within the group of each prompt (``uid``)."""
        return self._advantage(data, data.batch["token_level_scores"], {})

    @register(dispatch_mode=meta_dispatch("sample"))
    @tqbridge(
        reads=("token_level_scores", "response_mask", "uid", "old_log_probs", "ref_log_prob"),
        writes=("advantages",),
    )
    def compute_advantage_with_kl(self, data: DataProto) -> DataProto:
        """The same, after the KL divergence from the reference model is taken off the scores."""
        from verl.trainer.ppo.ray_trainer import apply_kl_penalty

        data, metrics = apply_kl_penalty(
            data, self.kl_in_reward, kl_penalty=self.config.algorithm.kl_penalty
        )
        return self._advantage(data, data.batch["token_level_rewards"], metrics)

    def _advantage(
        self, data: DataProto, rewards: torch.Tensor, metrics: dict[str, float]
    ) -> DataProto:
        algorithm = self.config.algorithm
        estimate = core_algos.get_adv_estimator_fn(algorithm.adv_estimator)
        uid = data.non_tensor_batch["uid"]
        advantages, _ = estimate(
            token_level_rewards=rewards,
            response_mask=data.batch["response_mask"],
            index=uid,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            config=algorithm,
        )
        share = _groups_with_signal(rewards.sum(dim=1), uid)
        return DataProto.from_dict(
            {"advantages": advantages.float()},
            meta_info={"metrics": {"groups/with_signal": share, **metrics}},
        )


def _groups_with_signal(rewards: torch.Tensor, uid: numpy.ndarray) -> float:
    """The share of groups in which not all rewards are equal: only those change the policy."""
    groups: dict[Any, set[float]] = {}
    for group, reward in zip(uid, rewards.tolist(), strict=True):
        groups.setdefault(group, set()).add(reward)
    return sum(len(values) > 1 for values in groups.values()) / len(groups)
