"""Redis is killed and comes back from its append-only file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio

from tests.conftest import WaitUntil
from tests.control.build import claim, claimed, soon, write
from tests.control.conftest import IDLE_TTL_S, StartServer
from tests.control.restartable import Restartable
from tests.control.state import Partition
from tq_redis.config import RedisConfig
from tq_redis.control.connection import RedisConnection
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Claimed
from tq_redis.deadline import Deadline

pytestmark = pytest.mark.asyncio


@pytest.fixture
def server(start: StartServer, wait_until: WaitUntil) -> Iterator[Restartable]:
    server = Restartable(start(appendonly="yes", appendfsync="always"), wait_until)
    yield server
    server.stop()


@pytest_asyncio.fixture
async def plane(server: Restartable, namespace: str) -> AsyncIterator[ControlPlane]:
    connection = RedisConnection(server.url, RedisConfig())
    yield ControlPlane(connection, namespace, IDLE_TTL_S)
    await connection.close()


async def test_nothing_acknowledged_is_lost(plane: ControlPlane, server: Restartable) -> None:
    put = write(8, ["x"], keys=list("abcdefgh"), groups=list("gggghhhh"), tags=[{"t": 1}] * 8)
    ids = (await plane.produce("p", put, soon())).ids
    await claimed(plane, 4, group_size=4)
    server.kill()
    server.start()
    assert (await claimed(plane, 4, group_size=4)).ids == ids[4:]
    assert (await plane.describe("p", soon(), keys=["a", "h"])).ids == [ids[0], ids[7]]
    assert (await plane.produce("p", write(2, ["x"]), soon())).ids[0] > 1_000_000
    Partition(server.admin, plane.keys.summary("p")).check()


@pytest.mark.parametrize("begin", [0, 5_000_000], ids=["new", "loaded"])
async def test_no_id_is_given_out_again_where_even_the_count_was_lost(
    plane: ControlPlane, server: Restartable, begin: int
) -> None:
    """As by a replica that took over before it got anything of a new namespace."""
    if begin:
        await plane.skip_samples(begin, soon())
    given = await plane.reserve("p", 8, soon())
    server.admin.delete(plane.keys.next_sample, plane.keys.counted_by)
    server.kill()
    server.start()
    assert await plane.reserve("p", 1, soon()) >= given + 8


async def test_ids_that_were_skipped_for_a_checkpoint_are_not_given_out_by_others(
    plane: ControlPlane, server: Restartable, namespace: str
) -> None:
    """What they were skipped for may be all that the server has lost when it comes back."""
    upto = await plane.skip_samples(5_000_000, soon())
    server.kill()
    server.start()
    await plane.connection.command("PING", deadline=soon())  # it is back
    server.admin.set(plane.keys.next_sample, 4_999_000)
    connection = RedisConnection(server.url, RedisConfig())
    other = ControlPlane(connection, namespace, IDLE_TTL_S)
    try:
        assert upto >= 5_000_000
        assert await other.reserve("p", 1, soon()) > 5_000_000
    finally:
        await connection.close()


async def test_calls_in_flight_wait_for_it(plane: ControlPlane, server: Restartable) -> None:
    """Every sample is there once and claimed once, whenever the kill hits."""

    async def get_one() -> int:
        deadline = Deadline(60)
        while True:
            found = await claim(plane, 1)
            if isinstance(found, Claimed):
                return found.ids[0]
            await plane.wait("p", found.event, deadline)

    async def put_one(number: int) -> int:
        await asyncio.sleep(number / 400)
        return (await plane.produce("p", write(1, ["x"]), soon())).ids[0]

    async def restart() -> None:
        for action in actions:
            await asyncio.sleep(0.1)
            await asyncio.to_thread(action)

    actions: list[Callable[[], None]] = [server.kill, server.start]
    moved: list[Any] = await asyncio.gather(
        *(put_one(number) for number in range(100)), *(get_one() for _ in range(100)), restart()
    )
    assert sorted(moved[:100]) == sorted(moved[100:200])
    assert len(set(moved[:200])) == 100
    summary = await plane.summary("p", soon())
    assert [summary[name] for name in ("samples", "produced:x", "consumed:t")] == [100] * 3
    Partition(server.admin, plane.keys.summary("p")).check()
