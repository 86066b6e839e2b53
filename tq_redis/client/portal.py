"""One event-loop thread per process, on which all I/O of the client runs.

Callers may be in a plain thread, in a running event loop, or in several loops one after the
other: their own loop is never blocked by ours, and a loop of theirs that stalls does not delay
an answer on the wire.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from tq_redis.errors import ClosedError

T = TypeVar("T")


class Portal:
    """Runs coroutines on a daemon thread of its own, from creation to :meth:`stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tq_redis", daemon=True)
        self._thread.start()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Wait for the result in this thread. An interrupt cancels the call.

        Raises:
            RuntimeError: called on the portal's own thread, which would wait for itself.
            ClosedError: the portal was stopped.
        """
        if threading.current_thread() is self._thread:
            call.close()
            raise RuntimeError(
                "A blocking call on the client's own event loop; await its async_ form"
            )
        future = self._submit(call)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def arun(self, call: Coroutine[Any, Any, T]) -> T:
        """Wait for the result in the caller's event loop. Cancelling cancels the call.

        Raises:
            ClosedError: the portal was stopped.
        """
        return await asyncio.wrap_future(self._submit(call))

    def stop(self) -> None:
        """Cancel what runs and end the thread. Idempotent."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def _submit(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        if not self._thread.is_alive():
            call.close()
            raise ClosedError("The client was closed. Call init() for a new one.")
        return asyncio.run_coroutine_threadsafe(call, self._loop)


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
