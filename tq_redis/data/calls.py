"""Several calls at once, and calls that block."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from tq_redis.deadline import Deadline
from tq_redis.errors import DeadlineError

T = TypeVar("T")


async def together(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Their results, in this order; the first error cancels the others and is raised."""
    calls = list(calls)
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def to_the_end(calls: Iterable[Awaitable[None]]) -> None:
    """All of them, whichever fail; then the first error is raised, if there is one."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if result is not None:
            raise result


async def in_thread(deadline: Deadline, late: str, call: Callable[[], T]) -> T:
    """Run a call that blocks in a thread, and stop waiting for it at the deadline.

    Args:
        late: what is wrong if it is still at work then.

    Raises:
        DeadlineError: it is.
    """
    try:
        async with asyncio.timeout(deadline.remaining):
            return await asyncio.to_thread(call)
    except TimeoutError:
        raise DeadlineError(
            f"{late} within the deadline of {deadline.seconds:g} s", deadline=deadline.seconds
        ) from None
