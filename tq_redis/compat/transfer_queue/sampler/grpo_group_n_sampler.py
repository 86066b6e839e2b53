"""Whole groups of neighbouring samples."""

from __future__ import annotations

from typing import Any

from tq_redis.compat.transfer_queue.sampler.base import BaseSampler, Choice, consecutive_groups
from tq_redis.errors import InputError


class GRPOGroupNSampler(BaseSampler):
    """Whole groups of ``n_samples_per_prompt`` samples whose ids follow each other: put the answers
    to one prompt one after the other, in one put.

    Raises:
        InputError: ``n_samples_per_prompt`` is not positive.
    """

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        super().__init__()
        if n_samples_per_prompt < 1:
            raise InputError(f"n_samples_per_prompt must be positive, got {n_samples_per_prompt}")
        self.n_samples_per_prompt = n_samples_per_prompt

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Choice:
        """The oldest groups; none if they are too few.

        Raises:
            InputError: ``batch_size`` is not a multiple of the size of a group.
        """
        rank, index = kwargs.get("dp_rank"), kwargs.get("batch_index")
        known = {} if rank is None else self._remembered(partition_id, task_name, rank)
        if index in known:
            return known[index]
        groups = self._groups(ready_indexes, batch_size)
        chosen = [sample for group in groups for sample in group]
        if chosen:
            known[index] = (chosen, list(chosen))
        return chosen, list(chosen)

    def _groups(self, ready: list[int], batch_size: int) -> list[list[int]]:
        size = self.n_samples_per_prompt
        if batch_size % size:
            raise InputError(
                f"batch_size {batch_size} must be a multiple of n_samples_per_prompt {size}"
            )
        groups = consecutive_groups(ready, size, batch_size // size)
        return groups if len(groups) * size == batch_size else []
