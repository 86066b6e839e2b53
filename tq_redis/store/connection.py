"""A client's connection to the server of a store."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from tq_redis.store import messages as m
from tq_redis.store.server import Address

Answer = tuple[m.Reply, list[Any]]


class StoreConnection(ABC):
    """Requests and their answers, many at a time. Belongs to the event loop that makes it.

    Args:
        address: as the server gave it.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._numbers = itertools.count()
        self._waiting: dict[bytes, asyncio.Future[Answer]] = {}

    @abstractmethod
    def close(self) -> None:
        """Let go of the connection; calls that wait get no answer."""

    @abstractmethod
    async def _send(self, frames: list[Any], answer: asyncio.Future[Answer]) -> None:
        """Send a request; returns at the latest when ``answer`` is done, as by :meth:`_fail_all`.

        Raises:
            ConnectionError: there is no connection.
        """

    async def ask(
        self, request: m.Request, buffers: Sequence[Any] = (), *, wait_s: float
    ) -> Answer:
        """The answer to a request, and the buffers that came with it.

        Args:
            buffers: of the blocks in the request. They may still be read after an error, so
                whoever changes them then has put nothing that anybody may rely on.

        Raises:
            TimeoutError: no answer within ``wait_s`` seconds.
            ConnectionError: the connection broke, maybe since the request before, or there is none;
                whether the request was done is not known. It may be made again.
            ValueError: the server does not understand the request, or we not its answer.
        """
        number = next(self._numbers).to_bytes(8, "big")
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            async with asyncio.timeout(wait_s):
                await self._send([number, m.encode(request), *buffers], future)
                reply, parts = await future
        finally:
            del self._waiting[number]
        match reply:
            case m.Refused(reason):
                raise ValueError(f"The store at {self.address.endpoint} refused: {reason}")
            case _:
                return reply, parts

    def _answered(self, number: bytes, frames: Sequence[Any]) -> None:
        """What came for a request: header, and buffers of which each has memory of its own."""
        future = self._waiting.get(number)
        if future is None or future.done():
            return
        try:
            future.set_result((m.decode_reply(frames[0]), list(frames[1:])))
        except (msgspec.MsgspecError, IndexError) as error:
            future.set_exception(ValueError(f"{self.address.endpoint} is no store: {error}"))

    def _fail_all(self) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._broken())

    def _broken(self) -> ConnectionError:
        return ConnectionError(f"The connection to {self.address.endpoint} broke")
