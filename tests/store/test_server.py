"""The server of a store, asked through real sockets."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import psutil
import pytest
import zmq

from tests.conftest import WaitUntil
from tests.store.caller import Caller, calling, calling_locally
from tq_redis.errors import ConfigError
from tq_redis.store import messages as m
from tq_redis.store.server import StoreServer
from tq_redis.store.shelf import Block, Shelf

CAPACITY = 1000
HOST = "127.0.0.1"


@pytest.fixture
def shelf() -> Shelf:
    return Shelf(CAPACITY)


@pytest.fixture
def server(shelf: Shelf) -> Iterator[StoreServer]:
    server = StoreServer(shelf, HOST, local=True)
    yield server
    server.stop()


@pytest.fixture(params=[calling, calling_locally], ids=["zeromq", "local"])
def caller(server: StoreServer, request: pytest.FixtureRequest) -> Iterator[Caller]:
    """What a server does, it does for clients of both kinds."""
    with request.param(server.address) as caller:
        yield caller


def hold(name: str, nbytes: int) -> tuple[m.Hold, bytes]:
    return m.Hold("p", [name], [m.Parcel(b"header", [("|u1", None)])]), b"x" * nbytes


def reserve(name: str, nbytes: int, wait_s: float = 0.0, keep_s: float = 60.0) -> m.Reserve:
    return m.Reserve(name, nbytes, wait_s, keep_s)


def is_full(reply: m.Reply) -> bool:
    return isinstance(reply, m.Full)


def test_blocks_come_and_go(caller: Caller, shelf: Shelf) -> None:
    contents = {"small": b"s" * 10, "empty": b"", "large": os.urandom(500)}
    # Each may come in the message or in a frame; what is small comes back in the message.
    parcels = [m.Parcel(b"small", [("|u1", None)]), m.Parcel(b"empty", [("|u1", b"")])]
    parcels.append(m.Parcel(b"large", [("|u1", contents["large"])]))
    request = m.Hold("p", list(contents), parcels)
    assert caller.ask(request, contents["small"]) == m.Done()
    assert caller.ask(m.Measure()) == m.Usage(3, 510, CAPACITY)
    caller.send(m.Find(["large", "unknown", "small", "empty"]), number=b"7")
    number, reply, buffers = caller.answer()
    small = m.Parcel(b"small", [("|u1", contents["small"])])
    assert (number, reply) == (b"7", m.Found([parcels[2], None, small, parcels[1]]))
    assert buffers == []
    assert caller.ask(m.ListUnconfirmed(-1.0)) == m.Unconfirmed({"p": list(contents)})
    assert caller.ask(m.Confirm(["small", "unknown"])) == m.Done()
    assert caller.ask(m.ListUnconfirmed(-1.0)) == m.Unconfirmed({"p": ["empty", "large"]})
    assert caller.ask(m.ListUnconfirmed(60.0)) == m.Unconfirmed({})
    assert caller.ask(m.Drop(["small", "unknown"])) == m.Done()
    assert shelf.used == 500
    assert caller.ask(m.Drop()) == m.Done()
    assert (shelf.used, len(shelf)) == (0, 0)


def test_a_repeated_hold_is_held_once(caller: Caller, shelf: Shelf) -> None:
    assert caller.ask(reserve("a", 600)) == m.Done()
    for _ in range(3):
        assert caller.ask(*hold("a", 600)) == m.Done()
    assert (len(shelf), shelf.used) == (1, 600)


def test_a_repeated_reserve_keeps_room_once(caller: Caller, shelf: Shelf) -> None:
    """Its answer was lost."""
    for _ in range(3):
        assert caller.ask(reserve("a", 600)) == m.Done()
    assert shelf.used == 600
    assert is_full(caller.ask(reserve("b", 600)))
    caller.send(reserve("b", 600, 30.0), number=b"1")
    caller.send(reserve("b", 600, 30.0), number=b"2")
    assert caller.ask(m.Drop(["a"])) == m.Done() if caller.silent(0.0) else False
    assert caller.answer()[:2] == (b"2", m.Done())
    assert shelf.used == 600
    assert caller.silent(0.2)


def test_blocks_come_one_after_the_other_into_their_room(
    server: StoreServer, caller: Caller, shelf: Shelf
) -> None:
    def place(name: str, nbytes: int) -> bool:
        return server.place([(name, Block("p", nbytes, (b"", ())))], "a")

    assert caller.ask(reserve("a", 900)) == m.Done()
    assert place("a", 500)
    assert shelf.used == 900
    assert place("b", 300)
    assert is_full(caller.ask(reserve("other", 200)))
    assert caller.ask(m.Drop(["a", "b"])) == m.Done()
    assert shelf.used == 0


def test_room_is_kept_while_blocks_come(
    server: StoreServer, caller: Caller, shelf: Shelf, wait_until: WaitUntil
) -> None:
    started = time.monotonic()
    assert caller.ask(reserve("a", 900, keep_s=1.0)) == m.Done()
    while time.monotonic() < started + 1.5:
        server.place([(f"a{time.monotonic()}", Block("p", 1, (b"", ())))], "a")
        time.sleep(0.05)
    assert shelf.used == 900
    wait_until(lambda: shelf.used == len(shelf), what="what nobody came for is given back")


def test_a_block_that_is_placed_again_takes_no_room(
    server: StoreServer, caller: Caller, shelf: Shelf
) -> None:
    assert caller.ask(reserve("a", 900)) == m.Done()
    for _ in range(3):
        assert server.place([("a", Block("p", 500, (b"", ())))], "a")
    assert (len(shelf), shelf.used) == (1, 500)


def test_a_full_store_says_so(caller: Caller, shelf: Shelf) -> None:
    assert caller.ask(*hold("a", 600)) == m.Done()
    assert caller.ask(*hold("b", 600)) == m.Full(600, CAPACITY)
    assert caller.ask(reserve("b", 600)) == m.Full(600, CAPACITY)
    assert caller.ask(reserve("b", CAPACITY + 1, 30.0)) == m.Full(600, CAPACITY)
    started = time.monotonic()
    assert caller.ask(reserve("b", 600, 0.3)) == m.Full(600, CAPACITY)
    assert time.monotonic() - started >= 0.3
    assert caller.ask(*hold("c", 400)) == m.Done()


def test_who_waits_gets_room_when_it_is_made(server: StoreServer, caller: Caller) -> None:
    assert caller.ask(*hold("a", 900)) == m.Done()
    with calling(server.address) as waiting:
        waiting.send(reserve("b", 500, 30.0))
        assert waiting.silent(0.2)
        assert caller.ask(m.Drop(["a"])) == m.Done()
        assert waiting.answer(5.0)[1] == m.Done()


def test_room_that_another_thread_makes(caller: Caller, shelf: Shelf) -> None:
    assert shelf.hold([("a", Block("p", 900, (b"", ())))])
    caller.send(reserve("b", 500, 30.0))
    assert caller.silent(0.2)
    threading.Thread(target=shelf.drop, args=(["a"],)).start()
    assert caller.answer(5.0)[1] == m.Done()


def test_first_come_first_served(server: StoreServer, caller: Caller, shelf: Shelf) -> None:
    assert caller.ask(*hold("a", 500)) == m.Done()
    assert caller.ask(*hold("b", 500)) == m.Done()
    with calling(server.address) as large, calling(server.address) as small:
        large.send(reserve("large", 900, 30.0))
        assert large.silent(0.2)
        small.send(reserve("small", 100, 30.0))
        assert caller.ask(m.Drop(["a"])) == m.Done()
        assert large.silent(0.2)
        assert small.silent(0.0)  # or the large one would wait for ever
        assert caller.ask(m.Drop(["b"])) == m.Done()
        assert large.answer(5.0)[1] == m.Done()
        assert small.answer(5.0)[1] == m.Done()
    assert shelf.used == CAPACITY


def test_who_gives_up_waiting_lets_the_next_one_in(caller: Caller) -> None:
    assert caller.ask(*hold("a", 500)) == m.Done()
    caller.send(reserve("large", 900, 0.3), number=b"large")
    caller.send(reserve("small", 100, 30.0), number=b"small")
    answers = [caller.answer(5.0)[:2] for _ in range(2)]
    assert answers == [(b"large", m.Full(500, CAPACITY)), (b"small", m.Done())]


def test_a_drop_takes_back_what_was_asked_for(caller: Caller, shelf: Shelf) -> None:
    assert caller.ask(reserve("a", 900)) == m.Done()
    caller.send(reserve("b", 900, 30.0), number=b"b")
    caller.send(m.Drop(["b"]))
    assert caller.answer()[:2] == (b"1", m.Done())
    assert caller.ask(m.Drop(["a"])) == m.Done()
    assert shelf.used == 0
    assert caller.silent(0.1)


def test_room_that_is_not_used_in_time_is_given_back(caller: Caller, wait_until: WaitUntil) -> None:
    assert caller.ask(reserve("a", 900, keep_s=0.2)) == m.Done()
    assert caller.ask(reserve("b", 900, 10.0, keep_s=0.2)) == m.Done()
    assert caller.ask(reserve("c", 900, 10.0)) == m.Done()
    assert caller.ask(*hold("b", 900)) == m.Full(900, CAPACITY)  # too late
    assert caller.ask(*hold("c", 900)) == m.Done()


@pytest.mark.parametrize("nbytes", [0, 100, 899, 901])
def test_blocks_of_another_size_than_room_was_reserved_for(
    caller: Caller, shelf: Shelf, nbytes: int
) -> None:
    assert caller.ask(reserve("a", 900)) == m.Done()
    assert caller.ask(*hold("a", nbytes)) == m.Done()
    assert shelf.used == nbytes
    assert caller.ask(m.Drop(["a"])) == m.Done()
    assert shelf.used == 0


MALFORMED: dict[str, tuple[object, list[bytes]]] = {
    "no message": (b"\xc1", []),
    "pickle": (pickle.dumps({"type": "Drop"}), []),
    "unknown kind": ({"type": "Explode"}, []),
    "a reply": (m.Done(), []),
    "a field of another type": ({"type": "Find", "names": 3}, []),
    "a buffer too many": (m.Hold("p", ["a"], [m.Parcel(b"", [("|u1", None)])]), [b"1", b"2"]),
    "a buffer too few": (
        m.Hold("p", ["a"], [m.Parcel(b"", [("|u1", None), ("|i1", None)])]),
        [b"1"],
    ),
    "a parcel too few": (m.Hold("p", ["a", "b"], [m.Parcel(b"", [("|u1", None)])]), [b"1"]),
    "half an element within": (m.Hold("p", ["a"], [m.Parcel(b"", [("<i8", b"12345")])]), []),
    "half an element": (m.Hold("p", ["a"], [m.Parcel(b"", [("<i8", None)])]), [b"12345"]),
    "objects": (m.Hold("p", ["a"], [m.Parcel(b"", [("|O", None)])]), [b"12345678"]),
    "no dtype": (m.Hold("p", ["a"], [m.Parcel(b"", [("(,i4", None)])]), [b"12345678"]),
    "no such dtype": (m.Hold("p", ["a"], [m.Parcel(b"", [("<i3", None)])]), [b"123"]),
    "less than nothing": (m.Reserve("a", -5, 0.0, 0.0), []),
    "for ever": (m.Reserve("a", 5, float("inf"), 1.0), []),
    "no number": (m.Reserve("a", 5, float("nan"), 1.0), []),
    "keep for ever": (m.Reserve("a", 5, 0.0, float("nan")), []),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_what_is_no_request_gets_an_error(caller: Caller, shelf: Shelf, case: str) -> None:
    request, buffers = MALFORMED[case]
    header = request if isinstance(request, bytes) else msgspec.msgpack.encode(request)
    caller.send_request(b"bad", header, *buffers)
    number, reply, _ = caller.answer()
    assert number == b"bad"
    assert isinstance(reply, m.Refused)
    assert reply.reason
    assert caller.ask(m.Measure()) == m.Usage(0, 0, CAPACITY)


def test_more_than_there_can_be_is_full(caller: Caller, shelf: Shelf) -> None:
    assert is_full(caller.ask(reserve("a", 2**64 - 1, 30.0)))
    assert shelf.used == 0


def test_who_does_not_know_the_secret_gets_no_answer(server: StoreServer) -> None:
    request = m.encode(m.Drop())
    with calling(server.address) as caller:
        assert caller.ask(*hold("a", 5)) == m.Done()
        before = server.last_call
        for frames in ([], [b""], [b"1", b""], [b"1", b"", request], [b"1", bytes(16), request]):
            caller.send_frames(*(frames or [b""]))
        assert caller.silent(0.3)
        assert server.last_call == before
        assert caller.ask(m.Measure()) == m.Usage(1, 5, CAPACITY)


def test_what_is_no_zeromq_does_no_harm(server: StoreServer, caller: Caller) -> None:
    port = int(server.address.endpoint.rpartition(":")[2])
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(1000)):
        with socket.create_connection((HOST, port)) as stranger:
            stranger.sendall(data)
    assert caller.ask(m.Measure()) == m.Usage(0, 0, CAPACITY)


def test_without_the_key_of_an_encrypted_server_nothing_gets_in(shelf: Shelf) -> None:
    server = StoreServer(shelf, HOST, curve=True)
    try:
        with calling(server.address) as caller:
            assert caller.ask(*hold("a", 5)) == m.Done()
        assert server.address.server_key is not None
        open_door = msgspec.structs.replace(server.address, server_key=None)
        with calling(open_door) as plain:
            plain.send(m.Drop())
            other, _ = zmq.curve_keypair()
            with calling(open_door, other.decode()) as wrong:
                wrong.send(m.Drop())
                assert wrong.silent(0.5)
            assert plain.silent(0.0)
        assert shelf.used == 5
    finally:
        server.stop()


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as tried:
        try:
            tried.bind(("::1", 0))
        except OSError:
            return False
    return True


@pytest.mark.parametrize("advertise", [None, "::1", "[::1]"])
@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
def test_addresses_of_ipv6(host: str, advertise: str | None) -> None:
    shelf = Shelf()
    if not has_ipv6():
        with pytest.raises(ConfigError, match="cannot listen"):
            StoreServer(shelf, host, advertise=advertise)
        return
    server = StoreServer(shelf, host, advertise=advertise or "::1")
    try:
        assert server.address.endpoint.startswith("tcp://[::1]:")
        with calling(server.address) as caller:
            assert caller.ask(m.Measure()) == m.Usage(0, 0, None)
    finally:
        server.stop()


def test_clients_are_told_the_advertised_name(shelf: Shelf) -> None:
    server = StoreServer(shelf, "0.0.0.0", advertise="localhost")
    try:
        assert server.address.endpoint.startswith("tcp://localhost:")
        with calling(server.address) as caller:
            assert caller.ask(m.Measure()) == m.Usage(0, 0, CAPACITY)
    finally:
        server.stop()


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "", "1.2.3.4.5"])
def test_a_host_that_is_none_of_ours(shelf: Shelf, host: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        StoreServer(shelf, host)
    assert shelf.on_room == []


def test_a_port_that_is_in_use(server: StoreServer, shelf: Shelf) -> None:
    port = int(server.address.endpoint.rpartition(":")[2])
    started = time.monotonic()
    with pytest.raises(ConfigError, match=f"tcp://{HOST}:{port}.*in use.*port 0"):
        StoreServer(Shelf(), HOST, port)
    assert time.monotonic() - started < 10
    with pytest.raises(ConfigError, match="cannot listen"):
        StoreServer(Shelf(), HOST, 70_000)


def test_many_servers_of_one_host(wait_until: WaitUntil) -> None:
    with ExitStack() as stop:
        servers: list[StoreServer] = []
        for number in range(32):
            server = StoreServer(Shelf(number), HOST)
            stop.callback(server.stop)
            servers.append(server)
        assert len({server.address.endpoint for server in servers}) == 32
        assert len({server.address.secret for server in servers}) == 32
        for number, server in enumerate(servers):
            with calling(server.address) as caller:
                assert caller.ask(m.Measure()) == m.Usage(0, 0, number)


def test_a_stopped_server_leaves_nothing_behind(wait_until: WaitUntil) -> None:
    process = psutil.Process()

    def start_and_stop(port: int = 0) -> int:
        shelf = Shelf(CAPACITY)
        server = StoreServer(shelf, HOST, port, curve=port == 0, local=True)
        with calling(server.address) as caller, calling_locally(server.address) as local:
            assert caller.ask(*hold("a", 5)) == m.Done()
            caller.send(reserve("b", CAPACITY, 30.0))
            assert isinstance(local.ask(m.Find(["a"])), m.Found)
            local.send(reserve("b", CAPACITY, 30.0))
            server.stop()
            server.stop()
            assert local.is_hung_up()
        assert shelf.on_room == []
        shelf.drop(["a"])
        return int(server.address.endpoint.rpartition(":")[2])

    def running() -> set[str]:
        return {thread.name for thread in threading.enumerate()}

    threads = running()
    port = start_and_stop()
    start_and_stop(port)
    files = process.num_fds()
    for _ in range(50):
        start_and_stop()
    assert running() == threads
    # The caller's closed sockets are freed by a thread of libzmq.
    wait_until(lambda: process.num_fds() <= files, what="no more open files than before")
