"""Parsers that a storage unit offers, at work: its clients name one and send a block, and what it
makes of that is kept.

A request may be repeated: it is done once. Its result is counted when there is room for it, so
few are made at a time, and each has a thread until it lies in its room or is thrown away.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

from tq_redis.errors import InputError
from tq_redis.store import messages as m
from tq_redis.store.shelf import Content

_log = logging.getLogger(__name__)

AT_ONCE = 8
"""Threads that run parsers. One that never ends keeps its thread."""

# For so long after its deadline a client may still ask what became of its request.
_REMEMBERED_S = 10.0


class Made(NamedTuple):
    """A block that a parser made.

    Attributes:
        first_row: the row of what it was given that is the block's row 0.
        content: header and buffers, which nobody else has.
    """

    first_row: int
    content: Content


BlockParser = Callable[[Content, int], Sequence[Made]]
"""Makes blocks of about so many bytes from one block."""


@dataclass(eq=False, slots=True)
class Work:
    """A request that is not answered yet.

    Attributes:
        content: the block that came with it.
        until: when it is too late, by the monotonic clock.
        answer: tells who asked last.
        parsed: the parser is done with it.
        over: it is answered, or nobody wants it any more.
    """

    request: m.Parse
    content: Content
    until: float
    answer: Callable[[m.Reply], None]
    parsed: bool = False
    over: threading.Event = field(default_factory=threading.Event)


class Works:
    """Requests for parsers. The thread of the server calls all methods.

    Args:
        parsers: by name.
        wake: called, in other threads, when :meth:`made` has something.
    """

    def __init__(self, parsers: Mapping[str, BlockParser], wake: Callable[[], None]) -> None:
        self._parsers = parsers
        self._wake = wake
        self._to_do: SimpleQueue[Work | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[Work, Sequence[Made] | m.Failed]] = SimpleQueue()
        self._open: dict[str, Work] = {}
        self._answers: dict[str, m.Reply] = {}
        self._forget_at: list[tuple[float, str]] = []
        for _ in range(AT_ONCE if parsers else 0):
            threading.Thread(target=self._run, name="tq_redis parser", daemon=True).start()

    def begin(self, request: m.Parse, content: Content, answer: Callable[[m.Reply], None]) -> None:
        """Do what a request asks for, or go on with it if it was made before.

        Raises:
            ValueError: there is no such parser.
        """
        self._forget_old()
        name = request.name
        if name in self._answers:
            answer(self._answers[name])
        elif name in self._open:
            self._open[name].answer = answer
        elif request.parser not in self._parsers:
            raise ValueError(f"there is no parser {request.parser!r}")
        else:
            work = Work(request, content, time.monotonic() + request.within_s, answer)
            self._open[name] = work
            self._to_do.put(work)

    def made(self) -> Iterator[tuple[Work, Sequence[Made] | m.Failed]]:
        """What parsers have made, or why they failed, since the last call."""
        while not self._results.empty():
            work, result = self._results.get()
            if not work.over.is_set():
                work.parsed = True
                yield work, result

    def end(self, work: Work, reply: m.Reply) -> None:
        """Answer, now and whenever somebody asks again for a while."""
        name = work.request.name
        del self._open[name]
        self._answers[name] = reply
        heapq.heappush(self._forget_at, (work.until + _REMEMBERED_S, name))
        work.over.set()
        work.answer(reply)

    def end_late(self) -> None:
        """Answer those whose parser is not done in time; what it makes is thrown away."""
        now = time.monotonic()
        for work in [w for w in self._open.values() if not w.parsed and w.until <= now]:
            self.end(work, m.Late())

    def deadlines(self) -> list[float]:
        """When the parsers at work must be done."""
        return [work.until for work in self._open.values() if not work.parsed]

    def drop(self, names: Sequence[str]) -> list[str]:
        """Give requests up; unknown names are ignored. Returns the blocks that they have led to
        already."""
        blocks: list[str] = []
        for name in names:
            work = self._open.pop(name, None)
            if work is not None:
                work.over.set()
            reply = self._answers.pop(name, None)
            if isinstance(reply, m.Parsed):
                blocks.extend(block.name for block in reply.blocks)
        return blocks

    def stop(self) -> None:
        """Begin nothing more. Who is at work does not find out before he is done."""
        self.drop(list(self._open))
        for _ in range(AT_ONCE):
            self._to_do.put(None)

    def _forget_old(self) -> None:
        now = time.monotonic()
        while self._forget_at and self._forget_at[0][0] < now:
            self._answers.pop(heapq.heappop(self._forget_at)[1], None)

    # In the threads.

    def _run(self) -> None:
        while (work := self._to_do.get()) is not None:
            if not work.over.is_set():
                self._results.put((work, self._result(work)))
                self._wake()
            work.over.wait()
            del work  # and what came with it, before this thread waits for the next one

    def _result(self, work: Work) -> Sequence[Made] | m.Failed:
        request = work.request
        try:
            return self._parsers[request.parser](work.content, request.block_bytes)
        except InputError as error:
            return m.Failed(str(error), bad_input=True)
        except BaseException as error:  # noqa: BLE001  (what would end this thread, too)
            _log.exception("data_parser %r failed", request.parser)
            return m.Failed(f"{type(error).__name__}: {error}")
