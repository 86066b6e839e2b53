"""The blocks that one process keeps, by name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Content = tuple[bytes, Sequence[Any]]
"""A block bit by bit, whatever it holds: header and flat numpy arrays, as the codec made them."""


@dataclass(slots=True)
class Block:
    """A block on the shelf.

    Attributes:
        partition: whose rows it holds.
        nbytes: of its rows, without the header.
        content: header and buffers.
        ref: Ray's reference, where the bytes lie in Ray's object store.
        adopted: the reference is the store's own.
        since: when it came, by the monotonic clock.
        confirmed: Redis names it.
    """

    partition: str
    nbytes: int
    content: Content
    ref: Any | None = None
    adopted: bool = False
    since: float = field(default_factory=time.monotonic)
    confirmed: bool = False


class Shelf:
    """Blocks by name, and how many bytes they take. All calls are safe in any thread.

    Args:
        capacity: bytes that blocks may take together; None: as many as there are.

    Attributes:
        on_room: called, in the thread of the call that made it, whenever there is more room.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.on_room: list[Callable[[], None]] = []
        self._blocks: dict[str, Block] = {}
        self._used = 0
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes of the blocks here, and of those that room was reserved for."""
        return self._used

    def __len__(self) -> int:
        return len(self._blocks)

    def can_ever_hold(self, nbytes: int) -> bool:
        """Whether an empty shelf had room for so many bytes."""
        return self.capacity is None or nbytes <= self.capacity

    def reserve(self, nbytes: int) -> bool:
        """Take room for blocks that are to come; False if there is too little now."""
        with self._lock:
            if self.capacity is not None and self._used + nbytes > self.capacity:
                return False
            self._used += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """Room that was reserved and is not needed."""
        with self._lock:
            self._used -= nbytes
        self._tell(nbytes)

    def place(self, blocks: Iterable[tuple[str, Block]]) -> None:
        """Put blocks into room that was reserved for them. A name that is known keeps its block:
        the put is a repetition."""
        twice = 0
        with self._lock:
            for name, block in blocks:
                if name in self._blocks:
                    twice += block.nbytes
                else:
                    self._blocks[name] = block
            self._used -= twice
        self._tell(twice)

    def hold(self, blocks: Sequence[tuple[str, Block]]) -> bool:
        """Keep all of these blocks, or none if there is too little room. Safe to repeat."""
        new = [item for item in blocks if item[0] not in self._blocks]
        if not self.reserve(sum(block.nbytes for _, block in new)):
            return False
        self.place(new)
        return True

    def find(self, names: Iterable[str]) -> list[Block | None]:
        """The blocks of these names, None where there is none."""
        return [self._blocks.get(name) for name in names]

    def drop(self, names: Iterable[str]) -> None:
        """Forget blocks; unknown names are ignored."""
        with self._lock:
            dropped = [self._blocks.pop(name, None) for name in names]
            freed = sum(block.nbytes for block in dropped if block is not None)
            self._used -= freed
        self._tell(freed)

    def clear(self) -> None:
        """Forget all blocks."""
        self.drop(list(self._blocks))

    def confirm(self, names: Iterable[str]) -> None:
        """Note that Redis names these blocks; unknown names are ignored."""
        for block in self.find(names):
            if block is not None:
                block.confirmed = True

    def unconfirmed(self, older_than: float) -> dict[str, list[str]]:
        """Names held for more than ``older_than`` seconds and not confirmed, by partition."""
        before = time.monotonic() - older_than
        found: dict[str, list[str]] = {}
        with self._lock:
            for name, block in self._blocks.items():
                if not block.confirmed and block.since < before:
                    found.setdefault(block.partition, []).append(name)
        return found

    def _tell(self, freed: int) -> None:
        if freed > 0:
            for listener in self.on_room:
                listener()
