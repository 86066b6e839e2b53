"""Blocks in storage units: where they go, and what happens when a unit is full, slow or gone."""

from __future__ import annotations

import asyncio
import pickle
import socket
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import pytest_asyncio
import torch

from tests.conftest import WaitUntil
from tests.control.proxy import CuttingProxy
from tests.data.columns import random
from tests.data.runs import all_rows, handles
from tests.data.same import assert_same
from tests.data.units import Units, closing, open_plane, running_units
from tq_redis.client.portal import Portal
from tq_redis.config import Config, DataConfig, RedisConfig
from tq_redis.data import Column, DataPlane, WrittenBlock
from tq_redis.deadline import Deadline
from tq_redis.errors import DataLostError, DeadlineError, InputError, StoreFullError
from tq_redis.store import messages as m
from tq_redis.store.zmq_connection import ZmqConnection

KB = 1 << 10
BLOCK = 128 * KB
CONFIG = Config(
    redis=RedisConfig(namespace="here"), data=DataConfig(backend="zmq", block_bytes=BLOCK)
)


def soon() -> Deadline:
    return Deadline(30)


@pytest.fixture
def units() -> Iterator[Units]:
    with running_units() as units:
        yield units


@pytest_asyncio.fixture
async def plane(units: Units) -> AsyncIterator[DataPlane]:
    async with closing(open_plane(CONFIG, units)) as plane:
        yield plane


def bytes_of(nbytes: int) -> dict[str, Column]:
    """One row in one block."""
    return {"x": torch.full((1, nbytes), 7, dtype=torch.uint8)}


async def put(plane: DataPlane, nbytes: int, deadline: Deadline | None = None) -> WrittenBlock:
    (block,) = await plane.put("p", bytes_of(nbytes), deadline or soon())
    return block


async def read(plane: DataPlane, *blocks: WrittenBlock, within: float = 30.0) -> None:
    """Every block alone, and right."""
    for block in blocks:
        got: Any = await plane.get(all_rows([block]), Deadline(within))
        assert_same(got["x"], torch.full_like(got["x"], 7))


def unit_of(block: WrittenBlock) -> str:
    return block.handle.split("/")[1]


# Which unit


@pytest.mark.parametrize("nbytes", [100, BLOCK])
@pytest.mark.asyncio
async def test_puts_spread_over_the_units(units: Units, plane: DataPlane, nbytes: int) -> None:
    names = {units.start() for _ in range(3)}
    blocks = [await put(plane, nbytes) for _ in range(6)]
    assert {unit_of(block) for block in blocks} == names
    assert [units.shelves[name].used for name in names] == [2 * nbytes] * 3
    await read(plane, *blocks)
    stores = {usage.store: (usage.blocks, usage.used) for usage in await plane.usage(soon())}
    assert stores == {f"zmq/{name}": (2, 2 * nbytes) for name in names}


@pytest.mark.asyncio
async def test_the_blocks_of_one_put_spread_too(units: Units, plane: DataPlane) -> None:
    names = {units.start() for _ in range(3)}
    column = random((24, BLOCK // 16))
    blocks = await plane.put("p", {"x": column}, soon())
    assert {unit_of(block) for block in blocks} == names
    assert_same((await plane.get(all_rows(blocks), soon()))["x"], column)


@pytest.mark.asyncio
async def test_no_unit(plane: DataPlane) -> None:
    with pytest.raises(
        DeadlineError, match=r"namespace 'here'.*tq-redis storage-unit.*data\.units"
    ):
        await put(plane, 100, Deadline(0.5))


@pytest.mark.asyncio
async def test_a_unit_that_starts_late_is_waited_for(units: Units, plane: DataPlane) -> None:
    putting = asyncio.create_task(put(plane, BLOCK))
    await asyncio.wait([putting], timeout=0.3)
    name = units.start()
    assert unit_of(await putting) == name


@pytest.mark.asyncio
async def test_a_unit_without_contact_to_redis(units: Units, plane: DataPlane) -> None:
    """It gets nothing new, but what it has is read."""
    old = units.start()
    block = await put(plane, BLOCK)
    units.stale.add(old)
    new = units.start()
    async with closing(open_plane(CONFIG, units)) as other:
        assert {unit_of(await put(other, BLOCK)) for _ in range(4)} == {new}
        await read(other, block)


# Units that are gone


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.asyncio
async def test_a_unit_that_died(units: Units, plane: DataPlane, host: str) -> None:
    dead, alive = units.start(), units.start()
    if host == "localhost":  # of which every address refuses
        server = units.servers[dead]
        endpoint = server.address.endpoint.replace("127.0.0.1", host)
        server.address = msgspec.structs.replace(server.address, endpoint=endpoint)
    blocks = [await put(plane, BLOCK) for _ in range(4)]
    lost = [block for block in blocks if unit_of(block) == dead]
    kept = [block for block in blocks if unit_of(block) == alive]
    await asyncio.to_thread(units.stop, dead)
    for reader in (plane, open_plane(CONFIG, units)):
        async with closing(reader):
            started = time.monotonic()
            with pytest.raises(DataLostError, match=dead) as raised:
                await reader.get(all_rows(blocks), Deadline(20))
            assert set(raised.value.handles) == set(handles(lost))
            assert time.monotonic() - started < 5
            await read(reader, *kept)
            more = [await put(reader, nbytes) for nbytes in (BLOCK, BLOCK, 100, 100)]
            assert {unit_of(block) for block in more} == {alive}
            await reader.delete(handles(lost), soon())
            await reader.confirm(handles(lost), soon())
            await reader.unconfirmed(0.0, soon())


@pytest.mark.asyncio
async def test_a_refusal_alone_is_no_loss(units: Units, plane: DataPlane) -> None:
    """It may be a firewall's, or another machine's that has this address here."""
    for _ in range(2):
        units.start()
    blocks = [await put(plane, BLOCK) for _ in range(2)]
    far, near = map(unit_of, blocks)
    server = units.servers[far]
    address = server.address
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    server.address = msgspec.structs.replace(address, endpoint=endpoint)
    async with closing(open_plane(CONFIG, units)) as other:
        with pytest.raises(DeadlineError, match=f"{far} at {endpoint} did not answer"):
            await read(other, blocks[0], within=1.5)
        started = time.monotonic()
        more = [await put(other, nbytes) for nbytes in (BLOCK, BLOCK, 100, 100)]
        assert {unit_of(block) for block in more} == {near}
        assert time.monotonic() - started < 5
        server.address = address
        units.stale.add(far)  # Redis was away, and it answers
        await read(plane, *blocks)
        await asyncio.to_thread(units.stop, near)
        units.stale.discard(near)
        units.stale.add(far)
        with pytest.raises(DeadlineError, match=f"'{near}'"):
            await put(other, 100, Deadline(1.5))


@pytest.mark.asyncio
async def test_a_unit_that_ended_in_good_order(units: Units, plane: DataPlane) -> None:
    name = units.start()
    block = await put(plane, 100)
    await asyncio.to_thread(units.stop, name, strike=True)
    async with closing(open_plane(CONFIG, units)) as other:
        for reader in (plane, other):
            with pytest.raises(DataLostError) as raised:
                await reader.get(all_rows([block]), Deadline(20))
            assert raised.value.handles == (block.handle,)


@pytest.mark.asyncio
async def test_a_unit_dies_while_a_put_waits_for_room(
    units: Units, plane: DataPlane, wait_until: WaitUntil
) -> None:
    units.capacity = BLOCK
    full, other = units.start(), units.start()
    blocks = [await put(plane, BLOCK) for _ in range(2)]
    putting = asyncio.create_task(put(plane, BLOCK))
    await until_waited_for(wait_until, units, full, other)
    await asyncio.to_thread(units.stop, full)
    (kept,) = (block for block in blocks if unit_of(block) == other)
    await plane.delete([kept.handle], soon())
    assert unit_of(await asyncio.wait_for(putting, 10)) == other


async def until_waited_for(wait_until: WaitUntil, units: Units, *names: str) -> None:
    servers = [units.servers[name] for name in names]
    await asyncio.to_thread(wait_until, lambda: all(server._rooms.waiting for server in servers))


# Back-pressure


@pytest.mark.parametrize("nbytes", [50 * KB, BLOCK])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.asyncio
async def test_a_put_waits_for_room(
    units: Units, plane: DataPlane, wait_until: WaitUntil, count: int, nbytes: int
) -> None:
    """Wherever it is made."""
    units.capacity = nbytes + KB
    names = [units.start() for _ in range(count)]
    blocks = [await put(plane, nbytes) for _ in names]
    assert {unit_of(block) for block in blocks} == set(names)
    for block in blocks:
        putting = asyncio.create_task(put(plane, nbytes))
        await until_waited_for(wait_until, units, *names)
        assert not putting.done()
        await plane.delete([block.handle], soon())
        again = await asyncio.wait_for(putting, 5)
        assert unit_of(again) == unit_of(block)
    assert [units.shelves[name].used for name in names] == [nbytes] * count


@pytest.mark.asyncio
async def test_a_new_unit_helps_who_waits_for_room(
    units: Units, plane: DataPlane, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_redis.data.zmq_placing._ROUND_S", 0.5)
    monkeypatch.setattr("tq_redis.data.zmq_units._LISTED_S", 0.1)
    units.capacity = BLOCK
    full = units.start()
    await put(plane, BLOCK)
    putting = asyncio.create_task(put(plane, BLOCK))
    await until_waited_for(wait_until, units, full)
    new = units.start()
    assert unit_of(await putting) == new


@pytest.mark.parametrize("nbytes", [100, BLOCK])
@pytest.mark.asyncio
async def test_full_at_the_deadline(units: Units, plane: DataPlane, nbytes: int) -> None:
    units.capacity = BLOCK
    names = [units.start() for _ in range(2)]
    blocks = [await put(plane, BLOCK) for _ in names]
    started = time.monotonic()
    with pytest.raises(StoreFullError, match="2 storage units are full") as raised:
        await put(plane, nbytes, Deadline(1.5))
    assert time.monotonic() - started < 3
    assert (raised.value.partition, raised.value.deadline) == ("p", 1.5)
    await plane.delete(handles(blocks), soon())
    await put(plane, BLOCK)


@pytest.mark.asyncio
async def test_what_a_failed_put_had_written_is_dropped(units: Units, plane: DataPlane) -> None:
    units.capacity = 4 * BLOCK
    names = [units.start() for _ in range(2)]
    with pytest.raises(StoreFullError):
        await plane.put("p", {"x": random((16, BLOCK // 4))}, Deadline(1.5))  # 16 blocks
    assert [units.shelves[name].used for name in names] == [0, 0]
    assert await plane.unconfirmed(0.0, soon()) == {}


@pytest.mark.asyncio
async def test_what_a_cancelled_put_had_written_is_dropped(
    units: Units, plane: DataPlane, wait_until: WaitUntil
) -> None:
    units.capacity = 4 * BLOCK
    name = units.start()
    putting = asyncio.create_task(plane.put("p", {"x": random((16, BLOCK // 4))}, soon()))
    await until_waited_for(wait_until, units, name)
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    assert units.shelves[name].used == 0
    await put(plane, BLOCK)


@pytest.mark.asyncio
async def test_a_block_that_never_fits(units: Units, plane: DataPlane) -> None:
    units.capacity = BLOCK
    units.start()
    with pytest.raises(InputError, match=f"{2 * BLOCK} bytes.*{BLOCK}.*--capacity"):
        await put(plane, 2 * BLOCK)
    assert await plane.unconfirmed(0.0, soon()) == {}


# The wire


@pytest.mark.parametrize("marker", [b"Hold", b"Reserve", b"Find", b"Drop"])
@pytest.mark.asyncio
async def test_an_answer_that_is_lost_is_asked_for_again(
    units: Units, plane: DataPlane, marker: bytes
) -> None:
    units.capacity = BLOCK  # nothing is counted twice
    server = units.servers[units.start()]
    async with CuttingProxy(server.address.endpoint, marker) as proxy:
        endpoint = f"tcp://127.0.0.1:{urlsplit(proxy.url).port}"
        server.address = msgspec.structs.replace(server.address, endpoint=endpoint)
        proxy.cuts = 1
        block = await put(plane, BLOCK)
        await read(plane, block)
        usage = await plane.usage(soon())
        assert [(store.blocks, store.used) for store in usage] == [(1, BLOCK)]
        await plane.delete([block.handle], soon())
        assert proxy.lost == 1
        assert proxy.seen == 2
    assert units.shelves["unit0"].used == 0


@pytest.mark.asyncio
async def test_pickle_is_refused(units: Units) -> None:
    server = units.servers[units.start()]
    connection = ZmqConnection(server.address)
    request: Any = msgspec.Raw(pickle.dumps(m.Measure()))
    with pytest.raises(ValueError, match="refused"):
        await connection.ask(request, wait_s=10)
    connection.close()


@pytest.mark.asyncio
async def test_a_deadline_that_has_passed(units: Units, plane: DataPlane) -> None:
    units.start()
    block = await put(plane, BLOCK)
    for nbytes in (100, BLOCK):
        with pytest.raises(DeadlineError):
            await put(plane, nbytes, Deadline(0))
    with pytest.raises(DeadlineError, match="did not answer"):
        await plane.get(all_rows([block]), Deadline(0))
    await read(plane, block)
    assert await plane.unconfirmed(0.0, soon()) == {"p": [block.handle]}


def test_many_threads_at_once(units: Units) -> None:
    """More than fits at once."""
    units.capacity = 12 * BLOCK
    for _ in range(2):
        units.start()
    portal = Portal()
    plane = open_plane(CONFIG, units)
    dtypes = [torch.int64, torch.float16, torch.bool, torch.uint8]

    def work(thread: int) -> None:
        for turn in range(12):
            size = 1 + 1000 * ((7 * thread + turn) % 13)
            column = random((4, size), dtypes[(thread + turn) % 4])
            blocks = portal.run(plane.put("p", {"x": column}, soon()))
            got = portal.run(plane.get(all_rows(blocks), soon()))
            portal.run(plane.delete(handles(blocks), soon()))
            assert_same(got["x"], column)

    try:
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(work, range(16)))
        assert [shelf.used for shelf in units.shelves.values()] == [0, 0]
    finally:
        portal.run(plane.close())
        portal.stop()
