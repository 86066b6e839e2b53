"""A client of a store's server that says what the test wants, also what is wrong."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import zmq

from tq_redis.store import messages as m
from tq_redis.store.server import Address


class Caller:
    """Sends, and reads answers; blocking.

    Args:
        address: of the server.
        server_key: to encrypt with, if another one than the address says.
    """

    def __init__(self, address: Address, server_key: str | None = None) -> None:
        self._secret = address.secret
        self._socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        if server_key is not None:
            public, secret = zmq.curve_keypair()
            self._socket.curve_serverkey = server_key.encode()
            self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
        self._socket.connect(address.endpoint)

    def close(self) -> None:
        self._socket.close()

    def send_frames(self, *frames: bytes) -> None:
        self._socket.send_multipart(list(frames))

    def send(self, request: m.Request, *buffers: Any, number: bytes = b"1") -> None:
        self._socket.send_multipart([number, self._secret, m.encode(request), *buffers])

    def answer(self, within_s: float = 10.0) -> tuple[bytes, m.Reply, list[bytes]]:
        """The next answer: number, reply and buffers."""
        assert self._socket.poll(1000 * within_s), "no answer"
        number, header, *buffers = self._socket.recv_multipart()
        return number, m.decode_reply(header), buffers

    def silent(self, for_s: float) -> bool:
        """Whether nothing comes for so long."""
        return not self._socket.poll(1000 * for_s)

    def ask(self, request: m.Request, *buffers: Any) -> m.Reply:
        self.send(request, *buffers)
        return self.answer()[1]


@contextmanager
def calling(address: Address, server_key: str | None = None) -> Generator[Caller]:
    caller = Caller(address, server_key or address.server_key)
    try:
        yield caller
    finally:
        caller.close()
