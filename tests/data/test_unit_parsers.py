"""Parsers that run in storage units, by name: in processes of their own, but for what needs a look
inside."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import pytest_asyncio
import torch

import tq_redis as tq
from tests.conftest import WaitUntil
from tests.control.proxy import CuttingProxy
from tests.data.listed_units import Listing, listing_of, unit_process, until, until_listed
from tests.data.offered import OPTIONS, PATHS
from tests.data.runs import all_rows, handles
from tests.data.same import assert_same
from tests.data.units import Units, closing, open_plane
from tests.store.caller import calling
from tq_redis.config import Config, DataConfig, RedisConfig
from tq_redis.data import DataPlane, WrittenBlock, open_data_plane
from tq_redis.data.codec import encode
from tq_redis.deadline import Deadline
from tq_redis.errors import ConfigError, DeadlineError, InputError, ParserError, StoreFullError
from tq_redis.store import messages as m
from tq_redis.store.parsers import Made
from tq_redis.store.server import StoreServer
from tq_redis.store.shelf import Content, Shelf

CAPACITY = 4000


def soon() -> Deadline:
    return Deadline(30)


@pytest.fixture(scope="module")
def config(redis_url: str) -> Config:
    return Config(
        redis=RedisConfig(url=redis_url, namespace=f"test-{uuid.uuid4().hex[:12]}"),
        data=DataConfig(backend="zmq"),
    )


@pytest.fixture(scope="module")
def unit(config: Config) -> Iterator[int]:
    """The process id of a unit that offers parsers."""
    with unit_process(config, CAPACITY, *OPTIONS) as process:
        until_listed(config)
        yield process.pid
        process.terminate()
        assert process.wait(60) == 0


@pytest_asyncio.fixture
async def listing(config: Config) -> AsyncIterator[Listing]:
    async with listing_of(config) as listing:
        yield listing


@pytest_asyncio.fixture
async def plane(config: Config, unit: int, listing: Listing) -> AsyncIterator[DataPlane]:
    async with closing(open_data_plane(config, listing)) as plane:
        yield plane
        assert [usage.used for usage in await plane.usage(soon())] == [0]  # a test leaves nothing


class File:
    """What parsers are given the path of, and how they and a test see each other."""

    def __init__(self, at: Path) -> None:
        self._at = at

    def rows(self, count: int = 1) -> dict[str, Any]:
        return {"at": [str(self._at)] * count}

    def write(self, content: bytes) -> None:
        self._at.write_bytes(content)

    def go(self) -> None:
        """Parsers that wait need wait no longer."""
        self._at.with_suffix(".go").touch()

    @property
    def runs(self) -> int:
        return len(self._at.read_text().split()) if self._at.exists() else 0

    async def until_begun(self, runs: int = 1) -> None:
        async def begun() -> bool:
            return self.runs == runs

        await until(begun)

    async def until_done(self) -> None:
        async def done() -> bool:
            return self._at.with_suffix(".done").exists()

        await until(done)


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "at")


def has_torch(process: int) -> bool:
    return "libtorch" in Path(f"/proc/{process}/maps").read_text()


async def free(plane: DataPlane, blocks: list[WrittenBlock]) -> None:
    await plane.delete(handles(blocks), soon())


@pytest.mark.asyncio
async def test_a_parser_runs_in_the_unit_that_keeps_what_it_makes(
    plane: DataPlane, unit: int, file: File
) -> None:
    file.write(b"12345")
    columns: dict[str, Any] = {**file.rows(2), "pid": [0, 0], "x": torch.arange(4.0).view(2, 2)}
    blocks = await plane.put("p", columns, soon(), "load")
    got = await plane.get(all_rows(blocks), soon())
    assert_same(got["at"], torch.tensor([5, 5]))
    assert_same(got["x"], columns["x"])
    assert got["pid"] == [unit, unit]
    assert {name: form.dtype for block in blocks for name, form in block.schema.items()} == {
        "at": "int64",
        "x": "float32",
        "pid": "",
    }
    assert await plane.unconfirmed(0.0, soon()) == {"p": handles(blocks)}
    await free(plane, blocks)


@pytest.mark.asyncio
async def test_what_a_parser_makes_is_cut_into_blocks(
    config: Config, listing: Listing, plane: DataPlane, file: File
) -> None:
    file.go()
    small = msgspec.structs.replace(config, data=DataConfig(backend="zmq", block_bytes=1000))
    async with closing(open_data_plane(small, listing)) as cutting:
        blocks = await cutting.put("p", file.rows(3), soon(), "wait")
        assert [(block.first_row, block.rows, block.nbytes) for block in blocks] == [
            (0, 1, 1000),
            (1, 1, 1000),
            (2, 1, 1000),
        ]
        assert_same(
            (await plane.get(all_rows(blocks), soon()))["at"],
            torch.ones(3, 1000, dtype=torch.uint8),
        )
    await free(plane, blocks)


@pytest.mark.asyncio
async def test_what_is_kept_is_not_the_parsers_own_memory(plane: DataPlane, file: File) -> None:
    first = await plane.put("p", file.rows(), soon(), "count")
    second = await plane.put("p", file.rows(), soon(), "count")
    got = [await plane.get(all_rows(blocks), soon()) for blocks in (first, second)]
    assert [columns["at"][0].tolist() for columns in got] == [[1.0] * 8, [2.0] * 8]
    await free(plane, first + second)


@pytest.mark.asyncio
async def test_a_parser_that_no_unit_offers(plane: DataPlane) -> None:
    with pytest.raises(InputError, match=r"'load_it'.*'load'.*--parser load_it=") as raised:
        await plane.put("p", {"x": [1]}, soon(), "load_it")
    assert raised.value.partition == "p"


@pytest.mark.parametrize(
    ("parser", "kind", "says"),
    [
        ("fail", ParserError, "'fail' failed in storage unit .* ValueError: no image at "),
        ("exit", ParserError, "SystemExit: 3"),
        ("shorten", InputError, "'shorten' failed .* keep the number of rows, 2, got 1"),
        ("load", InputError, "must return the fields it was given"),
    ],
)
@pytest.mark.asyncio
async def test_what_goes_wrong_in_a_parser_is_said_and_nothing_stays(
    plane: DataPlane, file: File, parser: str, kind: type[tq.TQError], says: str
) -> None:
    file.write(b"")
    with pytest.raises(kind, match=says) as raised:
        await plane.put("p", file.rows(2), soon(), parser)
    assert type(raised.value) is kind
    assert (raised.value.partition, raised.value.fields) == ("p", ("at",))


@pytest.mark.asyncio
async def test_values_that_would_be_pickled_do_not_go_to_a_parser(
    config: Config, listing: Listing, plane: DataPlane
) -> None:
    trusting = msgspec.structs.replace(config, data=DataConfig(backend="zmq", pickle=True))
    async with closing(open_data_plane(trusting, listing)) as trusting_plane:
        with pytest.raises(InputError, match="'at', row 0"):
            await trusting_plane.put("p", {"at": [Path("x")]}, soon(), "load")


@pytest.mark.asyncio
async def test_what_comes_too_late_is_thrown_away(plane: DataPlane, file: File) -> None:
    """And the unit serves others meanwhile."""
    putting = asyncio.create_task(plane.put("p", file.rows(), Deadline(2), "wait"))
    await file.until_begun()
    blocks = await plane.put("p", {"x": [1]}, soon())
    assert (await plane.get(all_rows(blocks), soon()))["x"] == [1]
    await free(plane, blocks)
    started = time.monotonic()
    with pytest.raises(DeadlineError, match="'wait' did not end") as raised:
        await putting
    assert time.monotonic() - started < 4
    assert (raised.value.fields, raised.value.deadline) == (("at",), 2)
    file.go()
    await file.until_done()
    blocks = await plane.put("p", {"x": [1]}, soon())
    assert await plane.unconfirmed(0.0, soon()) == {"p": handles(blocks)}
    await free(plane, blocks)


@pytest.mark.asyncio
async def test_a_put_that_is_cancelled_leaves_nothing(plane: DataPlane, file: File) -> None:
    putting = asyncio.create_task(plane.put("p", file.rows(), soon(), "wait"))
    await file.until_begun()
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    file.go()
    await file.until_done()


@pytest.mark.asyncio
async def test_what_a_parser_makes_waits_for_room(plane: DataPlane, file: File) -> None:
    file.go()
    full = await plane.put("p", {"x": torch.zeros(1, 3500).byte()}, soon())
    started = time.monotonic()
    with pytest.raises(StoreFullError, match=r"no room for what data_parser 'wait'.*3500 of 4000"):
        await plane.put("p", file.rows(), Deadline(2), "wait")
    assert time.monotonic() - started < 4
    putting = asyncio.create_task(plane.put("p", file.rows(), soon(), "wait"))
    await file.until_begun(2)
    await free(plane, full)
    await free(plane, await putting)
    with pytest.raises(InputError, match=r"It makes 5000 bytes, the unit may keep 4000"):
        await plane.put("p", file.rows(5), soon(), "wait")


class Behind(Listing):
    """Sees units behind a proxy."""

    proxy: CuttingProxy

    async def units(self, deadline: Deadline) -> dict[str, Any]:
        found = await super().units(deadline)
        endpoint = f"tcp://127.0.0.1:{urlsplit(self.proxy.url).port}"
        for unit in found.values():
            address = msgspec.structs.replace(unit.address, endpoint=endpoint)
            object.__setattr__(unit, "address", address)
        return found


@pytest.mark.asyncio
async def test_a_request_whose_answer_is_lost_is_done_once(
    config: Config, listing: Listing, plane: DataPlane, file: File
) -> None:
    (unit,) = (await listing.units(soon())).values()
    file.go()
    behind = Behind(config)
    async with CuttingProxy(unit.address.endpoint, b"Parse") as behind.proxy:
        async with closing(open_data_plane(config, behind)) as far:
            behind.proxy.cuts = 1
            blocks = await far.put("p", file.rows(2), soon(), "wait")
        assert (behind.proxy.lost, behind.proxy.seen) == (1, 2)
    await behind.connection.close()
    assert file.runs == 1
    assert [usage.used for usage in await plane.usage(soon())] == [2000]
    await free(plane, blocks)


def test_a_request_that_comes_again_meanwhile_is_done_once() -> None:
    begun, go, runs = threading.Event(), threading.Event(), list[int]()

    def parser(content: Content, block_bytes: int) -> list[Made]:
        runs.append(block_bytes)
        begun.set()
        assert go.wait(20)
        return [Made(0, content)]

    (block,) = encode({"x": torch.arange(3)}, block_bytes=1 << 20, allow_pickle=False)
    (parcel,), buffers = m.pack([block.content])
    request = m.Parse("a", "p", "twice", parcel, 7, 20.0)
    shelf = Shelf(100)
    server = StoreServer(shelf, "127.0.0.1", parsers={"twice": parser})
    with calling(server.address) as caller:
        caller.send(request, *buffers, number=b"1")
        assert begun.wait(10)
        caller.send(request, *buffers, number=b"2")
        assert caller.ask(m.Measure()) == m.Usage(0, 0, 100)
        go.set()
        number, reply, _ = caller.answer()
        assert number == b"2"
        assert reply == m.Parsed([m.ParsedBlock("a-0", block.header, 0, 24)])
        assert caller.ask(request, *buffers) == reply
        assert (runs, shelf.used) == ([7], 24)
        assert caller.ask(m.Drop(["a"])) == m.Done()
        assert shelf.used == 0
        unknown = msgspec.structs.replace(request, name="b", parser="other")
        assert isinstance(caller.ask(unknown, *buffers), m.Refused)
    server.stop()


def test_results_without_room_are_few(wait_until: WaitUntil) -> None:
    """They are counted nowhere: a full unit makes no more of them."""
    runs: list[int] = []

    def parser(content: Content, block_bytes: int) -> list[Made]:
        runs.append(1)
        return [Made(0, content)]

    (block,) = encode({"x": torch.arange(3)}, block_bytes=1 << 20, allow_pickle=False)
    (parcel,), buffers = m.pack([block.content])
    shelf = Shelf(24)
    server = StoreServer(shelf, "127.0.0.1", parsers={"make": parser})
    with calling(server.address) as caller:
        for number in range(20):
            caller.send(m.Parse(f"a{number}", "p", "make", parcel, 100, 20.0), *buffers)
        wait_until(lambda: len(runs) >= 8)
        for number in range(20):  # one has room at a time, and frees it for the next one
            reply = caller.answer()[1]
            assert isinstance(reply, m.Parsed)
            assert len(runs) <= number + 1 + 8
            shelf.drop([reply.blocks[0].name])
    assert len(runs) == 20
    server.stop()


@pytest.mark.asyncio
async def test_a_unit_that_is_killed_while_it_parses(
    redis_url: str, namespace: str, file: File
) -> None:
    """No other one is tried: it may be the parser that ends them. With encryption."""
    config = Config(
        redis=RedisConfig(url=redis_url, namespace=namespace), data=DataConfig(backend="zmq")
    )
    async with listing_of(config) as listing:
        with unit_process(config, CAPACITY, "--curve", *OPTIONS) as process:
            await asyncio.to_thread(until_listed, config)
            async with closing(open_data_plane(config, listing)) as plane:
                putting = asyncio.create_task(plane.put("p", file.rows(), soon(), "wait"))
                await file.until_begun()
                process.kill()
                started = time.monotonic()
                with pytest.raises(ParserError, match="ended while data_parser 'wait' ran in it"):
                    await putting
                assert time.monotonic() - started < 10
        for name in await listing.units(soon()):
            await listing.list.strike(name, soon())


@pytest.mark.asyncio
async def test_only_a_unit_with_parsers_has_torch(
    redis_url: str, namespace: str, unit: int, file: File
) -> None:
    config = Config(
        redis=RedisConfig(url=redis_url, namespace=namespace), data=DataConfig(backend="zmq")
    )
    async with listing_of(config) as listing:
        with unit_process(config, CAPACITY) as plain:
            await listing.until(1)
            async with closing(open_data_plane(config, listing)) as plane:
                with pytest.raises(InputError, match="offers data_parser 'load'. None is known"):
                    await plane.put("p", file.rows(), soon(), "load")
            assert not has_torch(plain.pid)
            plain.terminate()
            await asyncio.to_thread(plain.wait, 20)
    assert has_torch(unit)


@pytest.mark.parametrize("where", ["memory", "some"])
@pytest.mark.asyncio
async def test_a_name_is_for_fields_in_units(where: str) -> None:
    backend, routes = ("memory", {}) if where == "memory" else ("zmq", {"y": "memory"})
    config = Config(data=msgspec.convert({"backend": backend, "routes": routes}, DataConfig))
    async with closing(open_plane(config, Units())) as plane:
        with pytest.raises(InputError, match=r"'load' is a name.*routed to zmq.*memory") as raised:
            await plane.put("p", {"x": [1], "y": [1]}, soon(), "load")
    assert raised.value.fields == ("x", "y")


@pytest.mark.usefixtures("unit")
def test_a_client_names_a_parser(config: Config, file: File) -> None:
    file.write(b"123")
    tq.init(config)
    try:
        client = tq.get_client()
        meta = client.put({**file.rows(), "pid": [0]}, None, "p", "load")
        assert client.get_data(meta)["at"].tolist() == [3]
        client.kv_put("k", "q", {"at": file.rows()["at"][0], "pid": 0}, data_parser="load")
        assert client.kv_batch_get(["k"], "q")["at"].tolist() == [3]
        with pytest.raises(InputError, match="a function, or the name"):
            client.put({"at": [1]}, None, "p", 5)  # type: ignore[arg-type]
        with pytest.raises(ParserError):
            client.put({"at": ["a.png"]}, None, "p", "fail")
        assert len(client.get_standing("p").tasks) == 0
        assert client.get_standing("p").samples == 1
    finally:
        tq.close()


@pytest.mark.usefixtures("ray_session")
@pytest.mark.asyncio
async def test_units_that_ray_runs_offer_what_the_settings_say(
    redis_url: str, namespace: str, file: File
) -> None:
    file.write(b"12")
    data = DataConfig(backend="zmq", units=1, parsers=PATHS)
    config = Config(redis=RedisConfig(url=redis_url, namespace=namespace), data=data)
    async with listing_of(config) as listing:
        async with closing(open_data_plane(config, listing)) as plane:
            await plane.start(Deadline(60))
            blocks = await plane.put("p", {**file.rows(), "pid": [0]}, soon(), "load")
            assert_same((await plane.get(all_rows(blocks), soon()))["at"], torch.tensor([2]))
            await plane.shutdown(Deadline(60))
        data = msgspec.structs.replace(data, parsers={"load": "nowhere.at_all:load"})
        config = msgspec.structs.replace(config, data=data)
        async with closing(open_data_plane(config, listing)) as plane:
            with pytest.raises(ConfigError, match=r"'load' cannot be imported.*nowhere"):
                await plane.start(Deadline(60))
