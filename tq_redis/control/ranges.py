"""Sample ids as ``[start, count, ...]``: short on the wire, since ids are given out in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def to_ranges(ids: Iterable[int]) -> list[int]:
    """Pack ids, keeping their order: ``[4, 5, 6, 2]`` -> ``[4, 3, 2, 1]``."""
    ranges: list[int] = []
    expected = None
    for sample in ids:
        if sample == expected:
            ranges[-1] += 1
        else:
            ranges += (sample, 1)
        expected = sample + 1
    return ranges


def from_ranges(ranges: Sequence[int]) -> list[int]:
    """Inverse of :func:`to_ranges`."""
    ids: list[int] = []
    for start, count in zip(ranges[::2], ranges[1::2], strict=True):
        ids.extend(range(start, start + count))
    return ids
