"""Room on a shelf for blocks that are still to come: kept for who has it, in turn for who waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tq_redis.store import messages as m
from tq_redis.store.shelf import Block, Shelf


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request for room that there was not."""

    answer: Callable[[m.Reply], None]
    request: m.Reserve
    until: float


class _Room(NamedTuple):
    """Bytes that are kept for who comes within ``keep_s`` seconds."""

    nbytes: int
    keep_s: float
    until: float


_NO_ROOM = _Room(0, 0.0, 0.0)


class Rooms:
    """Room by the name that it was asked for with. All methods but :meth:`place` belong to one
    thread.

    Attributes:
        waiting: who has none yet, in the order in which they came.
    """

    def __init__(self, shelf: Shelf) -> None:
        self.waiting: dict[str, _Waiting] = {}
        self._shelf = shelf
        self._reserved: dict[str, _Room] = {}
        self._reserving = threading.Lock()

    def place(self, blocks: Sequence[tuple[str, Block]], room: str) -> bool:
        """Keep blocks, all or none, in room that was reserved under a name; where there is none, or
        too little, in what is free. Other blocks may come into what is left of it. Safe to repeat,
        and in any thread.

        Returns:
            False if there is too little room.
        """
        nbytes = sum(block.nbytes for _, block in blocks)
        with self._reserving:
            reserved = self._reserved.pop(room, _NO_ROOM)
            if reserved.nbytes > nbytes:
                self._keep(room, reserved.nbytes - nbytes, reserved.keep_s)
        if reserved.nbytes >= nbytes:
            self._shelf.place(blocks)
            return True
        self._shelf.give_back(reserved.nbytes)
        return self._shelf.hold(blocks)

    def ask(self, request: m.Reserve, until: float, answer: Callable[[m.Reply], None]) -> None:
        """Say ``Done`` when the room is kept, or ``Full`` when there is none by then (monotonic
        clock): at once where nothing is to be waited for, else in :meth:`serve`."""
        if request.name in self._reserved:
            answer(m.Done())
        elif self._shelf.can_ever_hold(request.nbytes):
            self.waiting[request.name] = _Waiting(answer, request, until)
        else:
            answer(self.full())

    def forget(self, names: Sequence[str]) -> None:
        """Give back the room that is kept, or waited for, under these names."""
        for name in names:
            self.waiting.pop(name, None)
            with self._reserving:
                left = self._reserved.pop(name, _NO_ROOM)
            self._shelf.give_back(left.nbytes)

    def full(self) -> m.Full:
        """The answer where there is too little room."""
        return m.Full(self._shelf.used, self._shelf.capacity or 0)

    def ends(self) -> list[float]:
        """When room that is kept, and waits for room, run out."""
        ends = [room.until for _, room in self._rooms()]
        return ends + [waiting.until for waiting in self.waiting.values()]

    def serve(self) -> None:
        """First come, first served: or large requests would wait for ever."""
        now = time.monotonic()
        self.forget([name for name, room in self._rooms() if room.until < now])
        blocked = False
        for waiting in list(self.waiting.values()):
            if not blocked and self._grant(waiting):
                continue
            if waiting.until > now:
                blocked = True
            else:
                del self.waiting[waiting.request.name]
                waiting.answer(self.full())

    def _grant(self, waiting: _Waiting) -> bool:
        request = waiting.request
        if not self._shelf.reserve(request.nbytes):
            return False
        del self.waiting[request.name]
        with self._reserving:
            self._keep(request.name, request.nbytes, request.keep_s)
        waiting.answer(m.Done())
        return True

    def _keep(self, room: str, nbytes: int, keep_s: float) -> None:
        self._reserved[room] = _Room(nbytes, keep_s, time.monotonic() + keep_s)

    def _rooms(self) -> list[tuple[str, _Room]]:
        with self._reserving:
            return list(self._reserved.items())
