"""A client's connection to the server of a store."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tq_redis.store import messages as m
from tq_redis.store.server import HEARTBEAT_MS, Address

# What was sent before may be lost, or nothing can be sent.
_BREAKS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_Answer = tuple[m.Reply, list[Any]]


class StoreConnection:
    """Requests and their answers, many at a time. Belongs to the event loop that makes it.

    It connects by itself, and again when the connection breaks.

    Args:
        address: as the server gave it.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._socket: Any = _context(os.getpid()).socket(zmq.DEALER)
        for option, value in (
            (zmq.IPV6, 1),
            (zmq.LINGER, 0),
            (zmq.IMMEDIATE, 1),  # keep nothing for a server that is not there: it is asked again
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS),
        ):
            self._socket.setsockopt(option, value)
        if address.server_key is not None:
            public, secret = zmq.curve_keypair()
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, address.server_key.encode())
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._monitor: Any = self._socket.get_monitor_socket(_BREAKS)
        self._socket.connect(address.endpoint)
        self._broke = False
        self._numbers = itertools.count()
        self._waiting: dict[bytes, asyncio.Future[_Answer]] = {}
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    def close(self) -> None:
        """Let go of the connection; calls that wait get no answer."""
        for task in self._tasks:
            task.cancel()
        self._fail_all()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    async def ask(
        self, request: m.Request, buffers: Sequence[Any] = (), *, wait_s: float
    ) -> _Answer:
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
        if self._broke:  # another server may listen there now
            self._broke = False
            raise ConnectionError(self._broken)
        number = next(self._numbers).to_bytes(8, "big")
        future: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        frames = [number, self.address.secret, m.encode(request), *buffers]
        sent: asyncio.Future[Any] = self._socket.send_multipart(frames, copy=False)
        try:
            async with asyncio.timeout(wait_s):
                if not sent.done():  # not connected yet
                    await asyncio.wait([sent, future], return_when=asyncio.FIRST_COMPLETED)
                if not future.done():
                    sent.result()
                reply, parts = await future
        finally:
            sent.cancel()
            del self._waiting[number]
        match reply:
            case m.Refused(reason):
                raise ValueError(f"The store at {self.address.endpoint} refused: {reason}")
            case _:
                return reply, parts

    async def _read(self) -> None:
        while True:
            number, *frames = await self._socket.recv_multipart(copy=False)
            future = self._waiting.get(number.bytes)
            if future is None or future.done():
                continue
            try:
                future.set_result((m.decode_reply(frames[0].buffer), frames[1:]))
            except (msgspec.MsgspecError, IndexError) as error:
                future.set_exception(ValueError(f"{self.address.endpoint} is no store: {error}"))

    async def _watch(self) -> None:
        while True:
            await self._monitor.recv_multipart()
            self._broke = not self._waiting
            self._fail_all()

    @property
    def _broken(self) -> str:
        return f"The connection to {self.address.endpoint} broke"

    def _fail_all(self) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionError(self._broken))


@cache
def _context(pid: int) -> zmq.asyncio.Context:
    """One for each process, and never ended: who forgets to close a connection must not wait for
    it for ever. After a fork, the child needs its own."""
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context
