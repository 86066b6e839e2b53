from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.control.build import claimed, handle, soon, write
from tests.control.state import Admin, dump
from tq_redis.control.freeze import Freeze
from tq_redis.control.packing import arguments
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Ready, Wanted
from tq_redis.deadline import Deadline
from tq_redis.errors import DeadlineError
from tq_redis.metadata import Claim

pytestmark = pytest.mark.asyncio

Call = Callable[[ControlPlane, list[int], Claim], Awaitable[Any]]

# Every call that writes in a partition; ids 0-3 are open, 4-7 are held.
WRITERS: dict[str, Call] = {
    "produce new": lambda plane, ids, claim: plane.produce("p", write(2, ["x"]), soon()),
    "produce a field": lambda plane, ids, claim: plane.produce(
        "p", write(8, ["y"], ids=ids), soon()
    ),
    "produce again": lambda plane, ids, claim: plane.produce("p", write(8, ["x"], ids=ids), soon()),
    "claim": lambda plane, ids, claim: claimed(plane, 2),
    "claim that must wait": lambda plane, ids, claim: plane.claim(
        "p", Wanted("t", ["x"], 100), "me", soon()
    ),
    "ready": lambda plane, ids, claim: plane.ready("p", Wanted("new", ["x"], 1), "me", soon()),
    "ack": lambda plane, ids, claim: plane.ack("p", claim, ids[4:6], soon()),
    "release": lambda plane, ids, claim: plane.release("p", claim, ids[4:6], soon()),
    "set_tags": lambda plane, ids, claim: plane.set_tags("p", ids[:1], [{"n": 1}], soon()),
    "reset": lambda plane, ids, claim: plane.reset_consumption("p", "t", soon()),
    "expect": lambda plane, ids, claim: plane.expect("p", 99, soon()),
    "end": lambda plane, ids, claim: plane.expect("p", None, soon()),
    "limit": lambda plane, ids, claim: plane.limit("p", "t", 99, "wait", soon()),
    "mark_lost": lambda plane, ids, claim: plane.mark_lost("p", ids, ["x"], ["gone"], soon()),
    "clear samples": lambda plane, ids, claim: plane.clear_samples("p", ids[:1], soon()),
    "clear partition": lambda plane, ids, claim: plane.clear_partition("p", soon()),
}


async def prepared(plane: ControlPlane) -> tuple[list[int], Claim]:
    ids = (await plane.produce("p", write(8, ["x"]), soon())).ids
    held = (await claimed(plane, 8, lease_s=60)).claims[0]
    assert isinstance(held, Claim)
    await plane.release("p", held, ids[:4], soon())
    return ids, held


@pytest.mark.parametrize("name", WRITERS)
async def test_a_call_that_writes_waits_and_then_does_it(
    plane: ControlPlane, admin: Admin, name: str
) -> None:
    ids, held = await prepared(plane)
    async with Freeze(plane) as freeze:
        assert await freeze.all(soon()) == ["p"]
        before = dump(admin, plane.keys.namespace)
        call = asyncio.ensure_future(WRITERS[name](plane, ids, held))
        # Two round trips of others: the call has been answered in between.
        for _ in range(2):
            await plane.describe("p", soon())
        assert not call.done()
        assert dump(admin, plane.keys.namespace) == before
        start = time.monotonic()
        await freeze.keep("p", soon())
        await call
        assert time.monotonic() - start < 2  # woken, though the hold might last longer
        await freeze.release("p", soon())


async def test_reading_goes_on(plane: ControlPlane) -> None:
    ids, _ = await prepared(plane)
    async with Freeze(plane) as freeze:
        await freeze.all(soon())
        assert (await plane.describe("p", Deadline(1))).ids == ids
        assert await plane.locate("p", ids, ["x"], Deadline(1))
        assert (await plane.summary("p", Deadline(1)))["samples"] == 8


async def test_a_call_waits_until_its_deadline_and_names_the_reason(plane: ControlPlane) -> None:
    await prepared(plane)
    async with Freeze(plane) as freeze:
        await freeze.all(soon())
        with pytest.raises(DeadlineError, match="'p' is being saved") as caught:
            await plane.produce("p", write(2, ["x"]), Deadline(0.2))
    assert (caught.value.partition, caught.value.deadline) == ("p", 0.2)
    assert (await plane.summary("p", soon()))["samples"] == 8


async def test_a_reply_that_was_lost_is_given_while_the_partition_is_frozen(
    plane: ControlPlane,
) -> None:
    """The call had run before; nothing is written by its repetition."""
    await prepared(plane)
    key = plane.keys.summary("p")
    once = {"request": "r", "request_ttl": 60, "idle_ttl": 1000, "samples": 99, "generation": 9}
    first = await plane.connection.run("expect", key, arguments(once), soon())
    async with Freeze(plane) as freeze:
        await freeze.all(soon())
        assert await plane.connection.run("expect", key, arguments(once), soon()) == first


async def test_the_undoing_of_a_cancelled_claim_waits(plane: ControlPlane) -> None:
    ids, _ = await prepared(plane)
    async with Freeze(plane) as freeze:
        await freeze.all(soon())
        call = asyncio.ensure_future(claimed(plane, 2))
        await plane.describe("p", soon())
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    standing = (await plane.ready("p", Wanted("t", ["x"], 4), "me", soon()))[0]
    assert isinstance(standing, Ready)
    assert standing.ids == ids[:4]


# Leases


async def test_leases_do_not_run_while_the_partition_is_frozen(plane: ControlPlane) -> None:
    await plane.produce("p", write(4, ["x"]), soon())
    held = await claimed(plane, 2, lease_s=1.5)
    async with Freeze(plane) as freeze:
        await freeze.all(soon())
        await asyncio.sleep(1.6)  # longer than the lease
        await freeze.keep("p", soon())
        other = asyncio.ensure_future(claimed(plane, 2))  # would take back what has run out
        assert (await other).ids == [3, 4]
        assert await plane.ack("p", one(held.claims), held.ids, soon()) == []


async def test_a_lease_that_is_renewed_meanwhile_runs_from_the_thaw_on(
    plane: ControlPlane,
) -> None:
    await plane.produce("p", write(2, ["x"]), soon())
    held = await claimed(plane, 2, lease_s=60)
    async with Freeze(plane) as freeze:
        await freeze.all(soon())
        assert await plane.renew("p", one(held.claims), 1, Deadline(2)) == 1
        await asyncio.sleep(1.1)
        await freeze.keep("p", soon())
        standing = await plane.ready("p", Wanted("t", ["x"], 2), "me", soon())
        retry = standing[1].retry_s
        assert retry is not None
        assert 0 < retry <= 1
    await asyncio.sleep(retry + 0.05)
    assert (await claimed(plane, 2)).ids == held.ids
    assert await plane.ack("p", one(held.claims), held.ids, soon()) == held.ids


async def test_the_clock_of_leases_counts_several_saves(plane: ControlPlane) -> None:
    await plane.produce("p", write(2, ["x"]), soon())
    held = await claimed(plane, 2, lease_s=1.2)
    for _ in range(3):
        async with Freeze(plane) as freeze:
            await freeze.all(soon())
            await asyncio.sleep(0.5)
    assert await plane.ack("p", one(held.claims), held.ids, soon()) == []


# Bytes


async def test_bytes_that_are_cleared_or_replaced_wait_for_the_save(plane: ControlPlane) -> None:
    put = write(4, ["x"])
    ids = (await plane.produce("p", put, soon())).ids
    later = write(4, ["x"])
    other = (await plane.produce("p", later, soon())).ids
    async with Freeze(plane) as freeze:
        await freeze.all(soon())
        await freeze.keep("p", soon())
        assert (await plane.produce("p", write(4, ["x"], ids=ids), soon())).freed == []
        assert await plane.clear_samples("p", other, soon()) == []
        assert set(await plane.freed("p", soon())) == {handle(put), handle(later)}
        assert await plane.clear_partition("p", soon()) == []
        assert await plane.partitions(soon()) == []
        (generation,) = await plane.trashes("p", soon())
        # Made anew under the same name, it is not part of the save, and its bytes wait as well.
        again = write(2, ["x"])
        await plane.produce("p", again, soon())
        assert await plane.clear_partition("p", soon()) == []
        assert len(await plane.trashes("p", soon())) == 2
        await freeze.release("p", soon())
    assert handle(put) in await plane.trash("p", generation, soon())
    assert len(await plane.clear_partition("p", soon())) == 2


async def test_a_partition_that_was_cleared_leaves_nothing_of_the_save(
    plane: ControlPlane, admin: Admin
) -> None:
    await plane.produce("p", write(2, ["x"]), soon())
    async with Freeze(plane) as freeze:
        await freeze.all(soon())
        await freeze.keep("p", soon())
        await plane.clear_partition("p", soon())
        await freeze.release("p", soon())
    for generation in await plane.trashes("p", soon()):
        await plane.empty_trash("p", generation, soon())
    assert dump(admin, plane.keys.namespace) == {}


# Several saves, and saves that die


async def test_a_save_that_died_holds_up_nobody_for_long(plane: ControlPlane) -> None:
    await plane.produce("p", write(2, ["x"]), soon())
    held = await claimed(plane, 1, lease_s=1.5)
    assert (await plane.freeze("p", "dead", "all", 1.6, soon(), first=True)).code == "ok"
    start = time.monotonic()
    await plane.produce("p", write(2, ["x"]), soon())
    assert 1 < time.monotonic() - start < 4
    # The time for which it was frozen is not the consumer's.
    assert await plane.ack("p", one(held.claims), held.ids, soon()) == []
    assert (await plane.freeze("p", "dead", "all", 60, soon())).code == "lost"
    assert (await plane.freeze("p", "dead", "keep", 60, soon())).code == "lost"
    await plane.produce("p", write(2, ["x"]), Deadline(1))


async def test_one_save_waits_for_the_other(plane: ControlPlane) -> None:
    for name in ("a", "b"):
        await plane.produce(name, write(2, ["x"]), soon())
    async with Freeze(plane) as one_save:
        await one_save.all(soon())

        async def save() -> list[str]:
            async with Freeze(plane) as other:
                return await other.all(soon())

        saving = asyncio.ensure_future(save())
        for name in ("a", "b"):
            await one_save.keep(name, soon())
        await plane.describe("a", soon())
        assert not saving.done()
    assert await saving == ["a", "b"]


async def test_many_saves_at_once_all_come_to_an_end(plane: ControlPlane) -> None:
    for name in "abcd":
        await plane.produce(name, write(2, ["x"]), soon())

    async def save() -> None:
        async with Freeze(plane) as freeze:
            for name in await freeze.all(soon()):
                await freeze.keep(name, soon())
                await freeze.release(name, soon())

    await asyncio.gather(*(save() for _ in range(8)))


async def test_a_save_waits_for_no_longer_than_its_deadline(plane: ControlPlane) -> None:
    await plane.produce("p", write(2, ["x"]), soon())
    async with Freeze(plane) as one_save, Freeze(plane) as other:
        await one_save.all(soon())
        with pytest.raises(DeadlineError, match="'p' is being saved"):
            await other.all(Deadline(0.2))


async def test_steps_may_be_sent_twice_and_late(plane: ControlPlane) -> None:
    """Redis's reply was lost, or the command came late: behind a later one."""
    await plane.produce("p", write(2, ["x"]), soon())

    async def step(level: Any, *, first: bool = False) -> str:
        return (await plane.freeze("p", "me", level, 60, soon(), first=first)).code

    for _ in range(2):
        assert await step("all", first=True) == "ok"
    for _ in range(2):
        assert await step("keep") == "ok"
    assert await step("all") == "ok"
    await plane.produce("p", write(2, ["x"]), Deadline(1))  # not frozen again
    for _ in range(2):
        assert await step("none") == "ok"
    assert await step("keep") == "lost"


async def test_partitions_that_are_made_meanwhile_are_held_as_well(plane: ControlPlane) -> None:
    """Nothing that happened before the last one stood still is missing."""
    await plane.produce("a", write(2, ["x"]), soon())
    making = True

    async def make() -> int:
        made = 0
        while making and made < 200:
            await plane.produce(f"n{made:03d}", write(1, ["x"]), soon())
            made += 1
        return made

    maker = asyncio.ensure_future(make())
    async with Freeze(plane) as freeze:
        held = await freeze.all(soon())
        assert set(await plane.partitions(soon())) >= set(held)
    making = False
    made = await maker
    assert held == ["a", *(f"n{number:03d}" for number in range(len(held) - 1))]
    assert len(held) - 1 <= made
    for name in await plane.partitions(soon()):
        await plane.clear_partition(name, soon())


async def test_a_partition_that_is_not_there(plane: ControlPlane) -> None:
    reply = await plane.freeze("p", "me", "all", 60, soon(), first=True)
    assert reply.code == "no_partition"
    async with Freeze(plane) as freeze:
        assert await freeze.all(soon()) == []


def one(claims: list[Claim | None]) -> Claim:
    (claim,) = set(claims)
    assert claim is not None
    return claim
