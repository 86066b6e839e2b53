"""Which of the samples that are ready a claim takes.

=========================== ======================================================== ============
sampler                     takes                                                    chosen in
=========================== ======================================================== ============
:class:`SequentialSampler`  the oldest samples                                       Redis
:class:`GRPOGroupNSampler`  whole groups, that with the oldest ready sample first    Redis
:class:`RankAwareSampler`   the oldest; ranks that ask for one batch get the same    Redis
:class:`SeqlenBalancedSampler`  whole groups, dealt out to ranks by their lengths    the client
your own                    what its ``sample`` returns                              the client
=========================== ======================================================== ============

With ``sampling_config={"dp_rank": r, "batch_index": i}`` any sampler is rank-aware: what it chose
is remembered in Redis under that name, and whoever asks for it again gets the same samples.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tq_redis.control.records import Ready
from tq_redis.errors import InputError, shorten

__all__ = [
    "BaseSampler",
    "GRPOGroupNSampler",
    "RankAwareSampler",
    "Ready",
    "Sampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "balanced_shares",
]


@dataclass(frozen=True)
class SequentialSampler:
    """The oldest samples, in ascending order of id."""


@dataclass(frozen=True)
class GRPOGroupNSampler:
    """Whole groups of ``n_samples_per_prompt`` samples, one group after the other.

    A group is what ``put(group_ids=...)`` says, in whatever order its rows get ready. One with more
    ready samples than that gives several batches' worth.

    Raises:
        InputError: ``n_samples_per_prompt`` is not positive.
    """

    n_samples_per_prompt: int = 1

    def __post_init__(self) -> None:
        _require_positive("n_samples_per_prompt", self.n_samples_per_prompt)


@dataclass(frozen=True)
class RankAwareSampler:
    """The oldest samples; needs ``dp_rank`` and ``batch_index`` in ``sampling_config``.

    Ranks of one data-parallel group, which work on the same samples together, name the same
    ``dp_rank`` and get the same samples for a ``batch_index``, whoever asks first.
    """


class BaseSampler(ABC):
    """A sampler of your own: subclass it, and pass an object to ``get_meta(sampler=...)``.

    It sees all samples that are ready. What it chooses is claimed if no other consumer was
    faster; else it is asked again. It must not keep what it chose: an attempt may have failed.
    """

    @abstractmethod
    def sample(self, ready: Ready, batch_size: int, **sampling_config: Any) -> Sequence[int]:
        """Choose.

        Args:
            ready: the samples, ascending by id, with groups and tags.
            batch_size: as given to ``get_meta``. The choice may have another size.
            sampling_config: as given to ``get_meta``.

        Returns:
            Ids among ``ready.ids``, distinct, in the order that the batch is to have; none, to be
            asked again when more is ready.
        """


@dataclass(frozen=True)
class SeqlenBalancedSampler:
    """Batches for all data-parallel ranks at once, so that ranks get about equally many tokens.

    Needs ``dp_rank`` and ``batch_index`` in ``sampling_config``; ``batch_size`` is that of one
    rank. The rank that asks first for a ``batch_index`` takes ``batch_size * dp_size`` of the
    oldest samples, in whole groups, and deals the groups out; the others find their shares. With a
    lease, a share waits for as long as that; a rank that comes later draws anew, for those ranks
    that have no share. Lengths are the tag ``total_lengths`` of each sample.

    Raises:
        InputError: a number is not positive.
    """

    n_samples_per_prompt: int = 1
    dp_size: int = 1
    length_tag: str = "total_lengths"

    def __post_init__(self) -> None:
        _require_positive("n_samples_per_prompt", self.n_samples_per_prompt)
        _require_positive("dp_size", self.dp_size)

    def shares(self, ready: Ready, batch_size: int, ranks: int) -> list[list[int]]:
        """The samples of so many ranks; none if there are not enough.

        Raises:
            InputError: a sample has no length, or one that is no number.
        """
        groups = _oldest_groups(ready, self.n_samples_per_prompt)
        count = batch_size * ranks // self.n_samples_per_prompt
        if len(groups) < count:
            return []
        groups = groups[:count]
        lengths = dict(zip(ready.ids, ready.tags, strict=True))
        sizes = [sum(self._length(i, lengths[i]) for i in group) for group in groups]
        return [
            [sample for place in places for sample in groups[place]]
            for places in balanced_shares(sizes, ranks)
        ]

    def _length(self, sample: int, tags: Mapping[str, Any]) -> float:
        length = tags.get(self.length_tag)
        if not isinstance(length, int | float):
            raise InputError(
                f"Sample {sample} has the tag {self.length_tag!r} = {length!r}; "
                f"{type(self).__name__} needs its number of tokens there. Put it with the sample.",
                rows=[sample],
            )
        return length


Sampler = (
    SequentialSampler | GRPOGroupNSampler | RankAwareSampler | SeqlenBalancedSampler | BaseSampler
)


def balanced_shares(
    sizes: Sequence[float], parts: int, *, equal_counts: bool = True
) -> list[list[int]]:
    """Deal out positions of ``sizes`` to ``parts`` shares of about equal sums.

    The largest differencing method (Karmarkar and Karp, 1982). Ascending inside a share.

    Args:
        equal_counts: begin with rows of ``parts`` neighbours by size, not with single positions,
            so that all shares have as many.

    Raises:
        InputError: ``sizes`` cannot be dealt out evenly.
    """
    _require_positive("parts", parts)
    step = parts if equal_counts else 1
    if len(sizes) % step:
        raise InputError(f"{len(sizes)} sizes cannot be dealt out to {parts} equal shares")
    order = sorted(range(len(sizes)), key=lambda place: (sizes[place], place))
    # A state: shares by descending sum. The heap gives the one with the largest spread first.
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for first in range(0, len(order), step):
        shares = [(sizes[place], [place]) for place in reversed(order[first : first + step])]
        shares += [(0.0, list[int]())] * (parts - step)
        heap.append((shares[-1][0] - shares[0][0], first, shares))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, age, one = heapq.heappop(heap)
        _, _, two = heapq.heappop(heap)
        merged = [
            (a + b, places + others)
            for (a, places), (b, others) in zip(one, reversed(two), strict=True)
        ]
        merged.sort(key=lambda share: (-share[0], share[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], age, merged))
    return [sorted(places) for _, places in heap[0][2]] if heap else [[] for _ in range(parts)]


def _oldest_groups(ready: Ready, size: int) -> list[list[int]]:
    """Whole groups of ``size`` samples, by their first ready sample; each sample is one for 1."""
    if size == 1:
        return [[sample] for sample in ready.ids]
    members: dict[str, list[int]] = {}
    for sample, group in zip(ready.ids, ready.groups, strict=True):
        if group is not None:
            members.setdefault(group, []).append(sample)
    whole = [
        rows[first : first + size]
        for rows in members.values()
        for first in range(0, len(rows) - size + 1, size)
    ]
    return sorted(whole)


def _require_positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or value < 1:
        raise InputError(f"{name} must be a positive integer, got {value!r}")


def require_choice(sampler: BaseSampler, ready: Ready, chosen: Sequence[int]) -> None:
    """Refuse a choice that is none.

    Raises:
        InputError: a sample is not ready, or named twice.
    """
    unknown = set(chosen) - set(ready.ids)
    if unknown:
        raise InputError(
            f"{type(sampler).__name__} chose {shorten(sorted(unknown))}, which are not ready",
            rows=sorted(unknown),
        )
    if len(set(chosen)) != len(chosen):
        raise InputError(f"{type(sampler).__name__} chose a sample twice: {shorten(chosen)}")
