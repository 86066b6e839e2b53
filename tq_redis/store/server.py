"""The server of a store: one thread that answers for a shelf, over ZeroMQ and on a Unix socket.

A thread, and not a task of an event loop: what else its process does, adopt blocks for example,
does not hold up small ones.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import zmq

from tq_redis.errors import ConfigError
from tq_redis.store import messages as m
from tq_redis.store.local_door import LocalDoor, Respond
from tq_redis.store.parsers import BlockParser, Made, Work, Works
from tq_redis.store.rooms import Rooms
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
        local: the Unix socket that clients on the same host may use, where there is one. It is not
            encrypted: what passes does not leave the kernel.
    """

    endpoint: str
    secret: bytes
    server_key: str | None = None
    local: str | None = None


_LINUX = sys.platform == "linux"
# Bytes of a message that libzmq keeps in memory of its own for certain.
_OWN_MEMORY = 64 << 10

_AtOnce = m.Hold | m.Find | m.Drop | m.Confirm | m.ListUnconfirmed | m.Measure


class StoreServer:
    """Answers from construction to :meth:`stop`.

    Args:
        shelf: what it answers for; others may use it too.
        host: the address of this host to listen at.
        port: 0: one that is free.
        advertise: the name of this host for clients, where it is another one.
        curve: encrypt, with a key made for this server.
        local: listen on a Unix socket too, where the system has such as need no file (Linux).
        parsers: by the names that clients may ask for.

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
        local: bool = False,
        parsers: Mapping[str, BlockParser] | None = None,
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
        secret = secrets.token_bytes(16)
        self._selector = selectors.DefaultSelector()
        self._door = LocalDoor(secret, self._selector, self._handle) if local and _LINUX else None
        self.address = Address(endpoint, secret, server_key, self._door and self._door.name)
        self._rooms = Rooms(shelf)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._woken)
        self._selector.register(self._socket.getsockopt(zmq.FD), selectors.EVENT_READ, _look_again)
        self._stopped = False
        self._works = Works(parsers or {}, self._wake)
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
        self._works.stop()
        self._context.term()
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()

    def place(self, blocks: Sequence[tuple[str, Block]], room: str) -> bool:
        """:meth:`Rooms.place`, in any thread."""
        return self._rooms.place(blocks, room)

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
        try:
            while not self._stopped:
                # The descriptor of a ZeroMQ socket tells only once of what came (zmq_getsockopt).
                patience_s = 0.0 if self._asked() else self._patience_s()
                for key, events in self._selector.select(patience_s):
                    key.data(events)
                if self._asked():
                    self._answer(self._socket.recv_multipart(copy=False))
                self._take_results()
                self._rooms.serve()
        finally:
            if self._door is not None:
                self._door.close()
            self._socket.close()

    def _asked(self) -> bool:
        return bool(self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN)

    def _woken(self, events: int) -> None:
        self._wake_reader.recv(4096)

    def _patience_s(self) -> float | None:
        """Until room that is kept, a wait for room, or the time of a parser runs out."""
        ends = self._rooms.ends() + self._works.deadlines()
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _answer(self, frames: list[Any]) -> None:
        if len(frames) < 4 or frames[2].bytes != self.address.secret:
            return
        client, number, _, header, *buffers = frames
        self._handle(header.buffer, buffers_of(buffers), partial(self._send, client, number))

    def _handle(self, header: Any, buffers: Sequence[Any], answer: Respond) -> None:
        self.last_call = time.monotonic()
        try:
            request = m.decode_request(header)
            if isinstance(request, m.Parse):
                (content,) = m.unpack([request.parcel], buffers)
                assert content is not None
                self._works.begin(request, content, answer)
                return
            if isinstance(request, m.Reserve):
                self._rooms.ask(request, time.monotonic() + request.wait_s, answer)
                return
            reply, parts = self._do(request, buffers)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            reply, parts = m.Refused(str(error)), []
        answer(reply, parts)

    def _do(self, request: _AtOnce, buffers: Sequence[Any]) -> tuple[m.Reply, list[Any]]:
        shelf = self._shelf
        match request:
            case m.Hold():
                return self._hold(request, buffers), []
            case m.Find(names):
                found = shelf.find(names)
                parcels, parts = m.pack(block.content for block in found if block is not None)
                left = iter(parcels)
                return m.Found([None if block is None else next(left) for block in found]), parts
            case m.Drop(names):
                if names is None:
                    shelf.clear()
                else:
                    self._rooms.forget(names)
                    shelf.drop([*names, *self._works.drop(names)])
            case m.Confirm(names):
                shelf.confirm(names)
            case m.ListUnconfirmed(older_than):
                return m.Unconfirmed(shelf.unconfirmed(older_than)), []
            case m.Measure():
                return m.Usage(len(shelf), shelf.used, shelf.capacity), []
        return m.Done(), []

    def _hold(self, request: m.Hold, buffers: Sequence[Any]) -> m.Reply:
        contents = m.unpack(request.parcels, buffers)
        blocks = [
            (name, Block(request.partition, sum(b.nbytes for b in content[1]), content))
            for name, content in zip(request.names, contents, strict=True)
            if content is not None
        ]
        kept = not blocks or self.place(blocks, request.names[0])
        self._rooms.forget(request.names[:1])
        return m.Done() if kept else self._rooms.full()

    def _take_results(self) -> None:
        """Of parsers: they wait for room, as others do."""
        self._works.end_late()
        for work, made in self._works.made():
            if isinstance(made, m.Failed):
                self._works.end(work, made)
                continue
            nbytes = sum(map(_nbytes, made))
            room = m.Reserve(work.request.name, nbytes, 0.0, 0.0)
            if self._shelf.can_ever_hold(nbytes):
                self._rooms.ask(room, work.until, partial(self._place_made, work, made))
            else:
                reason = f"It makes {nbytes} bytes, the unit may keep {self._shelf.capacity}"
                self._works.end(work, m.Failed(reason, bad_input=True))

    def _place_made(self, work: Work, made: Sequence[Made], reply: m.Reply) -> None:
        """What a parser made, when there is room for it or no more time to wait."""
        if isinstance(reply, m.Done):
            name, partition = work.request.name, work.request.partition
            names = [f"{name}-{number}" for number in range(len(made))]
            blocks = [Block(partition, _nbytes(one), one.content) for one in made]
            self.place(list(zip(names, blocks, strict=True)), name)
            reply = m.Parsed(
                [
                    m.ParsedBlock(name, one.content[0], one.first_row, _nbytes(one))
                    for name, one in zip(names, made, strict=True)
                ]
            )
        self._works.end(work, reply)

    def _send(self, client: Any, number: Any, reply: m.Reply, parts: Sequence[Any] = ()) -> None:
        self._socket.send_multipart([client, number, m.encode(reply), *parts], copy=False)


def buffers_of(frames: Sequence[Any]) -> list[Any]:
    """What ZeroMQ received without copying, each with memory of its own: libzmq cuts small messages
    out of one buffer, unaligned, and frees none of it before all are dropped."""
    return [frame.buffer if len(frame) >= _OWN_MEMORY else frame.bytes for frame in frames]


def _look_again(events: int) -> None:
    """The thread asks the ZeroMQ socket itself."""


def _nbytes(made: Made) -> int:
    return sum(buffer.nbytes for buffer in made.content[1])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
