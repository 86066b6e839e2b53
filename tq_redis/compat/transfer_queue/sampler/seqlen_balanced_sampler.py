"""Batches for all ranks at once, so that ranks get about equally many tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tq_redis.compat.transfer_queue.sampler.base import Choice
from tq_redis.compat.transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler
from tq_redis.errors import InputError
from tq_redis.samplers import balanced_shares


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """As :class:`GRPOGroupNSampler`, for ``dp_size`` ranks. ``batch_size`` is that of one rank.
    Whoever asks first takes the groups of all ranks and deals them out by the tag
    ``total_lengths`` of their samples (1 where it is missing).

    Raises:
        InputError: a number is not positive.
    """

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1) -> None:
        super().__init__(n_samples_per_prompt)
        if dp_size < 1:
            raise InputError(f"dp_size must be positive, got {dp_size}")
        self.dp_size = dp_size

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Choice:
        """The share of ``dp_rank``; none if too few groups are ready.

        Args:
            kwargs: ``dp_rank``, ``batch_index``, and ``partition``, which knows the tags.

        Raises:
            InputError: ``batch_size`` of all ranks is not a multiple of the size of a group.
        """
        rank, index = kwargs.get("dp_rank", 0), kwargs.get("batch_index", 0)
        partition = kwargs.get("partition")
        known = self._remembered(partition_id, task_name, rank)
        if index not in known:
            tags = partition and partition.get_custom_meta(ready_indexes)
            shares = self.shares(ready_indexes, batch_size, tags or {})
            for other, share in enumerate(shares):
                self._remembered(partition_id, task_name, other)[index] = share
        share = known.get(index, [])
        return share, list(share)

    def shares(
        self, ready: list[int], batch_size: int, tags: Mapping[int, Mapping[str, Any]]
    ) -> list[list[int]]:
        """The samples of each rank; none if there are not enough.

        Args:
            tags: sample -> its tags.
        """
        groups = self._groups(ready, batch_size * self.dp_size)
        sizes = [sum(tags.get(i, {}).get("total_lengths", 1) for i in group) for group in groups]
        if not groups:
            return []
        return [
            [sample for place in places for sample in groups[place]]
            for places in balanced_shares(sizes, self.dp_size)
        ]


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Deal out positions of ``seqlen_list`` so that the sums are about equal.

    Args:
        equal_size: all shares have as many positions.

    Raises:
        InputError: there are fewer positions than shares, or they cannot be dealt out evenly.
    """
    if len(seqlen_list) < k_partitions:
        raise InputError(f"{len(seqlen_list)} items are too few for {k_partitions} partitions")
    return balanced_shares(seqlen_list, k_partitions, equal_counts=equal_size)


karmarkar_karp = get_seqlen_balanced_partitions
