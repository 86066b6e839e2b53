"""One event-loop thread per process, on which all I/O of the client runs.

Callers may be in a plain thread, in a running event loop, or in several loops one after the
other: their own loop is never blocked by ours, and a loop of theirs that stalls does not delay
an answer on the wire. Only torch's current streams are those of the calling thread
(:mod:`tq_redis.data.devices`).

A caller may go away, cancelled or interrupted, in the instant in which its call is done. Each
result is therefore handed over: either the caller takes it, or what the call named with
:func:`if_lost` is done.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import uvloop

from tq_redis.data.devices import as_caller
from tq_redis.errors import ClosedError

T = TypeVar("T")
Undo = Callable[[], None]

_undo: ContextVar[Undo | None] = ContextVar("tq_redis_undo", default=None)


def if_lost(undo: Undo) -> None:
    """For the call that runs: what to do if its caller never gets the result.

    Args:
        undo: called on the portal's event loop.
    """
    _undo.set(undo)


class Portal:
    """Runs coroutines on a daemon thread of its own, from creation to :meth:`stop`."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
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
        handover = _Handover(self._loop, call)
        try:
            self._start(handover)
            return handover.future.result()[0]
        except BaseException:
            handover.give_up()
            raise

    async def arun(self, call: Coroutine[Any, Any, T]) -> T:
        """Wait for the result in the caller's event loop. Cancelling cancels the call.

        Raises:
            ClosedError: the portal was stopped.
        """
        handover = _Handover(self._loop, call)
        try:
            self._start(handover)
            return (await asyncio.wrap_future(handover.future))[0]
        except BaseException:
            handover.give_up()
            raise

    @contextmanager
    def within(self, context: AbstractAsyncContextManager[T]) -> Generator[T]:
        """A context that is entered and left on the portal's loop."""
        held = self.run(_enter(context))
        try:
            yield held
        except BaseException as error:
            self.run(_leave(context, error))
            raise
        self.run(_leave(context, None))

    @asynccontextmanager
    async def awithin(self, context: AbstractAsyncContextManager[T]) -> AsyncGenerator[T]:
        """:meth:`within` for ``async with``, from any event loop."""
        held = await self.arun(_enter(context))
        try:
            yield held
        except BaseException as error:
            await self.arun(_leave(context, error))
            raise
        await self.arun(_leave(context, None))

    def stop(self) -> None:
        """Cancel what runs and end the thread. Idempotent."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def _start(self, handover: _Handover[Any]) -> None:
        if not self._thread.is_alive():
            handover.call.close()
            raise ClosedError("The client was closed. Call init() for a new one.")
        with as_caller():  # the context goes along
            self._loop.call_soon_threadsafe(handover.start)


class _Handover(Generic[T]):
    """A call, and its result with what is to be done if nobody takes it.

    The state of ``future`` decides, under its lock: it is cancelled before it has the result, or
    not at all.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Coroutine[Any, Any, T]) -> None:
        self.call = call
        self.future: Future[tuple[T, Undo | None]] = Future()
        self._loop = loop
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """On the portal's loop."""
        if self.future.cancelled():
            self.call.close()
        else:
            self._task = self._loop.create_task(self._run())

    def give_up(self) -> None:
        """The caller goes away: cancel the call, or undo it if it is done."""
        with suppress(RuntimeError):  # the portal was stopped, and with it the call
            if self.future.cancel():
                self._loop.call_soon_threadsafe(self._cancel)
            elif self.future.exception() is None:
                self._loop.call_soon_threadsafe(_do, self.future.result()[1])

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            result = await self.call
        except asyncio.CancelledError:
            self.future.cancel()
            raise
        except BaseException as error:
            if self.future.set_running_or_notify_cancel():
                self.future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            if self.future.set_running_or_notify_cancel():
                self.future.set_result((result, _undo.get()))
            else:
                _do(_undo.get())


def _do(undo: Undo | None) -> None:
    if undo is not None:
        undo()


async def _enter(context: AbstractAsyncContextManager[T]) -> T:
    return await context.__aenter__()


async def _leave(context: AbstractAsyncContextManager[Any], error: BaseException | None) -> None:
    await context.__aexit__(error and type(error), error, error and error.__traceback__)


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
