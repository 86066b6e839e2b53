"""Storage units and the list in Redis by which clients find them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import redis
import torch

from tests.conftest import ServerUnderTest, WaitUntil, server_binary
from tests.control.restartable import Restartable
from tests.control.state import Admin
from tests.data.listed_units import Listing, listing_of, running, until
from tests.data.runs import all_rows
from tests.data.same import assert_same
from tests.data.units import closing
from tq_redis import storage_unit
from tq_redis.config import Config, DataConfig, RedisConfig
from tq_redis.control.keys import Keys
from tq_redis.data import open_data_plane
from tq_redis.deadline import Deadline
from tq_redis.errors import ConfigError, DataLostError, ServerUnavailableError
from tq_redis.redis_server import EMBEDDED_OPTIONS, start_server
from tq_redis.storage_unit import StorageUnit

HOST = "127.0.0.1"
CAPACITY = 1 << 20
COLUMN = torch.arange(30_000)


def soon() -> Deadline:
    return Deadline(30)


@pytest.fixture
def config(redis_url: str, namespace: str) -> Config:
    return Config(
        redis=RedisConfig(url=redis_url, namespace=namespace), data=DataConfig(backend="zmq")
    )


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_unit, "RENEW_S", 0.1)


@pytest.fixture
def admin(redis_url: str) -> Iterator[Admin]:
    with redis.Redis.from_url(redis_url, decode_responses=True) as admin:
        yield admin


@pytest_asyncio.fixture
async def listing(config: Config) -> AsyncIterator[Listing]:
    async with listing_of(config) as listing:
        yield listing


def make(config: Config, port: int = 0) -> StorageUnit:
    return StorageUnit(config, host=HOST, port=port, capacity=CAPACITY)


@pytest.mark.asyncio
async def test_a_unit_is_listed_as_long_as_it_runs(
    config: Config, listing: Listing, admin: Admin, wait_until: WaitUntil
) -> None:
    unit = make(config)
    keys = Keys(config.redis.namespace)
    entry = keys.unit(unit.id)
    async with running(unit):
        await listing.until(1)
        (found,) = (await listing.units(soon())).values()
        assert (found.id, found.address, found.capacity) == (unit.id, unit.server.address, CAPACITY)
        assert found.fresh

        admin.expire(entry, 3600)  # renewed long ago
        await asyncio.to_thread(wait_until, lambda: admin.ttl(entry) > 3600)
        admin.delete(entry, keys.units)  # as if Redis had lost it
        await listing.until(1)
        admin.delete(entry)
        await listing.until(0, 1)
        await listing.until(1)
    assert await listing.units(soon()) == {}
    assert admin.keys(f"tq:{config.redis.namespace}:*") == []


@pytest.mark.asyncio
async def test_an_entry_that_is_not_renewed_is_not_fresh(
    config: Config, listing: Listing, admin: Admin
) -> None:
    unit = make(config)
    await listing.list.enter(unit.id, unit.server.address, CAPACITY, soon())
    admin.expire(Keys(config.redis.namespace).unit(unit.id), 3600)
    (found,) = (await listing.units(soon())).values()
    assert not found.fresh
    await listing.list.strike(unit.id, soon())
    unit.server.stop()


@pytest.mark.asyncio
async def test_clients_find_the_units(config: Config, listing: Listing) -> None:
    async with running(make(config)), running(make(config)):
        await listing.until(2)
        async with closing(open_data_plane(config, listing)) as plane:
            blocks = [(await plane.put("p", {"x": COLUMN}, soon()))[0] for _ in range(4)]
            assert len({block.handle.split("/")[1] for block in blocks}) == 2
        async with closing(open_data_plane(config, listing)) as other:
            for block in blocks:
                assert_same((await other.get(all_rows([block]), soon()))["x"], COLUMN)


@pytest.mark.asyncio
async def test_a_unit_that_starts_again_at_its_port_is_another_one(
    config: Config, listing: Listing
) -> None:
    """Nobody is refused there, and yet the blocks are gone."""
    first = make(config)
    port = int(first.server.address.endpoint.rpartition(":")[2])
    async with closing(open_data_plane(config, listing)) as plane:
        async with running(first) as task:
            await listing.until(1)
            (block,) = await plane.put("p", {"x": COLUMN}, soon())
            task.cancel()  # as if killed: the entry stays
            await asyncio.wait([task])
        assert list(await listing.units(soon())) == [first.id]
        second = make(config, port)
        async with running(second):
            await until(lambda: only(listing, second.id))
            started = time.monotonic()
            with pytest.raises(DataLostError) as raised:
                await plane.get(all_rows([block]), Deadline(20))
            assert raised.value.handles == (block.handle,)
            assert time.monotonic() - started < 10
            (block,) = await plane.put("p", {"x": COLUMN}, soon())
            assert_same((await plane.get(all_rows([block]), soon()))["x"], COLUMN)


async def only(listing: Listing, unit: str) -> bool:
    return list(await listing.units(soon())) == [unit]


@pytest.mark.asyncio
async def test_a_unit_that_nobody_calls_ends(config: Config, listing: Listing) -> None:
    async with running(make(msgspec.structs.replace(config, idle_ttl_s=1))) as task:
        await listing.until(1)
        await asyncio.wait_for(task, 10)
    assert await listing.units(soon()) == {}


@pytest.mark.parametrize(
    ("host", "advertise"),
    [("0.0.0.0", None), ("::", None), ("[::]", None), ("*", None), (HOST, "0.0.0.0")],
)
def test_an_address_that_no_client_reaches(
    config: Config, host: str, advertise: str | None
) -> None:
    with pytest.raises(ConfigError, match="advertise"):
        StorageUnit(config, host=host, advertise=advertise, capacity=1)


def test_which_redis(config: Config) -> None:
    with pytest.raises(ConfigError, match="TQ_REDIS_URL"):
        make(msgspec.structs.replace(config, redis=RedisConfig()))


@pytest.mark.asyncio
async def test_without_redis_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_unit, "_CONTACT_S", 0.5)
    unit = make(Config(redis=RedisConfig(url="redis://127.0.0.1:1/0")))
    with pytest.raises(ServerUnavailableError):
        await asyncio.wait_for(unit.run(asyncio.Event()), 10)
    again = make(
        Config(redis=RedisConfig(url="redis://127.0.0.1:1/0")),
        int(unit.server.address.endpoint.rpartition(":")[2]),
    )
    again.server.stop()


@pytest.fixture
def restartable(redis_server: ServerUnderTest, wait_until: WaitUntil) -> Iterator[Restartable]:
    binary = None if redis_server.kind == "external" else server_binary(redis_server.kind)
    options: dict[str, Any] = {**EMBEDDED_OPTIONS, "appendonly": "no", "save": ""}
    with start_server(binary=binary, options=options) as server:
        restartable = Restartable(server, wait_until)
        yield restartable
        restartable.stop()


@pytest.mark.asyncio
async def test_redis_goes_and_comes_again(
    config: Config, restartable: Restartable, wait_until: WaitUntil
) -> None:
    """With nothing in it."""
    config = msgspec.structs.replace(config, redis=RedisConfig(url=restartable.url))
    unit = make(config)
    async with listing_of(config) as listing, running(unit) as task:
        await listing.until(1)
        async with closing(open_data_plane(config, listing)) as plane:
            (block,) = await plane.put("p", {"x": COLUMN}, soon())
            restartable.kill()
            assert_same((await plane.get(all_rows([block]), soon()))["x"], COLUMN)
            await asyncio.wait([task], timeout=0.5)
            assert not task.done()
            restartable.start()
            assert await listing.until(1) == [unit.id]
            assert_same((await plane.get(all_rows([block]), soon()))["x"], COLUMN)


@pytest.mark.usefixtures("ray_session")
@pytest.mark.asyncio
async def test_units_that_ray_runs(config: Config, listing: Listing, admin: Admin) -> None:
    from ray.util import list_named_actors

    data = DataConfig(backend="zmq", units=2, unit_bytes=CAPACITY)
    config = msgspec.structs.replace(config, data=data)
    async with closing(open_data_plane(config, listing)) as plane:
        await plane.start(Deadline(60))
        await plane.start(Deadline(60))  # they are there
        found = await listing.units(soon())
        assert [unit.capacity for unit in found.values()] == [CAPACITY] * 2
        blocks = [(await plane.put("p", {"x": COLUMN}, soon()))[0] for _ in range(2)]
        for block in blocks:
            assert_same((await plane.get(all_rows([block]), soon()))["x"], COLUMN)
        await plane.shutdown(Deadline(60))
        await plane.shutdown(Deadline(60))
    assert admin.keys(f"tq:{config.redis.namespace}:*") == []
    names: list[Any] = list_named_actors(all_namespaces=True)
    assert not [entry for entry in names if config.redis.namespace in entry["name"]]
