"""Consumers with leases that compete, fall silent, and come back late."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from tests.control.build import claim, claimed, soon, write
from tests.control.state import Admin, Partition
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Claimed, NotEnough
from tq_redis.control.replies import ResetReply
from tq_redis.deadline import Deadline
from tq_redis.errors import NotReadyError
from tq_redis.metadata.claim import Claim

pytestmark = pytest.mark.asyncio

LONG_S = 1000.0
# Waiters look again after five seconds anyway; woken ones are back long before.
WOKEN_S = 4.0


def held_by(found: Claimed) -> Claim:
    (held,) = set(found.claims)
    assert held is not None
    return held


async def get(plane: ControlPlane, count: int, *, lease_s: float = LONG_S) -> Claimed:
    """Wait for a claim as the client does."""
    deadline = Deadline(60)
    while True:
        found = await claim(plane, count, lease_s=lease_s)
        if isinstance(found, Claimed):
            return found
        until = deadline.remaining if found.retry_s is None else found.retry_s
        await plane.wait("p", found.event, Deadline(until))


async def test_waiters_of_one_task_get_disjoint_batches(plane: ControlPlane) -> None:
    chance = random.Random(0)
    counts = [chance.randint(1, 9) for _ in range(40)]
    waiters = [asyncio.create_task(get(plane, count)) for count in counts]
    left = sum(counts)
    while left:
        rows = min(left, chance.randint(1, 30))
        await plane.produce("p", write(rows, ["x"]), soon())
        left -= rows
    found = await asyncio.wait_for(asyncio.gather(*waiters), 60)
    assert [len(each.ids) for each in found] == counts
    got = sorted(sample for each in found for sample in each.ids)
    assert got == list(range(1, sum(counts) + 1))
    for each in found:
        assert await plane.ack("p", held_by(each), each.ids, soon()) == []


async def test_a_lease_that_runs_out_wakes_a_waiter_without_polling(
    plane: ControlPlane, admin: Admin
) -> None:
    """Redis ends a wait at most a tenth of a second late."""
    await plane.produce("p", write(4, ["x"]), soon())
    await claim(plane, 99)
    await get(plane, 4, lease_s=0.3)
    start = time.monotonic()
    found = await get(plane, 4)
    assert 0.25 < time.monotonic() - start < WOKEN_S
    assert len(found.ids) == 4
    events: Any = admin.xrange(f"{plane.keys.summary('p')}:events")
    assert [words["kind"] for _, words in events] == ["put", "claim", "expire", "claim"]


async def test_a_lease_that_is_shortened_wakes_who_waits_for_its_end(
    plane: ControlPlane, admin: Admin
) -> None:
    ids = (await plane.produce("p", write(2, ["x"]), soon())).ids
    first = await get(plane, 2, lease_s=60.0)
    waiter = asyncio.create_task(get(plane, 2))
    clients: Any = {}
    while not clients.get("blocked_clients"):
        clients = admin.info("clients")
        await asyncio.sleep(0.01)
    start = time.monotonic()
    await plane.renew("p", held_by(first), 0.3, soon(), ids=ids)
    found = await asyncio.wait_for(waiter, 20)
    assert time.monotonic() - start < WOKEN_S
    assert found.ids == ids


async def test_big_batches_of_two_that_compete(plane: ControlPlane, admin: Admin) -> None:
    """Each takes its batch in pieces; there are not enough samples for both."""
    for _ in range(3):
        await plane.produce("p", write(2500, ["x"]), soon())
    found = await asyncio.gather(*(claim(plane, 5000, lease_s=LONG_S) for _ in range(2)))
    (winner,) = [each for each in found if isinstance(each, Claimed)]
    (loser,) = [each for each in found if isinstance(each, NotEnough)]
    assert len(set(winner.ids)) == 5000
    waiter = asyncio.create_task(get(plane, 5000))
    await plane.produce("p", write(2500, ["x"]), soon())
    second = await asyncio.wait_for(waiter, 30)
    assert set(winner.ids).isdisjoint(second.ids)
    assert loser.ready < 5000
    for each in (winner, second):
        for held in dict.fromkeys(each.claims):
            assert held is not None
            ids = [i for i, by in zip(each.ids, each.claims, strict=True) if by == held]
            assert await plane.ack("p", held, ids, soon()) == []
    assert (await plane.summary("p", soon()))["consumed:t"] == 10_000
    Partition(admin, plane.keys.summary("p")).check()


async def test_an_acknowledgement_that_comes_too_late(plane: ControlPlane) -> None:
    """Between two others: one that has the sample now, and one that has done it."""
    (sample,) = (await plane.produce("p", write(1, ["x"]), soon())).ids
    frozen = [await get(plane, 1, lease_s=0.01) for _ in range(3)]
    last = await get(plane, 1)
    for each in frozen:
        assert await plane.ack("p", held_by(each), [sample], soon()) == [sample]
        assert await plane.renew("p", held_by(each), None, soon()) is None
        await plane.release("p", held_by(each), [sample], soon())
    assert "consumed:t" not in await plane.summary("p", soon())
    assert await plane.ack("p", held_by(last), [sample], soon()) == []
    for each in frozen:
        assert await plane.ack("p", held_by(each), [sample], soon()) == [sample]
    assert (await plane.summary("p", soon()))["consumed:t"] == 1


async def test_a_reset_that_is_half_way(plane: ControlPlane, admin: Admin) -> None:
    """Whoever holds samples of a later page has lost them: a typed answer, no failed script."""
    ids = (await plane.produce("p", write(8, ["x"]), soon())).ids
    held = [await get(plane, 4), await get(plane, 4)]
    arguments = {"task": "t", "after": 0, "upto": 0, "rows": 2}
    page = await plane._mutate("reset_consumption", "p", arguments, ResetReply, soon())
    assert (page.rows, page.done) == (2, False)
    for each in held:
        assert await plane.ack("p", held_by(each), each.ids, soon()) == each.ids
        await plane.release("p", held_by(each), each.ids, soon())
        assert await plane.renew("p", held_by(each), None, soon()) is None
    again = await get(plane, 2)
    assert again.ids == ids[:2]
    while not page.done:
        arguments |= {"after": page.after, "upto": page.upto}
        page = await plane._mutate("reset_consumption", "p", arguments, ResetReply, soon())
    assert await plane.ack("p", held_by(again), again.ids, soon()) == []
    assert (await get(plane, 6)).ids == ids[2:]
    Partition(admin, plane.keys.summary("p")).check()


async def test_a_reset_under_load(plane: ControlPlane, admin: Admin) -> None:
    """Consumers claim, acknowledge and give back while the task starts again, many times."""
    chance = random.Random(2)
    await plane.produce("p", write(400, ["x"]), soon())
    done = False

    async def consume() -> None:
        while not done:
            found = await claim(plane, chance.randint(1, 20), lease_s=LONG_S)
            if isinstance(found, Claimed):
                await chance.choice([plane.ack, plane.release])(
                    "p", held_by(found), found.ids, soon()
                )
            else:
                await asyncio.sleep(0.001)

    consumers = [asyncio.create_task(consume()) for _ in range(6)]
    for _ in range(20):
        await plane.reset_consumption("p", "t", soon())
    done = True
    await asyncio.gather(*consumers)
    Partition(admin, plane.keys.summary("p")).check()
    await plane.reset_consumption("p", "t", soon())
    assert (await claimed(plane, 400)).ids == list(range(1, 401))


async def test_a_draw_that_is_asked_for_again_with_other_fields(plane: ControlPlane) -> None:
    """Ranks that share a batch may read different fields, once its samples have them."""
    ids = (await plane.produce("p", write(3, ["x"]), soon())).ids
    await claimed(plane, 2, draw="0:0")
    with pytest.raises(NotReadyError) as caught:
        await claimed(plane, 2, fields="xy", draw="0:0")
    assert (caught.value.rows, caught.value.fields) == ((1, 2), ("y",))
    await plane.produce("p", write(1, ["y"], ids=ids[:1]), soon())
    with pytest.raises(NotReadyError) as caught:
        await claimed(plane, 2, fields="xy", draw="0:0")
    assert caught.value.rows == (2,)
    await plane.produce("p", write(1, ["y"], ids=ids[1:2]), soon())
    assert (await claimed(plane, 2, fields="xy", draw="0:0")).ids == ids[:2]


async def test_a_draw_whose_lease_ran_out_is_made_anew(plane: ControlPlane) -> None:
    """Not given out under a lease that is over, which the next consumer would break."""
    await plane.produce("p", write(4, ["x"]), soon())
    old = await claimed(plane, 2, lease_s=0.001, draw="0:0")
    await asyncio.sleep(0.01)
    new = await claimed(plane, 2, lease_s=LONG_S, draw="0:0")
    assert new.ids == old.ids
    assert held_by(new) != held_by(old)
    assert (await claimed(plane, 2, lease_s=LONG_S)).ids == [3, 4]
    assert await plane.ack("p", held_by(new), new.ids, soon()) == []
