"""A client's connection: what it does when the server is not there, or goes."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator

import msgspec
import numpy as np
import psutil
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from tests.conftest import WaitUntil
from tq_redis.store import messages as m
from tq_redis.store.connection import StoreConnection
from tq_redis.store.frames import FrameReader, framed
from tq_redis.store.local_connection import LocalConnection
from tq_redis.store.server import Address, StoreServer
from tq_redis.store.shelf import Shelf
from tq_redis.store.zmq_connection import ZmqConnection

HOST = "127.0.0.1"
CAPACITY = 1 << 20


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer(Shelf(CAPACITY), HOST, local=True)
    yield server
    server.stop()


async def open_connection(address: Address, kind: str) -> StoreConnection:
    connection = ZmqConnection(address) if kind == "zeromq" else await LocalConnection.open(address)
    assert connection is not None
    return connection


@pytest.fixture(params=["zeromq", "local"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest_asyncio.fixture
async def connection(server: StoreServer, kind: str) -> AsyncIterator[StoreConnection]:
    connection = await open_connection(server.address, kind)
    yield connection
    connection.close()


async def measure(connection: StoreConnection, wait_s: float = 10.0) -> m.Reply:
    return (await connection.ask(m.Measure(), wait_s=wait_s))[0]


@pytest.mark.asyncio
async def test_answers_find_their_questions(connection: StoreConnection) -> None:
    contents = [np.full(1 + 2048 * number, number, np.uint8) for number in range(20)]
    for number, content in enumerate(contents):
        parcels, frames = m.pack([(b"", [content])])
        await connection.ask(m.Hold("p", [str(number)], parcels), frames, wait_s=10)
    order = [number * 7 % 20 for number in range(200)]
    asked = [connection.ask(m.Find([str(number)]), wait_s=10) for number in order]
    for number, (reply, frames) in zip(order, await asyncio.gather(*asked), strict=True):
        assert isinstance(reply, m.Found)
        ((_, (content,)),) = filter(None, m.unpack(reply.parcels, frames))
        assert np.array_equal(content, contents[number])


@pytest.mark.asyncio
async def test_a_request_that_is_refused(connection: StoreConnection) -> None:
    with pytest.raises(ValueError, match="names"):
        await connection.ask(m.Hold("p", ["a"], [m.Parcel(b"", [("|u1", None)])]), wait_s=10)
    assert await measure(connection) == m.Usage(0, 0, CAPACITY)


@pytest.mark.asyncio
async def test_nobody_listens() -> None:
    with socket.socket() as reserved:
        reserved.bind((HOST, 0))
        endpoint = f"tcp://{HOST}:{reserved.getsockname()[1]}"
        connection = ZmqConnection(Address(endpoint, b"secret"))
        started = time.monotonic()
        for _ in range(2):
            with pytest.raises(ConnectionError, match=endpoint):
                await measure(connection, 20)
        assert time.monotonic() - started < 10
        connection.close()


@pytest.mark.asyncio
async def test_the_server_ends_while_an_answer_is_waited_for(
    server: StoreServer, connection: StoreConnection
) -> None:
    await connection.ask(m.Reserve("a", CAPACITY, 0.0, 60.0), wait_s=10)
    waiting = asyncio.create_task(connection.ask(m.Reserve("b", 1, 60.0, 60.0), wait_s=60))
    assert await measure(connection) == m.Usage(0, CAPACITY, CAPACITY)
    await asyncio.to_thread(server.stop)
    started = time.monotonic()
    with pytest.raises(ConnectionError):
        await waiting
    assert time.monotonic() - started < 10


@pytest.mark.asyncio
async def test_a_local_connection_that_broke_stays_so(server: StoreServer) -> None:
    connection = await open_connection(server.address, "local")
    assert await measure(connection) == m.Usage(0, 0, CAPACITY)
    await asyncio.to_thread(server.stop)
    for _ in range(2):
        with pytest.raises(ConnectionError, match="broke"):
            await measure(connection)
    connection.close()
    assert await LocalConnection.open(server.address) is None


@pytest.mark.asyncio
@pytest.mark.parametrize("local", [None, "\0tq_redis-nobody"], ids=["none", "of another host"])
async def test_no_local_socket_here(server: StoreServer, local: str | None) -> None:
    address = msgspec.structs.replace(server.address, local=local)
    assert await LocalConnection.open(address) is None


@pytest.mark.asyncio
async def test_a_connection_that_broke_is_made_again(server: StoreServer) -> None:
    connection = ZmqConnection(server.address)
    assert await measure(connection) == m.Usage(0, 0, CAPACITY)
    await asyncio.to_thread(server.stop)
    port = int(server.address.endpoint.rpartition(":")[2])
    again = StoreServer(Shelf(7), HOST, port)
    try:
        connection.address = again.address  # the secret is a new one
        while True:
            try:
                assert await measure(connection) == m.Usage(0, 0, 7)
                break
            except ConnectionError:
                await asyncio.sleep(0.05)
    finally:
        connection.close()
        again.stop()


@pytest.mark.asyncio
async def test_a_wrong_secret_on_the_local_socket(server: StoreServer) -> None:
    address = msgspec.structs.replace(server.address, secret=b"wrong")
    connection = await open_connection(address, "local")
    with pytest.raises(ConnectionError):
        await measure(connection)
    connection.close()


@pytest.mark.asyncio
async def test_an_answer_that_takes_too_long(connection: StoreConnection) -> None:
    """It is not taken for that of the next request."""
    await connection.ask(m.Reserve("a", CAPACITY, 0.0, 60.0), wait_s=10)
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        await connection.ask(m.Reserve("b", 1, 60.0, 60.0), wait_s=0.3)
    assert 0.3 <= time.monotonic() - started < 5
    assert await connection.ask(m.Drop(["a"]), wait_s=10) == (m.Done(), [])  # and answers that
    assert await measure(connection) == m.Usage(0, 1, CAPACITY)


@pytest.mark.asyncio
async def test_no_answer_in_time(server: StoreServer) -> None:
    connection = ZmqConnection(msgspec.structs.replace(server.address, secret=b"wrong"))
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        await measure(connection, 0.3)
    assert 0.3 <= time.monotonic() - started < 5
    with pytest.raises(TimeoutError):
        await measure(connection, 0.0)
    connection.close()


@pytest.mark.asyncio
async def test_calls_that_wait_when_it_is_closed(server: StoreServer, kind: str) -> None:
    connection = await open_connection(server.address, kind)
    await connection.ask(m.Reserve("a", CAPACITY, 0.0, 60.0), wait_s=10)
    waiting = asyncio.create_task(connection.ask(m.Reserve("b", 1, 60.0, 60.0), wait_s=60))
    await measure(connection)
    connection.close()
    with pytest.raises(ConnectionError):
        await waiting


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "answer", [[], [b"\xc1"], [b"\x80"]], ids=["none", "no message", "no kind"]
)
async def test_who_answers_otherwise_is_no_store(answer: list[bytes]) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as stranger:
        stranger.linger = 0
        port = stranger.bind_to_random_port(f"tcp://{HOST}")
        connection = ZmqConnection(Address(f"tcp://{HOST}:{port}", b"secret"))
        asking = asyncio.create_task(measure(connection))
        client, number, *_ = await stranger.recv_multipart()
        await stranger.send_multipart([client, number, *answer])
        with pytest.raises(ValueError, match="no store"):
            await asking
        asking = asyncio.create_task(measure(connection))
        client, number, *_ = await stranger.recv_multipart()
        await stranger.send_multipart([client, b"unknown", m.encode(m.Done())])
        await stranger.send_multipart([client, number, m.encode(m.Done())])
        assert await asking == m.Done()
        connection.close()


async def next_message(peer: socket.socket, reader: FrameReader) -> list[bytes | bytearray]:
    while True:
        for message in reader.received(0):
            return message
        count = await asyncio.to_thread(peer.recv_into, reader.buffer())
        assert count, "hung up"
        for message in reader.received(count):
            return message


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "answer", [[], [b"\xc1"], [b"\x80"]], ids=["none", "no message", "no kind"]
)
async def test_who_answers_otherwise_on_a_local_socket_is_no_store(answer: list[bytes]) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("\0tq_redis-stranger")
        listening.listen()
        address = Address("tcp://nowhere:1", b"secret", local="\0tq_redis-stranger")
        connection = await open_connection(address, "local")
        with listening.accept()[0] as stranger:
            reader = FrameReader()
            asking = asyncio.create_task(measure(connection))
            assert await next_message(stranger, reader) == [b"secret"]
            number, _ = await next_message(stranger, reader)
            stranger.sendall(b"".join(framed([b"unknown", m.encode(m.Done())])))
            stranger.sendall(b"".join(framed([number, *answer])))
            with pytest.raises(ValueError, match="no store"):
                await asking
            asking = asyncio.create_task(measure(connection))
            await next_message(stranger, reader)
            stranger.sendall(b"\xff" * 100)  # a frame for which there is no memory
            with pytest.raises(ConnectionError):
                await asking
        connection.close()


def test_closed_connections_leave_no_file_open(
    server: StoreServer, kind: str, wait_until: WaitUntil
) -> None:
    process = psutil.Process()

    async def use() -> None:
        connections = [await open_connection(server.address, kind) for _ in range(10)]
        await asyncio.gather(*map(measure, connections))
        for connection in connections:
            connection.close()

    asyncio.run(use())
    files = process.num_fds()
    for _ in range(5):
        asyncio.run(use())
    wait_until(lambda: process.num_fds() <= files, what="no more open files than before")


PROGRAM = """
import asyncio, gc, os, sys
from tq_redis.store import messages as m
from tq_redis.store.local_connection import LocalConnection
from tq_redis.store.server import StoreServer
from tq_redis.store.shelf import Shelf
from tq_redis.store.zmq_connection import ZmqConnection

server = StoreServer(Shelf(1000), "127.0.0.1", local=True)
kept = []

async def use():
    if "local" in sys.argv:
        connection = await LocalConnection.open(server.address)
    else:
        connection = ZmqConnection(server.address)
    if "keep" in sys.argv:
        kept.append(connection)
    big = bytes(1 << 20)
    await connection.ask(m.Hold("p", ["a"], [m.Parcel(b"", [("|u1", None)])]), [big], wait_s=10)
    asyncio.ensure_future(connection.ask(m.Reserve("b", 1000, 60.0, 60.0), wait_s=60))
    reply, _ = await connection.ask(m.Measure(), wait_s=10)
    os.write(1, b"%d " % reply.capacity)  # whole, also beside another process

asyncio.run(use())
gc.collect()
if "fork" in sys.argv:
    child = os.fork()
    asyncio.run(use())
    if child:
        sys.exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("how", ["drop", "keep", "keep fork"])
def test_a_process_that_closes_nothing_ends(how: str, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind, *how.split()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["1000"] * (3 if "fork" in how else 1)
