"""A connection by the Unix socket of a store on this host."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from tq_redis.store.connection import Answer, StoreConnection
from tq_redis.store.frames import FrameReader, framed
from tq_redis.store.server import Address


class LocalConnection(StoreConnection):
    """It lasts until the server ends; then it stays broken. :meth:`open` makes it."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._stream = _Stream(self._take, self._fail_all)

    @classmethod
    async def open(cls, address: Address) -> LocalConnection | None:
        """None if the server cannot be reached so: it is on another host, in another container, or
        has no such socket."""
        if address.local is None:
            return None
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.setblocking(False)
            connected.connect(address.local)  # at once, or not at all
        except OSError:
            connected.close()
            return None
        connection = cls(address)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: connection._stream, sock=connected)
        connection._stream.write([address.secret])
        return connection

    def close(self) -> None:
        self._stream.abort()
        self._fail_all()

    async def _send(self, frames: list[Any], answer: asyncio.Future[Answer]) -> None:
        if not self._stream.write(frames):
            raise self._broken()

    def _take(self, message: list[bytes | bytearray]) -> None:
        number, *frames = message
        self._answered(bytes(number), frames)


class _Stream(asyncio.BufferedProtocol):
    """The socket: whole messages go in and come out.

    Args:
        take: called with each message.
        lost: called when no more can come.
    """

    def __init__(
        self, take: Callable[[list[bytes | bytearray]], None], lost: Callable[[], None]
    ) -> None:
        self._reader = FrameReader()
        self._transport: Any = None
        self._take = take
        self._lost = lost

    def write(self, frames: list[Any]) -> bool:
        """Whether the message can be sent."""
        if self._transport is None or self._transport.is_closing():
            return False
        self._transport.writelines(framed(frames))
        return True

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport  # uvloop's is no asyncio.WriteTransport

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for message in self._reader.received(nbytes):
                self._take(message)
        except ValueError:
            self._transport.abort()
