"""Positions of rows: how a batch is cut and put in order."""

from __future__ import annotations

from collections.abc import Sequence

from tq_redis.errors import InputError, shorten


def chunk_rows(size: int, chunks: int) -> list[range]:
    """``chunks`` consecutive ranges of rows; the first ``size % chunks`` are one row longer.

    Raises:
        InputError: ``chunks`` is not positive.
    """
    if chunks < 1:
        raise InputError(f"chunks must be positive, got {chunks}")
    short, longer = divmod(size, chunks)
    starts = [i * short + min(i, longer) for i in range(chunks + 1)]
    return [range(starts[i], starts[i + 1]) for i in range(chunks)]


def require_permutation(indices: Sequence[int], size: int) -> None:
    """Check that ``indices`` names every row once.

    Raises:
        InputError: it does not.
    """
    if sorted(indices) != list(range(size)):
        raise InputError(f"Not a permutation of {size} rows: {shorten(indices)}")
