"""Draws that are too large for one script: whole for their ranks or not made, whoever dies."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from tests.control.build import claim, claimed, soon, write
from tests.control.conftest import IDLE_TTL_S
from tests.control.proxy import CuttingProxy
from tests.control.state import Admin, Partition, TaskState
from tq_redis.config import RedisConfig
from tq_redis.control import claims, draws
from tq_redis.control.connection import RedisConnection
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Claimed, NotEnough, Taken, Wanted
from tq_redis.metadata.claim import Claim

pytestmark = pytest.mark.asyncio

RANKS = ("0:0", "1:0", "2:0")
LONG_S = 1000.0


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows a script, so that six rows are a large draw."""
    monkeypatch.setattr(claims, "ROWS_PER_PART", 2)
    monkeypatch.setattr(draws, "ROWS_PER_PART", 2)


@pytest_asyncio.fixture
async def proxy(redis_url: str) -> AsyncIterator[CuttingProxy]:
    async with CuttingProxy(redis_url, b"EVALSHA") as proxy:
        yield proxy


@pytest_asyncio.fixture
async def seen(proxy: CuttingProxy, plane: ControlPlane) -> AsyncIterator[ControlPlane]:
    """The same namespace, seen through the proxy."""
    seen = ControlPlane(RedisConnection(proxy.url, RedisConfig()), plane.keys.namespace, IDLE_TTL_S)
    yield seen
    await seen.close()


@pytest_asyncio.fixture
async def planes(redis_url: str, plane: ControlPlane) -> AsyncIterator[list[ControlPlane]]:
    """The same namespace as six clients see it."""
    connections = [RedisConnection(redis_url, RedisConfig(max_connections=2)) for _ in range(6)]
    yield [ControlPlane(each, plane.keys.namespace, IDLE_TTL_S) for each in connections]
    for connection in connections:
        await connection.close()


async def put(plane: ControlPlane, count: int) -> list[int]:
    return (await plane.produce("p", write(count, ["x"]), soon())).ids


def wanted(draw: str, count: int, lease_s: float | None = None) -> Wanted:
    return Wanted("t", ["x"], count, lease_s=lease_s, max_deliveries=1, draw=draw, whole="*")


async def deal(
    plane: ControlPlane,
    draw: str,
    *,
    lease_s: float | None = None,
    ranks: Sequence[str] = RANKS,
    size: int = 3,
) -> Claimed | Taken | NotEnough:
    """What a rank does that wants its share of what is ready."""
    asked = wanted(draw, size * len(ranks), lease_s)
    ready, standing = await plane.ready("p", asked, "me", soon(), draws=ranks)
    if ready is None:
        return await plane.claim_chosen("p", asked, "me", [], soon(), shares={})
    ids = iter(ready.ids)
    shares = {
        name: [i for _, i in zip(range(size), ids, strict=False)] for name in standing.missing
    }
    if not shares or any(len(share) < size for share in shares.values()):
        return standing
    chosen = [sample for share in shares.values() for sample in share]
    return await plane.claim_chosen("p", asked, "me", chosen, soon(), shares=shares)


async def dealt(plane: ControlPlane, draw: str, **options: Any) -> Claimed:
    """The share of a rank, waiting for it as the client does."""
    while True:
        found = await deal(plane, draw, **options)
        if isinstance(found, Claimed):
            return found
        if isinstance(found, NotEnough):
            until = soon().remaining if found.retry_s is None else found.retry_s
            await plane.wait("p", found.event, type(soon())(min(1.0, until)))


def state(admin: Admin, plane: ControlPlane) -> TaskState:
    Partition(admin, plane.keys.summary("p")).check()
    return TaskState(admin, plane.keys.summary("p"), "t")


def let_leases_run_out(admin: Admin, plane: ControlPlane) -> None:
    leases: Any = f"{plane.keys.summary('p')}:leases:t"
    numbers: Any = admin.zrange(leases, 0, -1)
    admin.zadd(leases, dict.fromkeys(numbers, 1))


async def come(proxy: CuttingProxy, scripts: int) -> None:
    """Return when so many scripts have come since the proxy was made."""
    while proxy.seen < scripts:
        proxy.came.clear()
        await asyncio.wait_for(proxy.came.wait(), 20)


async def undone(plane: ControlPlane) -> None:
    while plane._undoing:
        await asyncio.wait(plane._undoing)


# One draw


@pytest.mark.parametrize("lease_s", [None, LONG_S])
async def test_a_large_draw_is_remembered(
    plane: ControlPlane, admin: Admin, lease_s: float | None
) -> None:
    ids = await put(plane, 9)
    first = await claimed(plane, 7, draw="0:0", lease_s=lease_s)
    again = await claimed(plane, 7, draw="0:0", lease_s=lease_s)
    assert first.ids == again.ids == ids[:7]
    assert first.claims == again.claims
    found = state(admin, plane)
    assert len(found.in_state("leased" if lease_s else "consumed")) == 7
    assert set(found.deliveries.values()) == ({1} if lease_s else set())
    assert (await claimed(plane, 2)).ids == ids[7:]
    if lease_s:
        for held in dict.fromkeys(first.claims):
            assert isinstance(held, Claim)
            assert await plane.ack("p", held, first.ids, soon()) != first.ids
        assert (await plane.summary("p", soon()))["consumed:t"] == 9


async def test_too_few_for_a_large_draw_take_none(plane: ControlPlane, admin: Admin) -> None:
    ids = await put(plane, 6)
    found = await claim(plane, 7, draw="0:0")
    assert isinstance(found, NotEnough)
    assert (found.ready, state(admin, plane).records) == (6, {})
    assert (await claimed(plane, 6, draw="0:1")).ids == ids


async def test_groups_of_a_large_draw_are_whole(plane: ControlPlane) -> None:
    groups = ["a", "b"] * 3 + ["c"]
    await plane.produce("p", write(7, ["x"], groups=groups), soon())
    assert (await claimed(plane, 6, group_size=3, draw="0:0")).ids == [1, 3, 5, 2, 4, 6]
    assert (await claimed(plane, 6, group_size=3, draw="0:0")).ids == [1, 3, 5, 2, 4, 6]


async def test_a_choice_that_others_were_faster_with_takes_none(
    plane: ControlPlane, admin: Admin
) -> None:
    ids = await put(plane, 6)
    await claimed(plane, 1)
    asked = wanted("0:0", 6)
    found = await plane.claim_chosen("p", asked, "me", ids[::-1], soon())
    assert found == Taken(ids[:1])
    assert state(admin, plane).making == {}
    assert (await claimed(plane, 5)).ids == ids[1:]
    assert set(state(admin, plane).deliveries.values()) <= {0}


async def test_what_came_of_a_lost_lease_is_not_given_again(
    plane: ControlPlane, admin: Admin
) -> None:
    """Not even a part whose own lease still runs."""
    ids = await put(plane, 6)
    old = await claimed(plane, 6, draw="0:0", lease_s=LONG_S)
    held = old.claims[0]
    assert held is not None
    admin.zadd(f"{plane.keys.summary('p')}:leases:t", {str(held.number): 1})
    found = await claim(plane, 6, draw="0:0", lease_s=LONG_S)
    assert isinstance(found, NotEnough)
    for claim_of in dict.fromkeys(old.claims[2:]):
        assert claim_of is not None
        await plane.release("p", claim_of, ids[2:], soon())
    assert state(admin, plane).draws == {}


# Replay


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("lease_s", [None, LONG_S])
async def test_every_reply_is_lost(
    seen: ControlPlane,
    plane: ControlPlane,
    proxy: CuttingProxy,
    admin: Admin,
    lease_s: float | None,
    flush: bool,
) -> None:
    ids = await put(plane, 9)
    await claim(plane, 99)

    async def lose() -> None:
        while True:
            before = proxy.seen
            proxy.cuts = 1
            if flush:
                admin.script_flush()
            await come(proxy, before + 2)

    losing = asyncio.create_task(lose())
    shares = [await dealt(seen, name, lease_s=lease_s) for name in (*RANKS, *RANKS)]
    losing.cancel()
    proxy.cuts = 0
    assert shares[:3] == shares[3:]
    assert [each.ids for each in shares[:3]] == [ids[:3], ids[3:6], ids[6:]]
    assert proxy.lost > 6
    assert set(state(admin, plane).deliveries.values()) == ({1} if lease_s else set())


# Cancelled and killed


@pytest.mark.parametrize("lease_s", [None, LONG_S])
async def test_a_draw_that_is_cancelled_at_any_script(
    seen: ControlPlane,
    plane: ControlPlane,
    proxy: CuttingProxy,
    admin: Admin,
    lease_s: float | None,
) -> None:
    """Its rows are there for others, or the draw is there for its rank, whole."""
    ids = await put(plane, 6)
    await claim(plane, 99)
    await claim(seen, 99)
    proxy.slow_s = 0.003
    outcomes: set[bool] = set()
    for command in range(10):
        name = f"0:{command}"
        before = proxy.seen
        call = asyncio.create_task(claim(seen, 6, draw=name, lease_s=lease_s))
        await come(proxy, before + command + 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await undone(seen)
        made = name in state(admin, plane).draws
        outcomes.add(made)
        if made:
            assert (await claimed(plane, 6, draw=name, lease_s=lease_s)).ids == ids
        else:
            assert (await claimed(plane, 6, draw=f"1:{command}")).ids == ids
        assert await plane.reset_consumption("p", "t", soon()) == 6
    assert outcomes == {True, False}


KILLED = """
import asyncio, sys
from tests.control.build import claimed
from tq_redis.config import RedisConfig
from tq_redis.control import claims, draws
from tq_redis.control.connection import RedisConnection
from tq_redis.control.plane import ControlPlane

claims.ROWS_PER_PART, draws._HOLD_S = 2, 0.5

async def main(url, namespace, lease):
    plane = ControlPlane(RedisConnection(url, RedisConfig()), namespace, 1000)
    await claimed(plane, 6, draw="0:0", lease_s=float(lease) or None)

asyncio.run(main(*sys.argv[1:]))
"""


# The first script recalls, three claim the pieces, six recall and take the parts.
@pytest.mark.parametrize(
    ("scripts", "lease_s", "made"), [(3, 0, False), (3, 0.5, False), (5, 0.5, True), (8, 0, True)]
)
async def test_the_process_that_draws_is_killed(
    plane: ControlPlane,
    proxy: CuttingProxy,
    admin: Admin,
    scripts: int,
    lease_s: float,
    made: bool,
) -> None:
    ids = await put(plane, 6)
    await claim(plane, 99)
    proxy.slow_s = 0.02
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, proxy.url, plane.keys.namespace, str(lease_s)
    )
    await come(proxy, scripts)
    process.kill()
    await process.wait()
    assert ("0:0" in state(admin, plane).draws) == made
    found = await claim(plane, 6, draw="0:0")
    if not made:
        assert isinstance(found, NotEnough)
        assert found.retry_s is not None
        await plane.wait("p", found.event, type(soon())(found.retry_s))
        found = await claim(plane, 6, draw="0:0")
    assert isinstance(found, Claimed)
    assert found.ids == ids


# Ranks that race


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lease_s", [None, LONG_S])
async def test_ranks_that_ask_at_once_agree(
    planes: list[ControlPlane],
    plane: ControlPlane,
    admin: Admin,
    lease_s: float | None,
    seed: int,
) -> None:
    """Two processes of each rank, and others that take what they can get meanwhile."""
    chance = random.Random(seed)
    ids = await put(plane, 18)

    async def ask(asking: ControlPlane, draw: str) -> tuple[str, Claimed]:
        await asyncio.sleep(chance.uniform(0, 0.01))
        return draw, await dealt(asking, draw, lease_s=lease_s)

    async def compete(asking: ControlPlane) -> list[int]:
        await asyncio.sleep(chance.uniform(0, 0.02))
        found = await claim(asking, chance.randint(1, 4))
        return found.ids if isinstance(found, Claimed) else []

    names = [*RANKS, *RANKS]
    chance.shuffle(names)
    asking = [ask(each, name) for each, name in zip(planes, names, strict=True)]
    found = await asyncio.gather(asyncio.gather(*asking), compete(plane), compete(plane))
    shares: dict[str, Claimed] = {}
    for name, share in found[0]:
        assert shares.setdefault(name, share) == share
    others = found[1] + found[2]
    got = [sample for share in shares.values() for sample in share.ids] + others
    assert len(got) == len(set(got)) == 9 + len(others)
    task = state(admin, plane)
    assert task.making == {}
    left = [sample for sample in ids if sample not in got]
    assert not left or (await claimed(plane, len(left))).ids == left
    assert set(state(admin, plane).deliveries.values()) <= {0, 1}


async def test_who_asks_while_a_draw_is_made_is_woken_by_it(
    seen: ControlPlane, plane: ControlPlane, proxy: CuttingProxy
) -> None:
    ids = await put(plane, 9)
    await claim(plane, 99)
    proxy.slow_s = 0.05
    making = asyncio.create_task(dealt(seen, "0:0"))
    await come(proxy, 4)
    found = await deal(plane, "1:0")
    assert isinstance(found, NotEnough)
    await plane.wait("p", found.event, soon())
    assert (await dealt(plane, "1:0")).ids == ids[3:6]
    assert (await making).ids == ids[:3]


async def test_a_task_that_is_reset_while_a_draw_is_made(
    seen: ControlPlane, plane: ControlPlane, proxy: CuttingProxy, admin: Admin
) -> None:
    ids = await put(plane, 9)
    await claim(plane, 99)
    proxy.slow_s = 0.02
    making = asyncio.create_task(dealt(seen, "0:0"))
    await come(proxy, 5)
    await plane.reset_consumption("p", "t", soon())
    assert (await making).ids == ids[:3]
    assert (await dealt(plane, "2:0")).ids == ids[6:]
    state(admin, plane)


async def test_a_partition_that_is_made_anew_while_a_draw_is_made(
    seen: ControlPlane, plane: ControlPlane, proxy: CuttingProxy
) -> None:
    """Numbers of claims start again in it: no piece gets into another draw."""
    await put(plane, 9)
    await claim(plane, 99)
    proxy.slow_s = 0.02
    making = asyncio.create_task(dealt(seen, "0:0"))
    await come(proxy, 4)
    await plane.clear_partition("p", soon())
    ids = await put(plane, 9)
    shares = await asyncio.gather(making, dealt(plane, "1:0"), dealt(plane, "2:0"))
    assert sorted(sample for share in shares for sample in share.ids) == ids


# Shares that nobody asks for


@pytest.mark.parametrize("size", [1, 3])
async def test_a_share_that_nobody_asks_for_comes_back(
    plane: ControlPlane, admin: Admin, size: int
) -> None:
    """Not as a delivery; and a late rank draws anew, for no other rank than those without one."""
    ids = await put(plane, 3 * size)
    first = await dealt(plane, "0:0", lease_s=LONG_S, size=size)
    waiting = await deal(plane, "3:0", lease_s=LONG_S, size=size)
    assert isinstance(waiting, NotEnough)
    assert waiting.retry_s is not None
    assert waiting.retry_s <= LONG_S
    for held in dict.fromkeys(first.claims):
        assert held is not None
        await plane.renew("p", held, 2 * LONG_S, soon())
    key = f"{plane.keys.summary('p')}:leases:t"
    due: Any = admin.zrange(key, 0, len(ids) // 3 * 2 - 1 if size == 1 else 3)
    admin.zadd(key, dict.fromkeys(due, 1))
    late = await dealt(plane, "2:0", lease_s=LONG_S, size=size)
    assert (await dealt(plane, "0:0", lease_s=LONG_S, size=size)).ids == first.ids
    other = await dealt(plane, "1:0", lease_s=LONG_S, size=size)
    assert sorted(first.ids + late.ids + other.ids) == ids
    assert set(state(admin, plane).deliveries.values()) == {1}


async def test_without_a_lease_a_share_waits_for_its_rank(
    plane: ControlPlane, admin: Admin
) -> None:
    ids = await put(plane, 9)
    await dealt(plane, "0:0")
    assert state(admin, plane).leases == {}
    found = await claim(plane, 1)
    assert isinstance(found, NotEnough)
    assert found.retry_s is None
    assert (await dealt(plane, "1:0", lease_s=LONG_S)).ids == ids[3:6]
    assert await plane.reset_consumption("p", "t", soon()) == 9
    assert (await claimed(plane, 9)).ids == ids
