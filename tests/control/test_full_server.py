"""Redis is at maxmemory: a typed error, nothing half written, and room can be made."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
import redis

from tests.control.build import claim, claimed, handle, soon, write
from tests.control.conftest import IDLE_TTL_S, StartServer
from tests.control.state import Admin, Partition, dump
from tq_redis.config import RedisConfig
from tq_redis.control.connection import RedisConnection
from tq_redis.control.owner import Ownership
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Claimed, NotEnough, Wanted
from tq_redis.errors import ServerFullError
from tq_redis.metadata.claim import Claim

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
    await claim(plane, 9, fields="xy")
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
    assert dump(full, plane.keys.namespace) == before
    full.config_set("maxmemory", 0)
    await plane.produce("p", write(4, ["y"], ids=ids), soon())


async def test_what_makes_room_passes(plane: ControlPlane, full: Admin) -> None:
    """Consuming and clearing go on, and a claim to the namespace stays alive."""
    puts = [write(4, ["x"], groups=["g"] * 4), write(4, ["x"], groups=["h"] * 4)]
    ids = [(await plane.produce("p", put, soon())).ids for put in puts]
    await claim(plane, 9)
    await claim(plane, 100, task="u", group_size=4)
    ownership = Ownership(plane.connection, plane.keys)
    await ownership.take(soon())
    fill(full)
    await claimed(plane, 5)
    await claimed(plane, 4, task="u", group_size=4)
    await claimed(plane, 8, task="new")
    lost = await plane.mark_lost("p", ids[1][:2], ["x"], [handle(puts[1])], soon())
    assert lost.cells == {"x": ids[1][:2]}
    assert await plane.clear_samples("p", ids[0], soon()) == [handle(puts[0])]
    await plane.forget_freed("p", [handle(puts[0])], soon())
    Partition(full, plane.keys.summary("p")).check()
    await ownership.renew(soon())
    (generation,) = await plane.clear_partition("p", soon())
    assert await plane.trash("p", generation, soon()) == [handle(puts[1])]
    await plane.empty_trash("p", generation, soon())
    await ownership.give_up(soon())
    left: Any = full.keys("*")
    assert {key for key in left if ":req:" not in key} <= {
        plane.keys.next_sample,
        plane.keys.counted_by,
    }


async def test_what_was_lost_can_be_claimed_again(plane: ControlPlane, full: Admin) -> None:
    put = replace(write(4, ["x", "y"]), task="t")
    ids = (await plane.produce("p", put, soon())).ids
    await claimed(plane, 4, lease_s=60.0, draw="0:0")
    fill(full)
    lost = await plane.mark_lost("p", ids, ["y"], [handle(put)], soon())
    assert lost.tasks == {"t": ids}
    Partition(full, plane.keys.summary("p")).check()
    assert (await claimed(plane, 4, draw="0:0")).ids == ids


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


async def test_consumers_go_on(plane: ControlPlane, full: Admin) -> None:
    """Whatever may become of leased samples; new ones are refused with a typed error."""
    await plane.produce("p", write(16, ["x"], tags=[{"n": 1}] * 16), soon())
    fill(full)
    first = await claimed(plane, 4, lease_s=1000.0)
    second = await claimed(plane, 4, lease_s=1000.0, draw="0:0")
    third = await claimed(plane, 4, lease_s=1000.0, max_deliveries=1)
    holds = [found.claims[0] for found in (first, second, third)]
    assert None not in holds
    one, two, three = (Claim("t", hold.number) for hold in holds if hold)
    assert await plane.ack("p", one, first.ids[:2], soon()) == []
    assert await plane.renew("p", one, None, soon()) == 1000.0
    await plane.release("p", one, first.ids, soon())
    await plane.release("p", two, second.ids, soon())
    await plane.release("p", three, third.ids, soon())
    ready, _ = await plane.ready("p", Wanted("u", ["x"], 1), "me", soon())
    assert ready is not None
    chosen = await plane.claim_chosen("p", Wanted("u", ["x"], 1), "me", ready.ids[:3], soon())
    assert isinstance(chosen, Claimed)
    for task, left in (("t", 10), ("u", 13)):
        found = await claim(plane, 16, task=task)
        assert isinstance(found, NotEnough)
        assert found.ready == left
    with pytest.raises(ServerFullError, match="maxmemory"):
        await plane.produce("p", write(1, ["x"]), soon())
    await claimed(plane, 4, lease_s=0.001)
    summary = full.hgetall(plane.keys.summary("p"))
    while (await plane.summary("p", soon()))["claimed:t"]:
        await claim(plane, 99)  # takes back what ran out
    assert summary["consumed:t"] == "2"
    assert await plane.reset_consumption("p", "t", soon()) == 6
    Partition(full, plane.keys.summary("p")).check()
