"""Rows of several blocks, one after another: in main memory, or on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tq_redis.data.arenas import Memory
from tq_redis.data.devices import pinned
from tq_redis.data.spans import Int64s, copy_rows
from tq_redis.data.tensors import Bytes

_PIECE_BYTES = 16 << 20
"""Gathered in pinned memory at once; the device fetches one piece while the next is gathered. Torch
rounds pinned memory up to powers of two."""


@dataclass(frozen=True, slots=True)
class Part:
    """Runs of rows of ``data`` (rows, bytes a row), ``rows`` in all."""

    data: Bytes
    firsts: Int64s
    counts: Int64s
    rows: int

    @property
    def is_whole(self) -> bool:
        """Whether it is all of ``data``, in its order."""
        return len(self.firsts) == 1 and self.rows == len(self.data)


def joined(parts: Sequence[Part], row_bytes: int, *, copy: bool, memory: Memory) -> Bytes:
    """(rows, row_bytes): the rows of all parts.

    Args:
        copy: False: a view where they lie together in one block.
        memory: where else they go.
    """
    if not copy and len(parts) == 1 and len(parts[0].firsts) == 1:
        first = parts[0].firsts[0]
        return parts[0].data[first : first + parts[0].rows]
    rows = sum(part.rows for part in parts)
    out = memory.take(rows * row_bytes).reshape(rows, row_bytes)
    if all(part.is_whole for part in parts):
        np.concatenate([part.data for part in parts], out=out)
    else:
        _copy(parts, 0, out)
    return out


def joined_on(device: torch.device, parts: Sequence[Part], row_bytes: int) -> torch.Tensor:
    """(rows * row_bytes,) uint8: the rows of all parts on a device, by its current stream.

    Returns when the last copy has begun: the parts are read by then. Without pinned memory, when it
    has ended.
    """
    rows = sum(part.rows for part in parts)
    target = torch.empty(rows * row_bytes, dtype=torch.uint8, device=device)
    if not target.nbytes:
        return target
    most = max(1, _PIECE_BYTES // row_bytes)
    for first in range(0, rows, most):
        count = min(most, rows - first)
        memory = pinned(count * row_bytes)
        piece = torch.empty(count * row_bytes, dtype=torch.uint8) if memory is None else memory
        _copy(parts, first, piece.numpy().reshape(count, row_bytes))
        place = target[first * row_bytes : (first + count) * row_bytes]
        place.copy_(piece, non_blocking=memory is not None)
    return target


def _copy(parts: Sequence[Part], first: int, out: Bytes) -> None:
    """Fill ``out`` with rows of the parts, from the ``first`` of them all."""
    low, at = first, 0
    for part in parts:
        if low < part.rows and at < len(out):
            high = min(part.rows, low + len(out) - at)
            firsts, counts = _clipped(part, low, high)
            copy_rows(out[at : at + high - low], part.data, firsts, counts)
            at += high - low
        low = max(0, low - part.rows)


def _clipped(part: Part, low: int, high: int) -> tuple[Int64s, Int64s]:
    """The runs of rows ``low`` to ``high`` (excluded, not ``low``) of a part."""
    if (low, high) == (0, part.rows):
        return part.firsts, part.counts
    ends: Int64s = np.cumsum(part.counts)
    one, last = np.searchsorted(ends, low, side="right"), np.searchsorted(ends, high)
    firsts, counts = part.firsts[one : last + 1].copy(), part.counts[one : last + 1].copy()
    skipped = low - (ends[one] - counts[0])
    firsts[0] += skipped
    counts[0] -= skipped
    counts[-1] -= ends[last] - high
    return firsts, counts
