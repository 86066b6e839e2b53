"""Pages are asked for one ahead, and nothing of that is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from tq_redis.control.pages import pages

pytestmark = pytest.mark.asyncio


class Book:
    """Pages 1 to ``last``, of which ``torn`` fails and ``lost`` never comes; notes what happened in
    which order."""

    def __init__(self, last: int, *, torn: int = 0, lost: int = 0) -> None:
        self._last = last
        self._torn = torn
        self._lost = lost
        self.events: list[str] = []
        self.waits = asyncio.Event()

    async def page(self, number: int) -> int:
        self.events.append(f"asked {number}")
        if number == self._lost:
            self.waits.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.events.append(f"left {number}")
        if number == self._torn:
            raise ValueError(f"page {number} is torn")
        return number

    def following(self, number: int) -> Coroutine[Any, Any, int] | None:
        return self.page(number + 1) if number < self._last else None

    async def read(self, upto: int) -> None:
        async with aclosing(pages(self.page(1), self.following)) as found:
            async for number in found:
                self.events.append(f"read {number}")
                if number == upto:
                    return


async def test_the_next_page_is_asked_for_before_one_is_read() -> None:
    book = Book(3)
    await book.read(3)
    assert book.events == ["asked 1", "asked 2", "read 1", "asked 3", "read 2", "read 3"]


async def test_one_page() -> None:
    book = Book(1)
    await book.read(1)
    assert book.events == ["asked 1", "read 1"]


async def test_who_stops_reading_leaves_no_question() -> None:
    book = Book(5, lost=3)
    await book.read(2)
    assert book.events == ["asked 1", "asked 2", "read 1", "asked 3", "read 2", "left 3"]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_error_comes_after_the_pages_before_it() -> None:
    book = Book(5, torn=2)
    with pytest.raises(ValueError, match="page 2 is torn"):
        await book.read(5)
    assert book.events == ["asked 1", "asked 2", "read 1"]


async def test_a_reader_that_is_cancelled() -> None:
    book = Book(5, lost=3)
    reading = asyncio.create_task(book.read(5))
    await asyncio.wait_for(book.waits.wait(), 5)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert book.events[-1] == "left 3"
    assert asyncio.all_tasks() == {asyncio.current_task()}
