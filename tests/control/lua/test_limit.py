from __future__ import annotations

import asyncio

import pytest

from tests.control.build import claim, soon, write
from tests.control.state import Admin, dump
from tq_redis.control.limits import WhenFull
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Wanted
from tq_redis.control.standing import TaskLimit, standing_of
from tq_redis.errors import InputError

pytestmark = pytest.mark.asyncio


async def limits(plane: ControlPlane) -> dict[str, TaskLimit | None]:
    found = await standing_of(plane, "p", soon())
    return {task: state.limit for task, state in found.tasks.items()}


async def test_every_task_may_have_one(plane: ControlPlane) -> None:
    await plane.produce("p", write(4, ["x"]), soon())
    await plane.limit("p", "t {1}", 8, "wait", soon())
    await plane.limit("p", "u", 2, "evict", soon())
    assert await limits(plane) == {"t {1}": TaskLimit(8, "wait"), "u": TaskLimit(2, "evict")}
    await plane.limit("p", "u", 3, "wait", soon())
    await plane.limit("p", "t {1}", None, "wait", soon())
    assert await limits(plane) == {"u": TaskLimit(3, "wait")}
    await plane.limit("p", "u", None, "wait", soon())
    assert "limits" not in await plane.summary("p", soon())


async def test_a_partition_may_begin_with_it(plane: ControlPlane) -> None:
    await plane.limit("p", "t", 8, "wait", soon())
    assert await plane.partitions(soon()) == ["p"]
    first = (await plane.summary("p", soon()))["generation"]
    await plane.clear_partition("p", soon())
    await plane.limit("p", "t", 8, "wait", soon())
    assert (await plane.summary("p", soon()))["generation"] != first


async def test_lifting_one_that_is_not_there_does_nothing(
    plane: ControlPlane, admin: Admin
) -> None:
    await plane.limit("p", "t", None, "wait", soon())
    assert dump(admin, plane.keys.namespace) == {}


@pytest.mark.parametrize("when_full", ["wait", "evict"])
async def test_no_consumer_is_left_waiting_for_more_than_that(
    plane: ControlPlane, admin: Admin, when_full: WhenFull
) -> None:
    await plane.produce("p", write(4, ["x"]), soon())
    await claim(plane, 8, consumer="host:1", waiter=("w", 60))
    await claim(plane, 9, task="u", waiter=("v", 60))
    await claim(plane, 9, waiter=("gone", -1))
    before = dump(admin, plane.keys.namespace)
    with pytest.raises(InputError, match="to 7 samples .* consumer 'host:1' waits for 8"):
        await plane.limit("p", "t", 7, when_full, soon())
    assert dump(admin, plane.keys.namespace) == before
    await plane.limit("p", "t", 8, when_full, soon())


async def test_a_consumer_is_told_the_limit(plane: ControlPlane) -> None:
    await plane.produce("p", write(4, ["x"]), soon())
    found = await claim(plane, 8)
    assert getattr(found, "limit", 0) is None
    await plane.limit("p", "t", 6, "wait", soon())
    found = await claim(plane, 8)
    assert getattr(found, "limit", 0) == 6
    _, standing = await plane.ready("p", Wanted("t", ["x"], 8), "me", soon())
    assert standing.limit == 6


async def test_it_is_news_to_those_who_wait(plane: ControlPlane) -> None:
    await plane.produce("p", write(4, ["x"]), soon())
    found = await claim(plane, 8)
    waits = [plane.wait, plane.wait_for_room]
    calls = [asyncio.create_task(wait("p", found.event, soon())) for wait in waits]  # type: ignore[union-attr]
    await plane.limit("p", "t", 6, "wait", soon())
    await asyncio.wait_for(asyncio.gather(*calls), 4)
