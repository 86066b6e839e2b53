from __future__ import annotations

import asyncio
import random
import uuid
from typing import Any

import pytest

from tests.conftest import WaitUntil
from tests.control.build import claim, claimed, handle, soon, write
from tests.control.state import Admin, dump
from tq_redis.control import limits
from tq_redis.control.limits import WhenFull
from tq_redis.control.plane import ControlPlane, NotAdmittedError
from tq_redis.control.records import Admission, Claimed, Full, Write
from tq_redis.control.replies import AdmitReply
from tq_redis.deadline import Deadline
from tq_redis.errors import InputError, PartitionEndedError
from tq_redis.metadata import Claim

pytestmark = pytest.mark.asyncio


async def admit(plane: ControlPlane, put: str, rows: int, lifetime_s: float = 60) -> Admission:
    return await plane.admit("p", put, rows, lifetime_s, soon())


async def has_room(plane: ControlPlane, rows: int) -> bool:
    """Whether a put would be let; it leaves nothing."""
    found = await admit(plane, "probe", rows)
    plane.dismiss("p", "probe")
    await undone(plane)
    return found.full is None


async def undone(plane: ControlPlane) -> None:
    while plane._undoing:
        await asyncio.wait(plane._undoing)


async def put(plane: ControlPlane, rows: int, **columns: Any) -> tuple[list[int], Write]:
    """New rows as a client makes them."""
    name = uuid.uuid4().hex
    admission = await admit(plane, name, rows)
    assert admission.full is None, admission
    entry = write(rows, ["x"], **columns).within(name)
    return (await plane.produce("p", entry, soon())).ids, entry


async def unconsumed(plane: ControlPlane, task: str = "t") -> int:
    found = await plane.summary("p", soon())
    counts = [found.get(f"{name}:{task}", 0) for name in ("consumed", "set_aside")]
    return int(found["samples"]) - sum(map(int, counts))


async def test_without_a_limit_nobody_has_to_ask(plane: ControlPlane, admin: Admin) -> None:
    assert await admit(plane, "put", 9) == Admission(False, None, [])
    assert dump(admin, plane.keys.namespace) == {}
    await plane.produce("p", write(9, ["x"]), soon())
    assert await admit(plane, "put", 9) == Admission(False, None, [])


async def test_new_rows_need_room(plane: ControlPlane, admin: Admin) -> None:
    await plane.limit("p", "t", 8, "wait", soon())
    before = dump(admin, plane.keys.namespace)
    for entry in (write(2, ["x"]), write(2, keys=["a", "b"]), write(2, ["x"]).within("other")):
        with pytest.raises(NotAdmittedError):
            await plane.produce("p", entry, soon())
    assert dump(admin, plane.keys.namespace) == before


async def test_columns_of_rows_that_exist_do_not(plane: ControlPlane) -> None:
    ids = (await plane.produce("p", write(4, ["x"], keys=list("abcd")), soon())).ids
    await plane.limit("p", "t", 2, "wait", soon())
    await plane.produce("p", write(4, ["y"], ids=ids), soon())
    await plane.produce("p", write(4, ["z"], keys=list("dcba")), soon())
    with pytest.raises(NotAdmittedError):
        await plane.produce("p", write(2, ["x"], keys=["a", "new"]), soon())


async def test_room_is_kept_for_all_steps_of_a_put(plane: ControlPlane) -> None:
    await plane.limit("p", "t", 8, "wait", soon())
    await admit(plane, "put", 6)
    for rows in (2, 3):
        assert not await has_room(plane, 3)
        await plane.produce("p", write(rows, ["x"]).within("put"), soon())
    with pytest.raises(NotAdmittedError):
        await plane.produce("p", write(2, ["x"]).within("put"), soon())
    await plane.produce("p", write(1, ["x"]).within("put"), soon())
    assert await has_room(plane, 2)
    with pytest.raises(NotAdmittedError):
        await plane.produce("p", write(1, ["x"]).within("put"), soon())


async def test_what_counts(plane: ControlPlane) -> None:
    """Rows that the task has not consumed, whoever holds them, but for those set aside."""
    await plane.limit("p", "t", 8, "wait", soon())
    ids, _ = await put(plane, 6)
    await put(plane, 2)
    assert await admit(plane, "put", 1) == Admission(
        True, Full("t", 8, 8, 0, (await last_event(plane)), None), []
    )
    held = await claimed(plane, 4, lease_s=60, max_deliveries=1)
    full = (await admit(plane, "put", 1)).full
    assert full is not None
    assert (full.unconsumed, full.held) == (8, 4)
    await claimed(plane, 4, task="other")
    assert not await has_room(plane, 1)
    (number,) = set(held.claims)
    assert number is not None
    await plane.ack("p", number, ids[:2], soon())
    assert await has_room(plane, 2)
    await plane.release("p", number, ids[2:3], soon())  # it is set aside
    assert await has_room(plane, 3)
    await claimed(plane, 2)
    assert await has_room(plane, 5)
    await plane.clear_samples("p", [*ids[:2], *ids[3:4]], soon())
    assert await has_room(plane, 6)
    assert not await has_room(plane, 7)
    await plane.reset_consumption("p", "t", soon())
    assert not await has_room(plane, 6)


async def last_event(plane: ControlPlane) -> str:
    found = await claim(plane, 99, task="nobody")
    return str(getattr(found, "event", ""))


async def test_the_smallest_limit_decides(plane: ControlPlane) -> None:
    await plane.limit("p", "t", 8, "wait", soon())
    await plane.limit("p", "u", 4, "wait", soon())
    await put(plane, 4)
    full = (await admit(plane, "put", 2)).full
    assert full is not None
    assert (full.task, full.limit) == ("u", 4)
    await claimed(plane, 4, task="u")
    assert await has_room(plane, 4)


async def test_what_can_never_be_let_is_refused(plane: ControlPlane, admin: Admin) -> None:
    await plane.limit("p", "t", 8, "evict", soon())
    await plane.expect("p", 10, soon())
    before = dump(admin, plane.keys.namespace)
    with pytest.raises(InputError, match="9 new samples is more than the 8 that task 't'"):
        await admit(plane, "put", 9)
    await plane.limit("p", "t", 80, "evict", soon())
    with pytest.raises(PartitionEndedError, match="expects 10 samples"):
        await admit(plane, "put", 11)
    await plane.limit("p", "t", 8, "evict", soon())
    found = dump(admin, plane.keys.namespace)
    assert {key for key in found if not key.endswith(":events")} == {
        key for key in before if not key.endswith(":events")
    }
    await plane.expect("p", None, soon())
    with pytest.raises(PartitionEndedError, match="has ended"):
        await admit(plane, "put", 1)


async def test_room_comes_back(plane: ControlPlane, wait_until: WaitUntil) -> None:
    """When its put gives it up, or has died."""
    await plane.limit("p", "t", 8, "wait", soon())
    await admit(plane, "put", 8)
    full = (await admit(plane, "other", 1)).full
    assert full is not None
    assert full.retry_s is not None
    assert 50 < full.retry_s <= 60
    waiting = asyncio.create_task(plane.wait_for_room("p", full.event, soon()))
    plane.dismiss("p", "put")
    await asyncio.wait_for(waiting, 4)
    assert (await admit(plane, "dies", 8, lifetime_s=0.1)).full is None
    full = (await admit(plane, "other", 1)).full
    assert full is not None
    assert full.retry_s is not None
    await plane.wait_for_room("p", full.event, Deadline(full.retry_s + 0.01))
    assert (await admit(plane, "other", 8)).full is None
    with pytest.raises(NotAdmittedError):
        await plane.produce("p", write(1, ["x"]).within("dies"), soon())


async def test_a_put_that_was_refused_and_tries_again_is_not_taken_for_a_replay(
    plane: ControlPlane,
) -> None:
    await plane.limit("p", "t", 4, "wait", soon())
    await put(plane, 4)

    async def send() -> AdmitReply:
        arguments = {"put": "put", "rows": 4, "lifetime": 60_000, "cells": 99}
        return await plane._mutate("admit", "p", arguments, AdmitReply, soon(), request="r")

    assert (await send()).code == "full"
    await claimed(plane, 4)
    assert (await send()).code == "ok"
    await plane.produce("p", write(4, ["x"]).within("put"), soon())
    assert (await send()).code == "ok"  # that is one: nothing is kept
    assert await unconsumed(plane) == 4
    with pytest.raises(NotAdmittedError):
        await plane.produce("p", write(1, ["x"]).within("put"), soon())


# Making room


async def test_the_oldest_make_room(plane: ControlPlane) -> None:
    ids = (await plane.produce("p", write(6, ["x"], keys=list("abcdef")), soon())).ids
    one = await plane.produce("p", write(1, ["x"]), soon())
    await plane.limit("p", "t", 8, "evict", soon())
    await claimed(plane, 2, lease_s=60)
    found = await admit(plane, "put", 4)
    assert (found.full, found.freed) == (None, [])  # the block has other rows
    assert await plane.evicted("p", "t", soon()) == ids[2:5]
    rows = await plane.describe("p", soon(), task="t")
    assert rows.ids == [*ids[:2], ids[5], *one.ids]
    assert (await plane.summary("p", soon()))["evicted:t"] == 3
    new = await plane.produce("p", write(4, ["x"]).within("put"), soon())
    assert (await claimed(plane, 6)).ids == [ids[5], *one.ids, *new.ids]


async def test_the_bytes_of_what_made_room_are_freed(plane: ControlPlane) -> None:
    await plane.limit("p", "t", 4, "evict", soon())
    _, first = await put(plane, 2)
    await put(plane, 2)
    assert (await admit(plane, "put", 2)).freed == [handle(first)]


async def test_what_consumers_hold_is_not_evicted(plane: ControlPlane, admin: Admin) -> None:
    """Nor is anything else where that would not help."""
    await plane.limit("p", "t", 8, "evict", soon())
    ids, _ = await put(plane, 8)
    held = await claimed(plane, 6, lease_s=60)
    await admit(plane, "kept", 1)
    before = {k: v for k, v in dump(admin, plane.keys.namespace).items() if ":ready:" not in k}
    full = (await admit(plane, "put", 2)).full
    assert full is not None
    assert (full.unconsumed, full.held) == (7, 6)
    assert dump(admin, plane.keys.namespace).items() >= before.items()
    (number,) = set(held.claims)
    assert isinstance(number, Claim)
    await plane.ack("p", number, ids[:1], soon())
    assert (await admit(plane, "put", 2)).full is None


async def test_groups_go_as_a_whole(plane: ControlPlane) -> None:
    groups = ["a", "b", "a", "b", "a", "c"]
    ids = (await plane.produce("p", write(6, ["x"], groups=groups), soon())).ids
    single = (await plane.produce("p", write(2, ["x"]), soon())).ids
    late = (await plane.produce("p", write(1, groups=["a"]), soon())).ids
    await plane.limit("p", "t", 9, "evict", soon())
    await admit(plane, "one", 1)
    assert await plane.evicted("p", "t", soon()) == sorted([ids[0], ids[2], ids[4], *late])
    await admit(plane, "other", 6)
    assert (await plane.describe("p", soon())).ids == single
    assert await plane.evicted("p", "t", soon()) == sorted([*ids, *late])


@pytest.mark.parametrize("seed", range(3))
async def test_many_rows_make_room_in_several_steps(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Groups whose rows lie among each other, indexes that are built in pieces."""
    monkeypatch.setattr(limits, "CELLS_PER_CLEAR", 60)
    chance = random.Random(seed)
    names = [f"g{row % 10}" for row in range(40)]
    chance.shuffle(names)
    ids = (await plane.produce("p", write(40, ["x", "y"], groups=names), soon())).ids
    members = {name: [i for i, g in zip(ids, names, strict=True) if g == name] for name in names}
    await plane.limit("p", "t", 40, "evict", soon())
    assert (await admit(plane, "put", 21)).full is None
    left = (await plane.describe("p", soon(), groups=True)).groups
    assert {name: left.count(name) for name in left} == dict.fromkeys(left, 4)
    kept = sorted(members.values(), key=lambda group: group[0])[-len(left) // 4 :]
    assert (await plane.describe("p", soon())).ids == sorted(i for group in kept for i in group)
    assert 16 <= len(left) <= 19


async def test_two_tasks_of_different_minds(plane: ControlPlane) -> None:
    """One that waits is waited for before anything of the other's is cleared."""
    await plane.limit("p", "t", 4, "evict", soon())
    await plane.limit("p", "u", 6, "wait", soon())
    ids, _ = await put(plane, 4)
    full = (await admit(plane, "put", 3)).full
    assert full is not None
    assert full.task == "u"
    assert await plane.evicted("p", "t", soon()) == []
    await plane.limit("p", "u", 5, "evict", soon())
    assert (await admit(plane, "put", 3)).full is None
    assert (
        sorted(await plane.evicted("p", "t", soon()) + await plane.evicted("p", "u", soon()))
        == (ids[:3])
    )


async def test_the_list_of_what_made_room_is_bounded(plane: ControlPlane, admin: Admin) -> None:
    await plane.limit("p", "t", 1, "evict", soon())
    await put(plane, 1)
    key = plane.keys.evicted("p")
    admin.zadd(key, {f"other:{number}": -number for number in range(5000)})
    admin.expire(key, 100)
    ids, _ = await put(plane, 1)
    assert admin.zcard(key) == 4096
    assert await plane.evicted("p", "t", soon()) == [ids[0] - 1]
    admin.delete(key)


# Always


@pytest.mark.parametrize("when_full", ["wait", "evict"])
@pytest.mark.parametrize("seed", range(4))
async def test_no_more_than_the_limit_is_ever_there(
    plane: ControlPlane, admin: Admin, when_full: WhenFull, seed: int
) -> None:
    """Whatever producers and consumers do, in any order; and nobody is kept out for nothing."""
    chance, size = random.Random(seed), 12
    await plane.limit("p", "t", size, when_full, soon())
    kept: dict[str, int] = {}
    holds: list[tuple[Claim, list[int]]] = []
    for step in range(120):
        action = chance.choice(["admit", "admit", "make", "make", "claim", "ack", "clear"])
        name = f"put{step}"
        if action == "admit":
            rows = chance.randint(1, 6)
            held = sum(len(ids) for _, ids in holds) if when_full == "evict" else None
            room = (
                size - sum(kept.values()) - (held if held is not None else await unconsumed(plane))
            )
            found = await admit(plane, name, rows)
            assert (found.full is None) == (rows <= room)
            if found.full is None:
                kept[name] = rows
        elif action == "make" and kept:
            name = chance.choice(sorted(kept))
            rows = chance.randint(1, kept[name])
            groups = ["g", "h", "i", "j", "k", "l"][:rows] if chance.random() < 0.3 else None
            await plane.produce("p", write(rows, ["x"], groups=groups).within(name), soon())
            kept[name] -= rows
            kept = {name: rows for name, rows in kept.items() if rows}
        elif action == "claim":
            lease = chance.choice([None, 60.0])
            got = await claim(plane, chance.randint(1, 4), lease_s=lease)
            if lease and isinstance(got, Claimed):
                (number,) = set(got.claims)
                assert number is not None
                holds.append((number, got.ids))
        elif action == "ack" and holds:
            number, ids = holds.pop(chance.randrange(len(holds)))
            assert await plane.ack("p", number, ids, soon()) == []
        elif action == "clear":
            ids = (await plane.describe("p", soon(), task="t")).ids
            held_ids = {sample for _, each in holds for sample in each}
            free = [sample for sample in ids if sample not in held_ids]
            await plane.clear_samples("p", free[: chance.randint(0, 2)], soon())
        assert await unconsumed(plane) + sum(kept.values()) <= size
    texts: Any = admin.hvals(f"{plane.keys.summary('p')}:admitted")
    assert sum(int(text.partition(":")[0]) for text in texts) == sum(kept.values())
