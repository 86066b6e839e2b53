"""A client's connection to the server of a store."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.asyncio

from tq_redis.store import messages as m
from tq_redis.store.server import HEARTBEAT_MS, Address


class StoreConnection:
    """Requests and their answers, many at a time. Belongs to the event loop that makes it.

    Args:
        context: of this event loop.
        address: as the server gave it.
    """

    def __init__(self, context: zmq.asyncio.Context, address: Address) -> None:
        self.address = address
        self._socket: Any = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.IPV6, 1),
            (zmq.LINGER, 0),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS),
        ):
            self._socket.setsockopt(option, value)
        if address.server_key is not None:
            public, secret = zmq.curve_keypair()
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, address.server_key.encode())
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._socket.connect(address.endpoint)
        self._numbers = itertools.count()
        self._waiting: dict[bytes, asyncio.Future[tuple[m.Reply, list[Any]]]] = {}
        self._reader = asyncio.create_task(self._read())

    def close(self) -> None:
        """Let go of the connection; calls that wait get no answer."""
        self._reader.cancel()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(TimeoutError())
        self._socket.close()

    async def ask(
        self, request: m.Request, buffers: Sequence[Any] = (), *, wait_s: float
    ) -> tuple[m.Reply, list[Any]]:
        """The answer to a request that may be made twice, and the buffers that came with it.

        Args:
            buffers: of the blocks in the request. They may still be read after an error, so
                whoever changes them then has put nothing that anybody may rely on.

        Raises:
            TimeoutError: no answer within ``wait_s`` seconds.
            ValueError: the server does not understand the request.
        """
        number = next(self._numbers).to_bytes(8, "big")
        future: asyncio.Future[tuple[m.Reply, list[Any]]]
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        frames = [number, self.address.secret, m.encode(request), *buffers]
        try:
            async with asyncio.timeout(wait_s):
                await self._socket.send_multipart(frames, copy=False)
                reply, parts = await future
        finally:
            del self._waiting[number]
        match reply:
            case m.Refused(reason):
                raise ValueError(reason)
            case _:
                return reply, parts

    async def _read(self) -> None:
        while True:
            number, header, *buffers = await self._socket.recv_multipart(copy=False)
            future = self._waiting.get(number.bytes)
            if future is not None and not future.done():
                future.set_result((m.decode_reply(header.buffer), buffers))
