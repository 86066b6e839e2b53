"""Calls that end before their reply is read leave nothing taken."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.control.build import claim, claimed, soon, write
from tests.control.conftest import IDLE_TTL_S
from tests.control.proxy import CuttingProxy
from tests.control.state import Admin, TaskState
from tq_redis.config import RedisConfig
from tq_redis.control import claims
from tq_redis.control.connection import RedisConnection
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Claimed, NotEnough, Wanted
from tq_redis.deadline import Deadline
from tq_redis.errors import ServerUnavailableError

pytestmark = pytest.mark.asyncio

ROWS = 512
SLOW_S = 0.004


@pytest_asyncio.fixture
async def proxy(redis_url: str) -> AsyncIterator[CuttingProxy]:
    async with CuttingProxy(redis_url, b"EVALSHA") as proxy:
        yield proxy


@pytest_asyncio.fixture
async def slow(proxy: CuttingProxy, plane: ControlPlane) -> AsyncIterator[ControlPlane]:
    """The same namespace, seen through the proxy, which holds up every reply."""
    connection = RedisConnection(proxy.url, RedisConfig())
    proxy.slow_s = SLOW_S
    slow = ControlPlane(connection, plane.keys.namespace, IDLE_TTL_S)
    yield slow
    await slow.close()


async def test_no_cancellation_is_lost(connection: RedisConnection) -> None:
    """Whatever the call was about to do."""
    for steps in range(40):
        call = asyncio.create_task(connection.command("GET", "x", deadline=soon()))
        for _ in range(steps):
            await asyncio.sleep(0)
        if call.cancel():
            with pytest.raises(asyncio.CancelledError):
                await call


def asking(chance: random.Random) -> Wanted:
    """Samples or groups, with a lease or for good."""
    size = chance.choice([0, 4])
    lease = chance.choice([None, 1000.0])
    return Wanted("t", ["x"], chance.choice([4, 8]), size, lease)


async def put(plane: ControlPlane) -> list[int]:
    groups = [f"g{row // 4}" for row in range(ROWS)]
    return (await plane.produce("p", write(ROWS, ["x"], groups=groups), soon())).ids


async def undone(plane: ControlPlane) -> None:
    """Return when what cancelled calls left is undone."""
    while plane._undoing:
        await asyncio.wait(plane._undoing)


async def cancel_some(slow: ControlPlane, chance: random.Random, times: int) -> set[int]:
    """Calls that are cancelled at any moment. Returns what those got that were faster."""
    got: set[int] = set()
    for _ in range(times):
        call = asyncio.create_task(slow.claim("p", asking(chance), "me", soon()))
        await asyncio.sleep(chance.uniform(0, 2 * SLOW_S))
        call.cancel()
        (found,) = await asyncio.gather(call, return_exceptions=True)
        if isinstance(found, Claimed):
            assert got.isdisjoint(found.ids)
            got.update(found.ids)
        else:
            assert isinstance(found, NotEnough | asyncio.CancelledError), found
    return got


@pytest.mark.parametrize("seed", range(3))
async def test_cancelled_at_any_moment(
    slow: ControlPlane, plane: ControlPlane, admin: Admin, seed: int
) -> None:
    """What was not handed to a caller can be claimed, and does not count as delivered."""
    ids = await put(plane)
    got = await cancel_some(slow, random.Random(seed), 50)
    await undone(slow)
    assert got < set(ids)
    left = [sample for sample in ids if sample not in got]
    assert (await claimed(plane, len(left))).ids == left
    task = TaskState(admin, plane.keys.summary("p"), "t")
    assert {sample for sample, count in task.deliveries.items() if count} <= set(map(str, got))


@pytest.mark.parametrize(("lease", "commands"), [(None, 8), (1000.0, 4)])
async def test_a_batch_that_is_taken_in_pieces(
    slow: ControlPlane,
    plane: ControlPlane,
    proxy: CuttingProxy,
    admin: Admin,
    monkeypatch: pytest.MonkeyPatch,
    lease: float | None,
    commands: int,
) -> None:
    """Cancelled while a piece is claimed, or acknowledged: those that were are given back too."""
    monkeypatch.setattr(claims, "ROWS_PER_CLAIM", 2)
    ids = await put(plane)
    await claim(slow, 1000)
    for command in range(commands):
        before = proxy.seen
        call = asyncio.create_task(slow.claim("p", Wanted("t", ["x"], 8, 0, lease), "me", soon()))
        while proxy.seen - before <= command:
            proxy.came.clear()
            await proxy.came.wait()
        call.cancel()
        (found,) = await asyncio.gather(call, return_exceptions=True)
        assert isinstance(found, asyncio.CancelledError)
        await undone(slow)
    monkeypatch.undo()
    assert (await claimed(plane, ROWS)).ids == ids
    task = TaskState(admin, plane.keys.summary("p"), "t")
    assert set(task.deliveries.values()) <= {0}


async def test_a_batch_in_pieces_that_cannot_be_filled(
    plane: ControlPlane, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consumers that compete for big batches: what is tried in vain does not count as delivered."""
    monkeypatch.setattr(claims, "ROWS_PER_CLAIM", 64)
    ids = await put(plane)
    await claim(plane, 1000)
    found = await asyncio.gather(*(claim(plane, ROWS // 2 + 1, lease_s=1000.0) for _ in range(4)))
    got = [each.ids for each in found if isinstance(each, Claimed)]
    assert len(got) == 1
    await undone(plane)
    left = [sample for sample in ids if sample not in got[0]]
    assert (await claimed(plane, len(left), lease_s=1000.0)).ids == left
    task = TaskState(admin, plane.keys.summary("p"), "t")
    assert set(task.deliveries.values()) == {1}


async def test_the_server_does_not_answer_in_time(
    slow: ControlPlane, plane: ControlPlane, proxy: CuttingProxy
) -> None:
    ids = await put(plane)
    await claim(plane, 1000)
    await claim(slow, 1000)
    proxy.slow_s = 0.3
    with pytest.raises(ServerUnavailableError):
        await slow.claim("p", Wanted("t", ["x"], 8), "me", Deadline(0.2))
    assert (await plane.summary("p", soon())).get("consumed:t", 0) in (0, 8)
    proxy.slow_s = 0
    await undone(slow)
    assert (await claimed(plane, ROWS)).ids == ids


async def test_a_cancellation_for_a_partition_made_anew_touches_nothing(
    plane: ControlPlane,
) -> None:
    """Numbers of claims start again in it."""
    await put(plane)
    request = "r" * 32
    wanted = Wanted("t", ["x"], 4, lease_s=1000.0)
    arguments = plane._claim_arguments(wanted, "me") | {"count": 4, "need": 4}
    await plane._run_again("p", "claim", "t", arguments, claims.ClaimReply, soon(), request)
    await plane.clear_partition("p", soon())
    await plane._undo("p", "t", request)
    assert await plane.partitions(soon()) == []
    await put(plane)
    mine = await claimed(plane, 4, lease_s=1000.0)
    await plane._undo("p", "t", request)
    (held,) = set(mine.claims)
    assert held is not None
    assert await plane.ack("p", held, mine.ids, soon()) == []
