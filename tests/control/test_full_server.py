"""Redis is at maxmemory: a typed error, nothing half written, and room can be made."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import redis

from tests.control.build import handle, soon, write
from tests.control.conftest import IDLE_TTL_S, StartServer
from tests.control.state import Admin, Partition, dump
from tq_redis.config import RedisConfig
from tq_redis.control.connection import RedisConnection
from tq_redis.control.owner import Ownership
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Claimed
from tq_redis.errors import ServerFullError

pytestmark = pytest.mark.asyncio


@pytest.fixture
def full(start: StartServer, namespace: str) -> Admin:
    return redis.Redis.from_url(start().url, decode_responses=True)


@pytest_asyncio.fixture
async def plane(full: Admin, namespace: str) -> AsyncIterator[ControlPlane]:
    port = full.connection_pool.connection_kwargs["port"]
    connection = RedisConnection(f"redis://127.0.0.1:{port}/0", RedisConfig())
    plane = ControlPlane(connection, namespace, IDLE_TTL_S)
    yield plane
    for name in await plane.partitions(soon()):
        Partition(full, plane.keys.summary(name)).check()
    await connection.close()
    full.close()


def fill(full: Admin) -> None:
    """From now on Redis refuses whatever could take memory."""
    full.config_set("maxmemory", 1)


async def test_a_put_is_refused_as_a_whole(plane: ControlPlane, full: Admin) -> None:
    old = write(4, ["x"], keys=list("abcd"))
    ids = (await plane.produce("p", old, soon())).ids
    await plane.claim("p", "t", ["x", "y"], 9, "me", soon())
    fill(full)
    before = dump(full, plane.keys.namespace)
    for put in (
        write(2, ["x", "y"], groups=["g", "g"], tags=[{"t": 1}, {}]),
        write(4, ["y"], ids=ids),
        write(4, ["x"], ids=ids),
        write(2, ["x"], keys=["a", "new"]),
        write(4, ids=ids, tags=[{"t": 1}] * 4),
        write(1, keys=["a"]),
    ):
        for name in ("p", "new"):
            if put.ids is None or name == "p":
                with pytest.raises(ServerFullError, match="maxmemory.*Clear finished"):
                    await plane.produce(name, put, soon())
    with pytest.raises(ServerFullError):
        await plane.claim("p", "another task", ["x"], 1, "me", soon())
    assert dump(full, plane.keys.namespace) == before
    full.config_set("maxmemory", 0)
    await plane.produce("p", write(4, ["y"], ids=ids), soon())


async def test_what_makes_room_passes(plane: ControlPlane, full: Admin) -> None:
    """Consuming and clearing go on, and a claim to the namespace stays alive."""
    puts = [write(4, ["x"], groups=["g"] * 4), write(4, ["x"], groups=["h"] * 4)]
    ids = [(await plane.produce("p", put, soon())).ids for put in puts]
    await plane.claim("p", "t", ["x"], 9, "me", soon())
    await plane.claim("p", "u", ["x"], 99, "me", soon(), group_size=4)
    ownership = Ownership(plane.connection, plane.keys)
    await ownership.take(soon())
    fill(full)
    found = await plane.claim("p", "t", ["x"], 5, "me", soon())
    assert isinstance(found, Claimed)
    found = await plane.claim("p", "u", ["x"], 4, "me", soon(), group_size=4)
    assert isinstance(found, Claimed)
    assert await plane.clear_samples("p", ids[0], soon()) == [handle(puts[0])]
    await plane.forget_freed("p", [handle(puts[0])], soon())
    Partition(full, plane.keys.summary("p")).check()
    await ownership.renew(soon())
    (generation,) = await plane.clear_partition("p", soon())
    assert await plane.trash("p", generation, soon()) == [handle(puts[1])]
    await plane.empty_trash("p", generation, soon())
    await ownership.give_up(soon())
    left: Any = full.keys("*")
    assert [key for key in left if ":req:" not in key] == [plane.keys.next_sample]


async def test_puts_until_it_is_full(plane: ControlPlane, full: Admin) -> None:
    full.config_set("maxmemory", full.info("memory")["used_memory"] + 1_000_000)
    for _ in range(1000):
        try:
            await plane.produce("p", write(64, ["x", "y", "z"]), soon())
        except ServerFullError:
            break
    else:
        pytest.fail("1 MB took all of it")
    rows = await plane.describe("p", soon())
    assert len(rows.ids) >= 64
    assert rows.common_fields() == ["x", "y", "z"]
    Partition(full, plane.keys.summary("p")).check()
    await plane.clear_samples("p", rows.ids, soon())
    full.config_set("maxmemory", full.info("memory")["used_memory"] + 1_000_000)
    await plane.produce("p", write(64, ["x", "y", "z"]), soon())
