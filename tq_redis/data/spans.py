"""Runs of rows, grouped by block, and the copying of such runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from tq_redis.data.base import Run
from tq_redis.data.tensors import Bytes

Int64s = npt.NDArray[np.int64]

_SHORT_RUN = 2048
"""Below this many bytes a run, one index a row costs less than one slice a run."""


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring runs of one block.

    Attributes:
        handle: the block.
        firsts: int64[R], first row of each run inside the block.
        counts: int64[R], number of rows of each run.
        rows: sum of ``counts``.
        low, high: the smallest row and the one after the largest.
    """

    handle: str
    firsts: Int64s
    counts: Int64s
    rows: int
    low: int
    high: int

    def is_all_of(self, rows: int) -> bool:
        """Whether it is a whole block of so many rows, in its order."""
        return len(self.firsts) == 1 and self.rows == rows


def spans_of(runs: Sequence[Run]) -> list[Span]:
    """Group runs by block, in their order; runs that touch are joined."""
    return [_span(handle, list(group)) for handle, group in groupby(runs, key=lambda run: run[0])]


def _span(handle: str, runs: list[Run]) -> Span:
    low = min(first for _, first, _ in runs)
    high = max(first + count for _, first, count in runs)
    rows = sum(count for _, _, count in runs)
    firsts = np.array([first for _, first, _ in runs], np.int64)
    counts = np.array([count for _, _, count in runs], np.int64)
    if len(runs) > 1:
        begins = np.ones(len(runs), bool)
        begins[1:] = firsts[1:] != firsts[:-1] + counts[:-1]
        heads = np.flatnonzero(begins)
        firsts, counts = firsts[heads], np.add.reduceat(counts, heads)
    return Span(handle, firsts, counts, rows, low, high)


def expand(firsts: Int64s, counts: Int64s) -> Int64s:
    """The row numbers of all runs: firsts[0], firsts[0] + 1, ..., firsts[1], ..."""
    if len(firsts) == 1:
        return np.arange(firsts[0], firsts[0] + counts[0], dtype=np.int64)
    ends: Int64s = np.cumsum(counts)
    return np.arange(ends[-1], dtype=np.int64) + np.repeat(firsts - (ends - counts), counts)


def copy_rows(out: Bytes, source: Bytes, firsts: Int64s, counts: Int64s) -> None:
    """Copy runs of rows of ``source`` (rows, bytes a row) one after another into ``out``."""
    if len(firsts) == 1:
        np.copyto(out, source[firsts[0] : firsts[0] + counts[0]])
    elif out.nbytes < _SHORT_RUN * len(firsts):
        # "clip" because "raise" makes numpy copy twice; the rows were checked before
        np.take(source, expand(firsts, counts), axis=0, out=out, mode="clip")
    else:
        pieces: list[Any] = [
            source[first : first + count]
            for first, count in zip(firsts.tolist(), counts.tolist(), strict=True)
        ]
        np.concatenate(pieces, out=out)
