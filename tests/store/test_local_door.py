"""The Unix socket of a store: strangers, clients that go, and clients that do not read."""

from __future__ import annotations

import logging
import os
import resource
import socket
import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.conftest import WaitUntil
from tests.store.caller import LocalCaller, calling, calling_locally
from tq_redis.store import messages as m
from tq_redis.store.frames import framed
from tq_redis.store.server import StoreServer
from tq_redis.store.shelf import Shelf

HOST = "127.0.0.1"
CAPACITY = 256 << 20


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer(Shelf(CAPACITY), HOST, local=True)
    yield server
    server.stop()


@pytest.fixture
def caller(server: StoreServer) -> Iterator[LocalCaller]:
    with calling_locally(server.address) as caller:
        yield caller


def hold(caller: LocalCaller, name: str, content: bytes) -> None:
    request = m.Hold("p", [name], [m.Parcel(b"", [("|u1", None)])])
    assert caller.ask(request, content) == m.Done()


def blocks(caller: LocalCaller) -> int:
    usage = caller.ask(m.Measure())
    assert isinstance(usage, m.Usage)
    return usage.blocks


def test_only_who_asks_for_it_gets_one() -> None:
    server = StoreServer(Shelf(CAPACITY), HOST)
    assert server.address.local is None
    server.stop()


def test_there_is_no_file(server: StoreServer) -> None:
    """Nothing is left behind by a store that is killed."""
    assert server.address.local is not None
    assert server.address.local.startswith("\0")


STRANGERS: dict[str, Callable[[bytes], Sequence[bytes | memoryview]]] = {
    "another secret": lambda secret: framed([bytes(16)]),
    "half of it": lambda secret: framed([secret[:8]]),
    "nothing": lambda secret: framed([b""]),
    "more than the secret": lambda secret: framed([secret, b"more"]),
    "a long frame": lambda secret: [struct.pack("<Q?", 1 << 40, False)],
    "another protocol": lambda secret: [b"GET / HTTP/1.1\r\n\r\n"],
}


@pytest.mark.parametrize("case", STRANGERS)
def test_who_does_not_know_the_secret_is_hung_up_on(
    server: StoreServer, caller: LocalCaller, case: str
) -> None:
    assert blocks(caller) == 0
    before = server.last_call
    stranger = LocalCaller(server.address)
    try:
        stranger.socket.sendall(b"".join(STRANGERS[case](server.address.secret)))
        assert stranger.is_hung_up()
    finally:
        stranger.close()
    assert server.last_call == before
    assert blocks(caller) == 0


def test_a_message_without_a_request(server: StoreServer, caller: LocalCaller) -> None:
    with calling_locally(server.address) as other:
        other.send_frames(b"number alone")
        assert other.is_hung_up()
    assert blocks(caller) == 0


def test_a_request_that_comes_byte_by_byte(server: StoreServer, caller: LocalCaller) -> None:
    with calling_locally(server.address) as slow:
        for byte in b"".join(framed([b"1", m.encode(m.Measure())])):
            slow.socket.sendall(bytes([byte]))
            assert blocks(caller) == 0
        assert slow.answer()[:2] == (b"1", m.Usage(0, 0, CAPACITY))


def test_many_requests_at_once(server: StoreServer) -> None:
    caller = LocalCaller(server.address)
    messages = [framed([b"%d" % n, m.encode(m.Measure())]) for n in range(5000)]
    pieces = framed([server.address.secret]) + [piece for one in messages for piece in one]
    try:
        caller.socket.sendall(b"".join(pieces))
        assert [caller.answer()[0] for _ in range(5000)] == [b"%d" % n for n in range(5000)]
    finally:
        caller.close()


def test_large_blocks_come_and_go(caller: LocalCaller) -> None:
    contents = [np.random.default_rng(n).bytes((1 << 20) * n + n) for n in range(4)]
    parcels = [m.Parcel(b"", [("|u1", None)]) for _ in contents]
    names = [str(n) for n in range(4)]
    assert caller.ask(m.Hold("p", names, parcels), *contents) == m.Done()
    for _ in range(3):
        caller.send(m.Find(names))
        _, reply, buffers = caller.answer()
        assert isinstance(reply, m.Found)
        found = m.unpack(reply.parcels, buffers)
        assert [one and one[1][0].tobytes() for one in found] == contents


def test_an_answer_of_many_frames(caller: LocalCaller) -> None:
    """More than Linux takes in one call."""
    names = [str(n) for n in range(1500)]
    contents = [bytes([n % 256]) * (16 << 10) for n in range(1500)]
    parcels = [m.Parcel(b"", [("|u1", None)]) for _ in contents]
    assert caller.ask(m.Hold("p", names, parcels), *contents) == m.Done()
    caller.send(m.Find(names))
    assert caller.answer()[2] == contents


def test_who_does_not_read_its_answers_is_not_read_either(
    server: StoreServer, caller: LocalCaller
) -> None:
    """Or its answers would pile up in the store without an end; others are served meanwhile."""
    content = os.urandom(1 << 20)
    hold(caller, "a", content)
    with calling_locally(server.address) as lazy:
        lazy.socket.setblocking(False)
        sent = 0
        with pytest.raises(BlockingIOError):
            while sent < 100_000:
                lazy.send(m.Find(["a"]), number=b"%d" % sent)
                sent += 1
                blocks(caller)
        lazy.socket.setblocking(True)
        for number in range(sent):
            assert lazy.answer()[::2] == (b"%d" % number, [content])


def test_clients_that_go(server: StoreServer, caller: LocalCaller, wait_until: WaitUntil) -> None:
    """While they wait for room, while an answer comes, in the middle of a request."""
    hold(caller, "a", bytes(8 << 20))
    files = psutil.Process().num_fds()
    for number in range(20):
        with calling_locally(server.address) as waiting:
            waiting.send(m.Reserve(f"b{number}", CAPACITY, 0.3, 60.0))
        with calling_locally(server.address) as reading:
            reading.send(m.Find(["a"]))
            assert reading.socket.recv(10)
        with calling_locally(server.address) as writing:
            writing.socket.sendall(struct.pack("<Q?", 1 << 20, False) + b"begun")
        assert blocks(caller) == 1
    wait_until(lambda: psutil.Process().num_fds() <= files, what="the store has hung up too")
    # When this is answered, all those who waited and are gone have been, too.
    assert isinstance(caller.ask(m.Reserve("last", CAPACITY, 0.5, 60.0)), m.Full)
    assert blocks(caller) == 1


@contextmanager
def no_more_files() -> Generator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(file.name) for file in Path("/proc/self/fd").iterdir())
    unused = [os.open(os.devnull, os.O_RDONLY)]
    while unused[-1] < highest:
        unused.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(highest, unused[-1]) + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in unused:
            os.close(file)


def test_a_store_that_may_open_no_more_files(
    server: StoreServer,
    caller: LocalCaller,
    caplog: pytest.LogCaptureFixture,
    wait_until: WaitUntil,
) -> None:
    """It does not try again and again; who is there is served, who comes takes the other way."""
    assert server.address.local is not None
    with socket.socket(socket.AF_UNIX) as last, ExitStack() as files:
        with caplog.at_level(logging.WARNING):
            files.enter_context(no_more_files())
            last.connect(server.address.local)
            wait_until(lambda: "no more clients" in caplog.text, what="the store says so")
            files.close()
        assert blocks(caller) == 0
        with pytest.raises(ConnectionRefusedError), calling_locally(server.address):
            pass
    with calling(server.address) as other:
        assert other.ask(m.Measure()) == m.Usage(0, 0, CAPACITY)
