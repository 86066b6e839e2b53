from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.conftest import WaitUntil
from tests.control.build import claim, claimed, handle, soon, write
from tests.control.conftest import IDLE_TTL_S
from tests.control.state import Admin, Partition
from tq_redis.control.connection import RedisConnection
from tq_redis.control.plane import ControlPlane
from tq_redis.deadline import Deadline

pytestmark = pytest.mark.asyncio


def lifetime(admin: Admin, plane: ControlPlane) -> float:
    return admin.pttl(plane.keys.summary("p")) / 1000


async def test_every_key_expires_after_every_verb(plane: ControlPlane, admin: Admin) -> None:
    async def check(call: Awaitable[Any]) -> Any:
        result = await call
        Partition(admin, plane.keys.summary("p")).check()
        for name in (plane.keys.next_sample, plane.keys.partitions):
            assert admin.ttl(name) > 1.5 * IDLE_TTL_S
        return result

    put = write(4, ["x"], keys=list("abcd"), groups=list("gghh"), tags=[{"t": 1}] * 4)
    ids = (await check(plane.produce("p", put, soon()))).ids
    await check(claim(plane, 99))
    await check(claim(plane, 2, group_size=2))
    await check(plane.produce("p", write(2, ["y"], ids=ids[:2]), soon()))
    await check(plane.produce("p", write(4, ["x"], ids=ids), soon()))
    await check(plane.set_tags("p", ids[:1], [{"new": 1}], soon()))
    await check(plane.clear_samples("p", ids[:3], soon()))
    await check(plane.produce("p", write(1, keys=["e"], tags=[{"u": 1}]), soon()))


@pytest.mark.parametrize("verb", ["produce", "claim", "set_tags", "mark_lost", "clear_samples"])
async def test_what_writes_or_claims_prolongs_the_lifetime(
    plane: ControlPlane, connection: RedisConnection, admin: Admin, verb: str
) -> None:
    put = write(4, ["x"])
    ids = (await plane.produce("p", put, soon())).ids
    await claim(plane, 1)
    longer = ControlPlane(connection, plane.keys.namespace, 5 * IDLE_TTL_S)
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "produce": lambda: longer.produce("p", write(1, ["x"]), soon()),
        "claim": lambda: claim(longer, 1),
        "set_tags": lambda: longer.set_tags("p", ids[:1], [{"t": 1}], soon()),
        "mark_lost": lambda: longer.mark_lost("p", ids, ["x"], [handle(put)], soon()),
        "clear_samples": lambda: longer.clear_samples("p", ids[:1], soon()),
    }
    assert IDLE_TTL_S <= lifetime(admin, plane) <= IDLE_TTL_S * 17 / 16 + 1
    await calls[verb]()
    assert lifetime(admin, plane) >= 5 * IDLE_TTL_S
    await plane.produce("p", write(1, ["x"]), soon())
    assert lifetime(admin, plane) >= 5 * IDLE_TTL_S - 60


async def test_looking_does_not_prolong_it(
    plane: ControlPlane, connection: RedisConnection, admin: Admin
) -> None:
    ids = (await plane.produce("p", write(4, ["x"]), soon())).ids
    longer = ControlPlane(connection, plane.keys.namespace, 5 * IDLE_TTL_S)
    await longer.describe("p", soon())
    await longer.locate("p", ids, ["x"], soon())
    await claim(longer, 99)  # builds an index: that is writing
    before = lifetime(admin, plane)
    await claim(ControlPlane(connection, plane.keys.namespace, 50 * IDLE_TTL_S), 99)
    assert lifetime(admin, plane) <= before


async def test_an_idle_partition_goes_as_a_whole(
    connection: RedisConnection, namespace: str, admin: Admin, wait_until: WaitUntil
) -> None:
    plane = ControlPlane(connection, namespace, 1)
    put = write(2, ["x", "y"], keys=["a", "b"], groups=["g", "g"], tags=[{"t": 1}] * 2)
    await plane.produce("p", put, Deadline(20))
    await claimed(plane, 2, group_size=2)
    key = plane.keys.summary("p")

    def left() -> set[str]:
        return {name for name in admin.scan_iter(f"tq:{namespace}:*") if ":req:" not in name}

    whole = {name for name in left() if name.startswith(key)}
    wait_until(lambda: not admin.exists(key))
    assert not left() & whole
    assert await plane.partitions(soon()) == []
    wait_until(lambda: not left())
    for name in admin.scan_iter(f"{key}:req:*"):
        assert admin.ttl(name) > 0


async def test_ids_are_not_reused_while_a_partition_lives_by_claims_alone(
    plane: ControlPlane, admin: Admin
) -> None:
    """The counter would expire, and the next put would meet rows of the same ids."""
    await plane.produce("p", write(4, ["x"]), soon())
    admin.expire(plane.keys.next_sample, IDLE_TTL_S // 2)
    admin.expire(plane.keys.partitions, IDLE_TTL_S // 2)
    plane._prolonged.clear()  # a quarter of the lifetime has passed
    await claimed(plane, 1)
    for name in (plane.keys.next_sample, plane.keys.partitions):
        assert admin.ttl(name) > lifetime(admin, plane)
