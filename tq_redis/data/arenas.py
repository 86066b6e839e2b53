"""Private memory for columns, used again when the columns are gone.

Fresh memory costs more than what is copied into it: the kernel has to find and clear every page.
A reader gets batches of about one size again and again and drops them, so the memory of the last
ones serves the next.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import numpy as np

from tq_redis.data.tensors import Bytes

_ARENA_BYTES, _SHARED_BYTES, _ALIGNMENT = 64 << 20, 1 << 20, 64
_MOST_FREE = 2

_free: list[mmap.mmap] = []
"""Arenas that no array lies in. The kernel may take their pages when it needs some."""


class Memory:
    """Private memory for the columns of one get.

    Columns of a few megabytes share an arena; what is not used of it is never touched.
    """

    def __init__(self) -> None:
        self._left = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> Bytes:
        """(nbytes,) of uninitialised memory."""
        if not _SHARED_BYTES <= nbytes <= _ARENA_BYTES // 2:
            return np.empty(nbytes, np.uint8)
        aligned = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if len(self._left) < aligned:
            self._left = _arena()
        taken, self._left = self._left[:nbytes], self._left[aligned:]
        return taken


class _Owner:
    """The base of all arrays, and so of all tensors, that lie in one arena."""

    def __init__(self, memory: mmap.mmap) -> None:
        whole = np.frombuffer(memory, np.uint8)
        self.__array_interface__: dict[str, Any] = whole.__array_interface__
        # The memory itself cannot say when it is free: it would have to outlive its end.
        weakref.finalize(self, _give_back, memory).atexit = False


def _arena() -> Bytes:
    try:
        memory = _free.pop()
    except IndexError:
        # Not shared with the children of a fork, which copy what either side writes.
        memory = mmap.mmap(-1, _ARENA_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _advise(memory, "MADV_HUGEPAGE")
    return np.asarray(_Owner(memory))


def _give_back(memory: mmap.mmap) -> None:
    if len(_free) < _MOST_FREE:
        _advise(memory, "MADV_FREE")
        _free.append(memory)


def _advise(memory: mmap.mmap, advice: str) -> None:
    """Where the kernel knows it."""
    if hasattr(mmap, advice):
        memory.madvise(getattr(mmap, advice))
