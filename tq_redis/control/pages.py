"""Replies that come page by page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# A question is on its way after one or two passes of the event loop, where a connection is free.
_SENDING_PASSES = 4


async def pages(
    first: Coroutine[Any, Any, T], following: Callable[[T], Coroutine[Any, Any, T] | None]
) -> AsyncGenerator[T]:
    """Every page, the next one asked for before the caller works on one: Redis and this process
    are busy at the same time.

    Close it (``contextlib.aclosing``): a page that was asked for is then waited for no more.

    Args:
        first: asks for the first page.
        following: asks for the page behind one; None: that was the last.
    """
    page = await first
    while (question := following(page)) is not None:
        asked = asyncio.create_task(question)
        try:
            for _ in range(_SENDING_PASSES):
                await asyncio.sleep(0)
            yield page
            page = await asked
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
    yield page
