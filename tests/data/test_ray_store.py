from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import msgspec
import pytest
import ray
import torch
from ray.exceptions import RayActorError
from ray.util import list_named_actors

from tests.data.runs import all_rows, handles
from tests.data.same import assert_same
from tests.data.units import open_plane as data_plane
from tq_redis.client.portal import Portal
from tq_redis.config import Config, DataConfig, RedisConfig
from tq_redis.data import DataPlane, ray_door, ray_parse
from tq_redis.data.base import WrittenBlock
from tq_redis.data.ray_door import Doors
from tq_redis.data.ray_store import RayBackend
from tq_redis.data.ray_stores import RAY_NAMESPACE, Stores, running_instances
from tq_redis.deadline import Deadline
from tq_redis.errors import (
    DataLostError,
    DeadlineError,
    InputError,
    NotInitializedError,
    StoreFullError,
    TQError,
)
from tq_redis.store import messages
from tq_redis.store.local_connection import LocalConnection
from tq_redis.store.server import Address
from tq_redis.store.zmq_connection import ZmqConnection

pytestmark = pytest.mark.usefixtures("ray_session")

T = TypeVar("T")
MB = 1 << 20


def run(call: Coroutine[Any, Any, T]) -> T:
    """On the one event loop that all calls of this process share."""
    return _portal.run(call)


_portal = Portal()
_opened: list[DataPlane] = []


def open_plane(config: Config) -> DataPlane:
    """Closed at the end of the test."""
    _opened.append(data_plane(config))
    return _opened[-1]


@pytest.fixture(autouse=True)
def _close_planes() -> Iterator[None]:
    yield
    while _opened:
        run(_opened.pop().close())


@pytest.fixture(scope="module", autouse=True)
def _end_portal() -> Iterator[None]:
    yield
    _portal.stop()


def soon() -> Deadline:
    return Deadline(30)


def column(megabytes: int, start: int = 0) -> torch.Tensor:
    """(megabytes, 2**18) float32 with known values."""
    return torch.arange(start, start + megabytes * MB // 4, dtype=torch.float32).view(-1, MB // 4)


def make_config(**settings: Any) -> Config:
    return Config(redis=RedisConfig(namespace=f"test-{uuid.uuid4().hex[:12]}"), **settings)


@pytest.fixture
def config() -> Iterator[Config]:
    config = make_config()
    yield config
    run(open_plane(config).shutdown(soon()))


@pytest.fixture
def plane(config: Config) -> DataPlane:
    return open_plane(config)


class _Producer:
    """Another process that puts."""

    def __init__(self, config: Config) -> None:
        self.portal = Portal()
        self.plane = data_plane(config)

    def put(self, megabytes: int) -> list[WrittenBlock]:
        columns = {"x": column(megabytes), "s": ["a"] * megabytes}
        call = self.plane.put("p", columns if megabytes else {"s": ["a"]}, soon())
        return self.portal.run(call)


Producer: Any = ray.remote(num_cpus=0)(_Producer)


def produced_by_a_dead_process(config: Config, *megabytes: int) -> list[list[WrittenBlock]]:
    """One put for each number; 0 stands for a few bytes."""
    producer = Producer.remote(config)
    puts = ray.get([producer.put.remote(size) for size in megabytes], timeout=60)
    ended = producer.__ray_terminate__.remote()
    ray.wait([ended], timeout=30)
    ray.kill(producer)
    return puts


def kill_store(config: Config) -> None:
    name = f"store:{config.redis.namespace}:{ray.get_runtime_context().get_node_id()}"
    store = ray.get_actor(name, namespace=RAY_NAMESPACE)
    ray.kill(store)
    with contextlib.suppress(RayActorError):  # raised when it is dead, which takes a moment
        while True:
            ray.get(store.describe.remote(), timeout=30)


def store_bytes() -> int:
    """Bytes in use in the object store of this node, as Ray counts them."""
    from ray._private.internal_api import node_stats

    (node,) = ray.nodes()
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False)
    return stats.store_stats.object_store_bytes_used


def test_samples_of_a_dead_producer_stay_readable(config: Config, plane: DataPlane) -> None:
    large, small = produced_by_a_dead_process(config, 40, 0)
    assert len(large) > 1
    for copy in (True, False):  # the second time from the store's own objects
        got = run(plane.get(all_rows(large), soon(), copy=copy))
        assert_same(got["x"], column(40))
        assert got["s"] == ["a"] * 40
    assert run(plane.get(all_rows(small), soon()))["s"] == ["a"]


def test_a_store_that_dies_is_an_error_that_names_the_blocks(
    config: Config, plane: DataPlane
) -> None:
    blocks = run(plane.put("p", {"x": column(2)}, soon()))
    kill_store(config)
    for reader in (plane, open_plane(config)):
        started = time.monotonic()
        with pytest.raises(DataLostError) as raised:
            run(reader.get(all_rows(blocks), Deadline(10)))
        assert time.monotonic() - started < 10
        assert list(raised.value.handles) == handles(blocks)
    run(plane.delete(handles(blocks), soon()))
    run(plane.confirm(handles(blocks), soon()))


def test_a_put_after_the_death_of_the_store_starts_a_new_one(
    config: Config, plane: DataPlane
) -> None:
    reader = open_plane(config)
    lost = run(plane.put("p", {"x": column(2)}, soon()))
    run(reader.get(all_rows(lost), soon()))
    kill_store(config)
    blocks = run(plane.put("p", {"x": column(2, start=7)}, soon()))
    for one in (plane, reader):  # the reader knows only the dead store
        assert_same(run(one.get(all_rows(blocks), soon()))["x"], column(2, start=7))


def test_producers_that_start_at_once_share_one_store(config: Config) -> None:
    async def puts() -> list[list[WrittenBlock]]:
        planes = [open_plane(config) for _ in range(4)]
        return await asyncio.gather(*(one.put("p", {"x": column(2)}, soon()) for one in planes))

    written = run(puts())
    plane = open_plane(config)
    for blocks in written:
        assert_same(run(plane.get(all_rows(blocks), soon()))["x"], column(2))
    listed = run(plane.unconfirmed(0.0, soon()))["p"]
    assert sorted(listed) == sorted(handle for blocks in written for handle in handles(blocks))


def test_rounds_of_put_get_delete_do_not_grow_the_object_store(
    plane: DataPlane, wait_until: Any
) -> None:
    before = store_bytes()
    for turn in range(20):
        blocks = run(plane.put("p", {"x": column(48), "y": column(48, start=turn)}, soon()))
        got: Any = run(plane.get(all_rows(blocks), soon(), copy=turn % 2 == 0))
        assert got["y"][0, 0] == turn
        del got
        run(plane.delete(handles(blocks), soon()))
    wait_until(lambda: store_bytes() <= before + MB, what="the object store is as full as before")


def test_a_view_held_over_delete_stays_valid_and_is_freed_after(
    plane: DataPlane, wait_until: Any
) -> None:
    before = store_bytes()
    blocks = run(plane.put("p", {"x": column(40)}, soon()))
    views = run(plane.get(all_rows(blocks[:1]), soon(), copy=False))
    run(plane.delete(handles(blocks), soon()))
    wait_until(lambda: store_bytes() < before + 30 * MB, what="the block without a view is free")
    assert store_bytes() > before + 10 * MB
    rows = blocks[0].rows
    assert_same(views["x"], column(rows))
    del views
    wait_until(lambda: store_bytes() <= before + MB, what="the viewed block is free")


def test_a_full_store_makes_a_put_wait_until_something_is_freed(plane: DataPlane) -> None:
    async def scenario() -> None:
        first = await plane.put("p", {"x": column(150)}, soon())
        await plane.put("p", {"x": column(150)}, soon())
        full = store_bytes()
        third = asyncio.create_task(plane.put("p", {"x": column(60)}, soon()))
        _, waiting = await asyncio.wait([third], timeout=1)
        assert waiting
        assert store_bytes() == full
        await plane.delete(handles(first), soon())
        blocks = await third
        assert_same((await plane.get(all_rows(blocks), soon()))["x"], column(60))

    run(scenario())


def test_a_full_store_is_an_error_at_the_deadline_and_keeps_nothing(plane: DataPlane) -> None:
    blocks = run(plane.put("p", {"x": column(250)}, soon()))
    with pytest.raises(StoreFullError, match="full"):
        run(plane.put("q", {"x": column(100)}, Deadline(5)))
    assert list(run(plane.unconfirmed(0.0, soon()))) == ["p"]
    assert_same(run(plane.get(all_rows(blocks), soon()))["x"], column(250))


def test_a_put_that_gives_up_waiting_lets_the_next_one_in(plane: DataPlane) -> None:
    async def scenario() -> None:
        await plane.put("p", {"x": column(200)}, soon())
        large = asyncio.create_task(plane.put("p", {"x": column(200)}, soon()))
        await asyncio.wait([large], timeout=0.5)
        small = asyncio.create_task(plane.put("p", {"x": column(60)}, soon()))
        _, waiting = await asyncio.wait([small], timeout=0.5)
        assert waiting, "first come, first served"
        large.cancel()
        assert_same((await plane.get(all_rows(await small), soon()))["x"], column(60))

    run(scenario())


def test_a_put_that_can_never_fit_is_refused(plane: DataPlane) -> None:
    with pytest.raises(InputError, match="object_store_memory"):
        run(plane.put("p", {"x": column(350)}, soon()))


def test_running_instances_and_their_settings(config: Config, plane: DataPlane) -> None:
    assert config.redis.namespace not in running_instances()
    run(plane.start(soon()))
    settings = json.loads(running_instances()[config.redis.namespace])
    assert settings["redis"]["namespace"] == config.redis.namespace
    assert settings["data"]["block_bytes"] == config.data.block_bytes
    run(plane.shutdown(soon()))
    assert config.redis.namespace not in running_instances()


def test_shutdown_ends_only_the_own_stores(config: Config, plane: DataPlane) -> None:
    other_config = make_config()
    other = open_plane(other_config)
    blocks = run(other.put("p", {"x": column(2)}, soon()))
    run(plane.put("p", {"x": column(2)}, soon()))
    run(plane.shutdown(soon()))
    run(plane.shutdown(soon()))
    assert_same(run(other.get(all_rows(blocks), soon()))["x"], column(2))
    run(other.shutdown(soon()))


def test_a_store_without_calls_ends_itself(wait_until: Any) -> None:
    config = make_config(idle_ttl_s=3)
    plane = open_plane(config)
    blocks = run(plane.put("p", {"x": column(2)}, soon()))
    wait_until(lambda: config.redis.namespace not in listed(), timeout=30, what="the store ended")
    with pytest.raises(DataLostError):
        run(plane.get(all_rows(blocks), soon()))


def listed() -> set[str]:
    """Namespaces with a store, found without calling it."""
    actors: list[Any] = list_named_actors(all_namespaces=True)
    names: list[str] = [actor["name"] for actor in actors]
    return {name.split(":")[1] for name in names if name.startswith("store:")}


def test_a_deadline_that_has_passed_is_an_error(plane: DataPlane) -> None:
    blocks = run(plane.put("p", {"x": column(2)}, soon()))
    for call in (
        plane.get(all_rows(blocks), Deadline(0)),
        plane.put("p", {"x": column(2)}, Deadline(0)),
        plane.unconfirmed(0.0, Deadline(0)),
    ):
        with pytest.raises(DeadlineError):
            run(call)
    assert_same(run(plane.get(all_rows(blocks), soon()))["x"], column(2))


def test_settings_reach_the_codec() -> None:
    config = make_config(data=DataConfig(pickle=True, block_bytes=MB))
    plane = open_plane(config)
    blocks = run(plane.put("p", {"x": column(3), "v": [uuid.uuid4()] * 3}, soon()))
    assert len(blocks) == 4
    got = run(plane.get(all_rows(blocks), soon()))
    assert isinstance(got["v"][0], uuid.UUID)
    run(plane.shutdown(soon()))


def test_a_process_outside_ray_is_told_so() -> None:
    code = (
        "from tq_redis.config import Config\n"
        "from tests.data.units import open_plane\n"
        "from tq_redis.errors import NotInitializedError\n"
        "try: open_plane(Config()).backend('ray')\n"
        "except NotInitializedError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "ray.init()" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_nodes() -> None:
    """Two raylets on this host, in a process of their own; see two_nodes.py."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.data.two_nodes"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_node_of_another_cluster_is_no_loss(config: Config, plane: DataPlane) -> None:
    (block,) = run(plane.put("p", {"x": torch.arange(8)}, soon()))
    _, node, name = block.handle.split("/")
    elsewhere = f"ray/{node[::-1]}/{name}"
    for call in (
        plane.get({"x": [(elsewhere, 0, 8)]}, soon()),
        plane.delete([elsewhere], soon()),
    ):
        with pytest.raises(NotInitializedError, match="another Ray cluster"):
            run(call)
    assert_same(run(plane.get(all_rows([block]), soon()))["x"], torch.arange(8))


# Parsers


def test_a_parser_runs_in_a_task_whose_store_keeps_what_it_makes(plane: DataPlane) -> None:
    def load(columns: dict[str, Any]) -> dict[str, Any]:
        sizes = [len(name) for name in columns["image"]]
        return {"image": torch.tensor(sizes), "pid": [os.getpid()] * len(sizes)}

    blocks = run(plane.put("p", {"image": ["a", "bcd"], "pid": [0, 0]}, soon(), load))
    got = run(plane.get(all_rows(blocks), soon()))
    assert_same(got["image"], torch.tensor([1, 3]))
    assert set(got["pid"]).isdisjoint({0, os.getpid()})
    assert blocks[0].schema["image"].dtype == "int64"


def test_what_a_parser_raises_comes_back_and_nothing_stays(plane: DataPlane) -> None:
    def refuse(columns: dict[str, Any]) -> dict[str, Any]:
        raise InputError("no such image", fields=["image"])

    def fail(columns: dict[str, Any]) -> dict[str, Any]:
        return {"image": columns["nothing"]}

    def die(columns: dict[str, Any]) -> dict[str, Any]:
        os._exit(1)

    def dawdle(columns: dict[str, Any]) -> dict[str, Any]:
        time.sleep(8)
        return columns

    def put(parser: Any, deadline: Deadline) -> None:
        run(plane.put("p", {"image": ["a.png"]}, deadline, parser))

    with pytest.raises(InputError, match="no such image") as refused:
        put(refuse, soon())
    assert refused.value.fields == ("image",)
    with pytest.raises(KeyError, match="nothing"):
        put(fail, soon())
    with pytest.raises(TQError, match="The process that ran data_parser died"):
        put(die, soon())
    with pytest.raises(DeadlineError, match="data_parser did not end"):
        put(dawdle, Deadline(5))
    assert run(plane.unconfirmed(0.0, soon())) == {}


def test_a_parser_that_ends_too_late_makes_no_store(config: Config) -> None:
    with pytest.raises(DeadlineError, match="data_parser did not end"):
        ray_parse._parse_and_write(config, "p", {"x": [1]}, dict, 0.0)
    assert config.redis.namespace not in listed()


# The short way of small blocks


class Counted:
    """How often the store actor of a plane is called."""

    def __init__(self, plane: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        ask = stores_of(plane).ask

        async def counted(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            return await ask(*arguments, **options)

        monkeypatch.setattr(stores_of(plane), "ask", counted)


def test_small_blocks_need_no_call_of_the_actor(
    plane: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(plane.start(soon()))
    first = run(plane.put("p", {"x": torch.arange(3)}, soon()))
    counted = Counted(plane, monkeypatch)
    columns = {"x": torch.arange(8), "b": torch.ones(8, 2, dtype=torch.bfloat16), "s": ["ä"] * 8}
    blocks = run(plane.put("p", columns, soon()))
    for copy in (True, False):
        got = run(plane.get(all_rows(blocks), soon(), copy=copy))
        for name, column in columns.items():
            assert_same(got[name], column)
    assert_same(run(plane.get(all_rows(first), soon()))["x"], torch.arange(3))
    assert counted.calls == 0
    large = run(plane.put("p", {"x": column_of(2 * MB)}, soon()))
    assert counted.calls > 0
    run(plane.delete(handles(blocks), soon()))
    with pytest.raises(DataLostError):
        run(plane.get(all_rows(blocks), soon()))
    assert_same(run(plane.get(all_rows(large), soon()))["x"], column_of(2 * MB))


def backend_of(plane: DataPlane) -> RayBackend:
    backend = plane.backend("ray")
    assert isinstance(backend, RayBackend)
    return backend


def stores_of(plane: DataPlane) -> Stores:
    return backend_of(plane)._stores


def doors_of(plane: DataPlane) -> Doors:
    return backend_of(plane)._doors


def column_of(nbytes: int) -> torch.Tensor:
    return torch.arange(nbytes // 8)


@pytest.fixture(params=["local", "zeromq"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How small blocks reach the store: on one host, and from another one."""
    if request.param == "zeromq":

        async def not_here(address: Address) -> None:
            return None

        monkeypatch.setattr(LocalConnection, "open", not_here)
    name: str = request.param
    return name


def test_small_blocks_go_by_the_short_way(
    plane: DataPlane, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = run(plane.put("p", {"x": torch.arange(8)}, soon()))
    (door,) = doors_of(plane)._open.values()
    assert isinstance(door, LocalConnection if way == "local" else ZmqConnection)
    counted = Counted(plane, monkeypatch)
    assert_same(run(plane.get(all_rows(blocks), soon()))["x"], torch.arange(8))
    blocks += run(plane.put("p", {"x": torch.arange(9)}, soon()))
    run(plane.delete(handles(blocks), soon()))
    assert counted.calls == 0
    assert list(doors_of(plane)._open.values()) == [door]


def test_a_door_that_does_not_answer_is_passed_by(
    config: Config, plane: DataPlane, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a firewall, or when the store has died and come again."""
    blocks = run(plane.put("p", {"x": torch.arange(8)}, soon()))
    (door,) = doors_of(plane)._open.values()
    if isinstance(door, LocalConnection):
        door._stream.abort()
    else:
        door.address = msgspec.structs.replace(door.address, secret=b"wrong")  # gets no answer
    monkeypatch.setattr(ray_door, "_ANSWER_S", 0.2)
    again = run(plane.put("p", {"x": torch.arange(9)}, soon()))
    assert doors_of(plane)._open == {}
    for written, rows in ((blocks, 8), (again, 9)):
        assert_same(run(plane.get(all_rows(written), soon()))["x"], torch.arange(rows))
    kill_store(config)
    new = run(plane.put("p", {"x": torch.arange(5)}, soon()))
    reader = open_plane(config)
    assert_same(run(reader.get(all_rows(new), soon()))["x"], torch.arange(5))
    with pytest.raises(DataLostError):
        run(reader.get(all_rows(blocks), soon()))


def test_what_is_no_request_does_not_shut_the_door(
    plane: DataPlane, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_door, "_ANSWER_S", 5.0)
    run(plane.put("p", {"x": torch.arange(8)}, soon()))
    (door,) = doors_of(plane)._open.values()

    async def send(*frames: bytes) -> None:
        if isinstance(door, LocalConnection):
            assert door._stream.write([b"request", *frames])
        else:
            assert isinstance(door, ZmqConnection)
            await door._socket.send_multipart([b"request", *frames])

    secret, find = door.address.secret, messages.encode(messages.Find(["name"]))
    if way == "zeromq":
        for frames in ([], [b""], [secret], [b"\x00" * 16, find], [secret, b"\xff"]):
            run(send(*frames))
    else:
        for frames in ([b""], [b"\xff"], [find, b"\xff"]):
            run(send(*frames))
    for request, buffers in (
        (messages.Hold("p", ["name"], []), []),
        (messages.Hold("p", ["name"], [messages.Parcel(b"", [("|u1", None)])]), []),
        (messages.Hold("p", ["name"], [messages.Parcel(b"", [("<i8", None)])]), [b"\xff"]),
        (messages.Find(["name"]), [b"\xff"]),
    ):
        with contextlib.suppress(ValueError):
            run(door.ask(request, buffers, wait_s=5.0))
    counted = Counted(plane, monkeypatch)
    assert len(run(plane.put("p", {"x": torch.arange(8)}, soon()))) == 1
    assert counted.calls == 0


def test_a_full_store_takes_no_small_block_either(plane: DataPlane) -> None:
    (node,) = ray.nodes()
    most = int(0.8 * node["Resources"]["object_store_memory"])
    run(plane.start(soon()))
    blocks = run(plane.put("p", {"x": column_of(most // 2)}, soon()))
    more = run(plane.put("p", {"x": column_of(most - most // 2 - 4096)}, soon()))
    with pytest.raises(StoreFullError):
        run(plane.put("p", {"x": column_of(8192)}, Deadline(2)))
    run(plane.delete(handles(blocks) + handles(more), soon()))
    assert len(run(plane.put("p", {"x": column_of(8192)}, soon()))) == 1
