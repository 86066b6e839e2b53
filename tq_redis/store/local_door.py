"""How clients on a store's own host reach it: a Unix socket, without the threads of ZeroMQ between.

A small request and its answer take half the time of a message through ZeroMQ (docs/log.md).
"""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from tq_redis.store import messages as m
from tq_redis.store.frames import FrameReader, framed

_log = logging.getLogger(__name__)

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
# Connections that wait to be taken; who finds no place in it goes through ZeroMQ.
_BACKLOG = 4096
# Buffers that Linux takes in one call (IOV_MAX).
_BUFFERS = 1024


class Respond(Protocol):
    """Where the answer to a request goes."""

    def __call__(self, reply: m.Reply, parts: Sequence[Any] = (), /) -> None: ...


Handle = Callable[[Any, Sequence[Any], Respond], None]
"""What answers a request: its header, its buffers, and where the answer goes."""


class LocalDoor:
    """A listening socket and its clients, in the thread that runs ``selector``.

    Args:
        secret: who does not begin with it is hung up on.
        selector: its keys' data is called with the events.

    Attributes:
        name: of the socket. It has no file (unix(7), abstract), and is seen in this network
            namespace only.
    """

    def __init__(self, secret: bytes, selector: selectors.BaseSelector, handle: Handle) -> None:
        self.name = f"\0tq_redis-{secrets.token_hex(16)}"
        self.secret = secret
        self.selector = selector
        self.handle = handle
        self.clients: set[_Client] = set()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.name)
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)
        selector.register(self._socket, _READ, self._accept)

    def close(self) -> None:
        """Hang up; idempotent."""
        self._stop_listening()
        for client in list(self.clients):
            client.close()

    def _stop_listening(self) -> None:
        if self._socket.fileno() >= 0:
            self.selector.unregister(self._socket)
            self._socket.close()

    def _accept(self, events: int) -> None:
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no more files may be open; asking again and again mends nothing
            _log.warning("A store takes no more clients by its Unix socket: %s", error)
            self._stop_listening()
            return
        self.clients.add(_Client(connection, self))


class _Client:
    """One that has connected. While it does not read its answers, its requests are not read."""

    def __init__(self, connection: socket.socket, door: LocalDoor) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._door = door
        self._reader = FrameReader(largest=len(door.secret))
        self._is_known = False
        self._unsent: deque[memoryview] = deque()
        self._awaited = _READ
        door.selector.register(connection, _READ, self._on_events)

    def close(self) -> None:
        if self in self._door.clients:
            self._door.clients.remove(self)
            self._door.selector.unregister(self._socket)
            self._socket.close()
            self._unsent.clear()

    def _on_events(self, events: int) -> None:
        try:
            if events & _WRITE:
                self._send_more()
            if events & _READ:
                for message in self._receive():
                    self._take(message)
        except (OSError, ValueError):  # it has gone, or is no client of ours
            self.close()

    def _receive(self) -> Iterator[list[bytes | bytearray]]:
        """Raises:
        OSError: it has gone.
        ValueError: that was no message of ours.
        """
        try:
            count = self._socket.recv_into(self._reader.buffer())
        except BlockingIOError:
            return iter(())
        if not count:
            raise ConnectionResetError
        return self._reader.received(count)

    def _take(self, message: list[bytes | bytearray]) -> None:
        if not self._is_known:
            if len(message) > 1 or not secrets.compare_digest(message[0], self._door.secret):
                raise ValueError("It does not know the secret")
            self._is_known = True
            self._reader.largest = None
            return
        number, header, *buffers = message

        def answer(reply: m.Reply, parts: Sequence[Any] = (), /) -> None:
            self._send([number, m.encode(reply), *parts])

        self._door.handle(header, buffers, answer)

    def _send(self, frames: Sequence[Any]) -> None:
        if self in self._door.clients:
            self._unsent.extend(framed(frames))
            try:
                self._send_more()
            except OSError:
                self.close()

    def _send_more(self) -> None:
        while self._unsent:
            try:
                count = self._socket.sendmsg(islice(self._unsent, _BUFFERS))
            except BlockingIOError:
                break
            while self._unsent and count >= len(self._unsent[0]):
                count -= len(self._unsent.popleft())
            if self._unsent:
                self._unsent[0] = self._unsent[0][count:]
        self._await(_WRITE if self._unsent else _READ)

    def _await(self, events: int) -> None:
        if events != self._awaited:
            self._awaited = events
            self._door.selector.modify(self._socket, events, self._on_events)
