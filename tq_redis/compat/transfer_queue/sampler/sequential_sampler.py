"""The oldest samples."""

from __future__ import annotations

from typing import Any

from tq_redis.compat.transfer_queue.sampler.base import BaseSampler, Choice


class SequentialSampler(BaseSampler):
    """The oldest samples, in ascending order of id."""

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> Choice:
        """The first ``batch_size``, or as many as there are."""
        return ready_indexes[:batch_size], ready_indexes[:batch_size]
