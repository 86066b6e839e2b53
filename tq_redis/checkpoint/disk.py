"""One thread for the disk: it may be slow, and what is asked of it is done in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from tq_redis.deadline import Deadline
from tq_redis.errors import DeadlineError

P = ParamSpec("P")
R = TypeVar("R")


class Disk:
    """Runs calls in a thread of its own, one after the other.

    A call whose caller has gone away still ends before the next one starts, so that what is half
    done can be removed.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "tq_redis-disk")

    async def run(
        self, deadline: Deadline, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """The result of a call.

        Raises:
            DeadlineError: the disk was too slow.
        """
        try:
            async with asyncio.timeout(deadline.remaining):
                return await self.finish(call, *args, **kwargs)
        except TimeoutError:
            raise DeadlineError(
                f"The disk was not done within the deadline of {deadline.seconds:g} s. Give the "
                f"call a longer timeout",
                deadline=deadline.seconds,
            ) from None

    async def finish(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of a call that should not be left half done."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: call(*args, **kwargs))

    def close(self) -> None:
        """End the thread once it has done what it was asked."""
        self._thread.shutdown(wait=False)
