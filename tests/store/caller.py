"""Clients of a store's server that say what the test wants, also what is wrong."""

from __future__ import annotations

import select
import socket
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import zmq

from tq_redis.store import messages as m
from tq_redis.store.frames import FrameReader, framed
from tq_redis.store.server import Address


class Caller(ABC):
    """Sends, and reads answers; blocking."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def send_request(self, number: bytes, header: bytes, *buffers: Any) -> None:
        """Also what is none."""

    @abstractmethod
    def receive(self, within_s: float) -> list[bytes] | None:
        """The frames of the next message; None if there is none."""

    def send(self, request: m.Request, *buffers: Any, number: bytes = b"1") -> None:
        self.send_request(number, m.encode(request), *buffers)

    def answer(self, within_s: float = 10.0) -> tuple[bytes, m.Reply, list[bytes]]:
        """The next answer: number, reply and buffers."""
        frames = self.receive(within_s)
        assert frames is not None, "no answer"
        number, header, *buffers = frames
        return number, m.decode_reply(header), buffers

    def silent(self, for_s: float) -> bool:
        """Whether nothing comes for so long."""
        return self.receive(for_s) is None

    def ask(self, request: m.Request, *buffers: Any) -> m.Reply:
        self.send(request, *buffers)
        return self.answer()[1]


class ZmqCaller(Caller):
    """Args:
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

    def send_request(self, number: bytes, header: bytes, *buffers: Any) -> None:
        self.send_frames(number, self._secret, header, *buffers)

    def receive(self, within_s: float) -> list[bytes] | None:
        if not self._socket.poll(1000 * within_s):
            return None
        frames: list[bytes] = self._socket.recv_multipart()
        return frames


class LocalCaller(Caller):
    """By the Unix socket.

    Attributes:
        socket: connected; nothing was sent.
    """

    def __init__(self, address: Address) -> None:
        assert address.local is not None
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            self.socket.connect(address.local)
        except OSError:
            self.socket.close()
            raise
        self._reader = FrameReader()
        self._come: list[list[bytes]] = []

    def close(self) -> None:
        self.socket.close()

    def send_frames(self, *frames: bytes) -> None:
        self.socket.sendall(b"".join(framed(frames)))

    def send_request(self, number: bytes, header: bytes, *buffers: Any) -> None:
        self.send_frames(number, header, *buffers)

    def receive(self, within_s: float) -> list[bytes] | None:
        while not self._come:
            if not select.select([self.socket], [], [], within_s)[0]:
                return None
            count = self.socket.recv_into(self._reader.buffer())
            if not count:
                raise EOFError
            self._come += [list(map(bytes, frames)) for frames in self._reader.received(count)]
        return self._come.pop(0)

    def is_hung_up(self, within_s: float = 10.0) -> bool:
        try:
            self.receive(within_s)
        except (EOFError, ConnectionResetError):
            return True
        return False


@contextmanager
def calling(address: Address, server_key: str | None = None) -> Generator[ZmqCaller]:
    caller = ZmqCaller(address, server_key or address.server_key)
    try:
        yield caller
    finally:
        caller.close()


@contextmanager
def calling_locally(address: Address) -> Generator[LocalCaller]:
    caller = LocalCaller(address)
    try:
        caller.send_frames(address.secret)
        yield caller
    finally:
        caller.close()
