"""A connection over ZeroMQ, from any host."""

from __future__ import annotations

import asyncio
import os
from functools import cache
from typing import Any

import zmq
import zmq.asyncio

from tq_redis.store.connection import Answer, StoreConnection
from tq_redis.store.server import HEARTBEAT_MS, Address, buffers_of

# What was sent before may be lost, or nothing can be sent.
_BREAKS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ZmqConnection(StoreConnection):
    """It connects by itself, and again when the connection breaks."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
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
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._fail_all()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    async def _send(self, frames: list[Any], answer: asyncio.Future[Answer]) -> None:
        if self._broke:  # another server may listen there now
            self._broke = False
            raise self._broken()
        number, *request = frames
        sent: asyncio.Future[Any] = self._socket.send_multipart(
            [number, self.address.secret, *request], copy=False
        )
        try:
            if not sent.done():  # not connected yet
                await asyncio.wait([sent, answer], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                sent.result()
        finally:
            sent.cancel()

    async def _read(self) -> None:
        while True:
            number, *frames = await self._socket.recv_multipart(copy=False)
            self._answered(number.bytes, buffers_of(frames))

    async def _watch(self) -> None:
        while True:
            await self._monitor.recv_multipart()
            self._broke = not self._waiting
            self._fail_all()


@cache
def _context(pid: int) -> zmq.asyncio.Context:
    """One for each process, and never ended: who forgets to close a connection must not wait for
    it for ever. After a fork, the child needs its own."""
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context
