"""The ZeroMQ server of a store: one thread that answers for a shelf.

A thread, and not a task of an event loop: what else its process does, adopt blocks for example,
does not hold up small ones.
"""

from __future__ import annotations

import math
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import zmq

from tq_redis.errors import ConfigError
from tq_redis.store import messages as m
from tq_redis.store.shelf import Block, Shelf

HEARTBEAT_MS = 5_000
"""How often either side asks whether the other one lives; a connection without an answer for three
times as long is given up, with what waits to be sent on it."""


class Address(msgspec.Struct, frozen=True):
    """How clients reach a server.

    Attributes:
        endpoint: ``tcp://host:port``.
        secret: who does not send it gets no answer.
        server_key: the server's public key (Z85) where traffic is encrypted (CurveZMQ).
    """

    endpoint: str
    secret: bytes
    server_key: str | None = None


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request for room that there was not."""

    client: Any
    number: Any
    request: m.Reserve
    until: float


class _Room(NamedTuple):
    """Bytes that are kept for who comes within ``keep_s`` seconds."""

    nbytes: int
    keep_s: float
    until: float


_NO_ROOM = _Room(0, 0.0, 0.0)


class StoreServer:
    """Answers from construction to :meth:`stop`.

    Args:
        shelf: what it answers for; others may use it too.
        host: the address of this host to listen at.
        port: 0: one that is free.
        advertise: the name of this host for clients, where it is another one.
        curve: encrypt, with a key made for this server.

    Attributes:
        address: for clients.
        last_call: when it was last asked for something, by the monotonic clock.

    Raises:
        ConfigError: the host is none of this machine's, or the port is in use.
    """

    def __init__(
        self,
        shelf: Shelf,
        host: str,
        port: int = 0,
        *,
        advertise: str | None = None,
        curve: bool = False,
    ) -> None:
        if port not in range(1 << 16):  # libzmq would take it modulo 65536
            raise ConfigError(f"A store cannot listen at port {port}: ports go from 0 to 65535.")
        self.last_call = time.monotonic()
        self._shelf = shelf
        self._context = zmq.Context()
        self._socket: Any = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.IPV6, 1),
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 0),  # an answer that finds a full queue would be dropped without a word
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS),
        ):
            self._socket.setsockopt(option, value)
        server_key = self._encrypt() if curve else None
        port = self._bind(host, port)
        endpoint = f"tcp://{_bracketed(advertise or host)}:{port}"
        self.address = Address(endpoint, secrets.token_bytes(16), server_key)
        # Of those who asked for room, by the name that they asked with: in the order in which they
        # came who still waits, and the bytes that are kept, until when, for who does not.
        self._waiting: dict[str, _Waiting] = {}
        self._reserved: dict[str, _Room] = {}
        self._reserving = threading.Lock()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._stopped = False
        shelf.on_room.append(self._wake)
        self._thread = threading.Thread(target=self._run, name="tq_redis store", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Answer no more; idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._shelf.on_room.remove(self._wake)
        self._wake()
        self._thread.join()
        self._context.term()
        self._wake_reader.close()
        self._wake_writer.close()

    def place(self, blocks: Sequence[tuple[str, Block]], room: str) -> bool:
        """Keep blocks, all or none, in room that was reserved under a name; where there is none, or
        too little, in what is free. Other blocks may come into what is left of it. Safe to repeat,
        and in any thread.

        Returns:
            False if there is too little room.
        """
        nbytes = sum(block.nbytes for _, block in blocks)
        with self._reserving:
            reserved = self._reserved.pop(room, _NO_ROOM)
            if reserved.nbytes > nbytes:
                self._keep(room, reserved.nbytes - nbytes, reserved.keep_s)
        if reserved.nbytes >= nbytes:
            self._shelf.place(blocks)
            return True
        self._shelf.give_back(reserved.nbytes)
        return self._shelf.hold(blocks)

    def _keep(self, room: str, nbytes: int, keep_s: float) -> None:
        self._reserved[room] = _Room(nbytes, keep_s, time.monotonic() + keep_s)

    def _encrypt(self) -> str:
        public, secret = zmq.curve_keypair()
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        return public.decode()

    def _bind(self, host: str, port: int) -> int:
        wanted = f"tcp://{_bracketed(host)}:{port or '*'}"
        try:
            self._socket.bind(wanted)
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise ConfigError(
                f"A store cannot listen at {wanted}: {error}. Choose an address of this host, and "
                f"port 0 for one that is free."
            ) from error
        return int(self._socket.getsockopt(zmq.LAST_ENDPOINT).decode().rpartition(":")[2])

    def _wake(self) -> None:
        with suppress(OSError):  # so many wakes are waiting already, or it was stopped just now
            self._wake_writer.send(b"\0")

    # All that follows runs in the thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        try:
            while not self._stopped:
                ready = dict(poller.poll(self._patience_ms()))
                if self._wake_reader.fileno() in ready:
                    self._wake_reader.recv(4096)
                if self._socket in ready:
                    self._answer(self._socket.recv_multipart(copy=False))
                self._serve_waiting()
        finally:
            self._socket.close()

    def _patience_ms(self) -> int | None:
        """Until room that is kept, or a wait for room, runs out."""
        ends = [room.until for _, room in self._rooms()]
        ends += [waiting.until for waiting in self._waiting.values()]
        return max(0, math.ceil(1000 * (min(ends) - time.monotonic()))) if ends else None

    def _answer(self, frames: list[Any]) -> None:
        if len(frames) < 4 or frames[2].bytes != self.address.secret:
            return
        self.last_call = time.monotonic()
        client, number, _, header, *buffers = frames
        try:
            request = m.decode_request(header.buffer)
            if isinstance(request, m.Reserve) and not self._answers_at_once(request):
                until = time.monotonic() + request.wait_s
                self._waiting[request.name] = _Waiting(client, number, request, until)
                return
            reply, parts = self._do(request, buffers)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            reply, parts = m.Refused(str(error)), []
        self._send(client, number, reply, parts)

    def _answers_at_once(self, request: m.Reserve) -> bool:
        """Whether nothing is to be waited for: room is kept already, or there never will be."""
        return request.name in self._reserved or not self._shelf.can_ever_hold(request.nbytes)

    def _do(self, request: m.Request, buffers: list[Any]) -> tuple[m.Reply, list[Any]]:
        shelf = self._shelf
        match request:
            case m.Hold():
                return self._hold(request, buffers), []
            case m.Find(names):
                found = shelf.find(names)
                parcels, parts = m.pack(block.content for block in found if block is not None)
                left = iter(parcels)
                return m.Found([None if block is None else next(left) for block in found]), parts
            case m.Reserve(name):
                return m.Done() if name in self._reserved else self._full(), []
            case m.Drop(names):
                if names is None:
                    shelf.clear()
                else:
                    self._forget(names)
                    shelf.drop(names)
            case m.Confirm(names):
                shelf.confirm(names)
            case m.ListUnconfirmed(older_than):
                return m.Unconfirmed(shelf.unconfirmed(older_than)), []
            case m.Measure():
                return m.Usage(len(shelf), shelf.used, shelf.capacity), []
        return m.Done(), []

    def _hold(self, request: m.Hold, buffers: list[Any]) -> m.Reply:
        contents = m.unpack(request.parcels, buffers)
        blocks = [
            (name, Block(request.partition, sum(b.nbytes for b in content[1]), content))
            for name, content in zip(request.names, contents, strict=True)
            if content is not None
        ]
        kept = not blocks or self.place(blocks, request.names[0])
        self._forget(request.names[:1])
        return m.Done() if kept else self._full()

    def _forget(self, names: Sequence[str]) -> None:
        """Give back the room that is kept, or waited for, under these names."""
        for name in names:
            self._waiting.pop(name, None)
            with self._reserving:
                left = self._reserved.pop(name, _NO_ROOM)
            self._shelf.give_back(left.nbytes)

    def _rooms(self) -> list[tuple[str, _Room]]:
        with self._reserving:
            return list(self._reserved.items())

    def _full(self) -> m.Full:
        return m.Full(self._shelf.used, self._shelf.capacity or 0)

    def _serve_waiting(self) -> None:
        """First come, first served: or large requests would wait for ever."""
        now = time.monotonic()
        self._forget([name for name, room in self._rooms() if room.until < now])
        blocked = False
        for waiting in list(self._waiting.values()):
            if not blocked and self._grant(waiting):
                continue
            if waiting.until > now:
                blocked = True
            else:
                del self._waiting[waiting.request.name]
                self._send(waiting.client, waiting.number, self._full())

    def _grant(self, waiting: _Waiting) -> bool:
        request = waiting.request
        if not self._shelf.reserve(request.nbytes):
            return False
        del self._waiting[request.name]
        with self._reserving:
            self._keep(request.name, request.nbytes, request.keep_s)
        self._send(waiting.client, waiting.number, m.Done())
        return True

    def _send(self, client: Any, number: Any, reply: m.Reply, parts: Sequence[Any] = ()) -> None:
        self._socket.send_multipart([client, number, m.encode(reply), *parts], copy=False)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
