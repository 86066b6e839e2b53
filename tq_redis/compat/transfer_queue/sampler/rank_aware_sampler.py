"""The same samples for all ranks of a data-parallel group."""

from __future__ import annotations

from typing import Any

from tq_redis.compat.transfer_queue.sampler.base import BaseSampler, Choice
from tq_redis.errors import InputError


class RankAwareSampler(BaseSampler):
    """The oldest samples. Whoever asks with the same ``dp_rank`` for a ``batch_index`` gets the
    same ones."""

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        dp_rank: int,
        batch_index: int,
        task_name: str,
        partition_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> Choice:
        """The batch of this name; none if too few samples are ready for a new one.

        Raises:
            InputError: ``dp_rank`` is negative.
        """
        if dp_rank < 0:
            raise InputError(f"dp_rank must not be negative, got {dp_rank}")
        known = self._remembered(partition_id, task_name, dp_rank)
        if batch_index not in known:
            if len(ready_indexes) < batch_size:
                return [], []
            known[batch_index] = ready_indexes[:batch_size]
        return known[batch_index], known[batch_index]
