from __future__ import annotations

import uuid

import pytest

from tests.control import build
from tests.control.build import claimed, handle, soon, write
from tests.control.state import Admin, Partition, dump
from tq_redis.control.keys import index_name
from tq_redis.control.packing import arguments
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Claimed, NotEnough, Write
from tq_redis.control.replies import ClaimReply, decode
from tq_redis.metadata import FieldSchema

pytestmark = pytest.mark.asyncio


async def claim(
    plane: ControlPlane, count: int, *, task: str = "t", fields: str = "x", group_size: int = 0
) -> list[int] | NotEnough:
    """Ids of a claim of the fields named by one letter each."""
    found = await build.claim(plane, count, task=task, fields=fields, group_size=group_size)
    return found.ids if isinstance(found, Claimed) else found


async def ready(plane: ControlPlane, *, fields: str = "x", group_size: int = 0) -> tuple[int, int]:
    """Samples and groups that could be claimed."""
    found = await claim(plane, 2000, fields=fields, group_size=group_size)
    assert isinstance(found, NotEnough)
    return found.ready, found.groups


async def test_lowest_ids_first_and_exactly_as_many_as_asked_for(plane: ControlPlane) -> None:
    ids = (await plane.produce("p", write(10, ["x"]), soon())).ids
    assert await claim(plane, 4) == ids[:4]
    assert await claim(plane, 5) == ids[4:9]
    found = await claim(plane, 2)
    assert isinstance(found, NotEnough)
    assert (found.exists, found.ready) == (True, 1)
    assert await claim(plane, 1) == ids[9:]
    assert (await plane.summary("p", soon()))["consumed:t"] == 10


async def test_every_task_gets_every_sample(plane: ControlPlane) -> None:
    ids = (await plane.produce("p", write(4, ["x"]), soon())).ids
    for task in ("actor", "critic"):
        assert await claim(plane, 4, task=task) == ids
    rows = await plane.describe("p", soon(), fields=(), task="actor")
    assert rows.states == ["consumed"] * 4


async def test_the_consumer_is_on_record(plane: ControlPlane, admin: Admin) -> None:
    await plane.produce("p", write(2, ["x"]), soon())
    await claimed(plane, 1, consumer="host:1")
    await claimed(plane, 1, consumer="host:2")
    taken = admin.hgetall(f"{plane.keys.summary('p')}:task:t")
    assert taken == {"1": "consumed:1:host%3A1", "2": "consumed:2:host%3A2"}


async def test_a_claim_says_what_the_rows_are(plane: ControlPlane) -> None:
    form = {"y": FieldSchema("jagged", "int64", (-1,)), "x": FieldSchema("object")}
    put = write(2, ["y", "x"], tags=[{"a": 1}, {"b": {"c": [None]}}])
    await plane.produce("p", Write(2, blocks=put.blocks, schema=form, tags=put.tags), soon())
    found = await claimed(plane, 2, fields="yx")
    assert found.schema == form
    assert found.tags == [{"a": 1}, {"b": {"c": [None]}}]


async def test_a_partition_that_does_not_exist(plane: ControlPlane, admin: Admin) -> None:
    found = await claim(plane, 1)
    assert found == NotEnough(exists=False, ready=0, groups=0, event="0-0")
    assert dump(admin, plane.keys.namespace) == {}


async def test_without_fields_every_row_may_be_claimed(plane: ControlPlane) -> None:
    assert (await plane.produce("p", Write(2), soon())).ids == [1, 2]
    assert await claim(plane, 1, fields="") == [1]
    await plane.produce("p", Write(1), soon())
    await plane.produce("p", write(1, ["x"]), soon())
    assert await claim(plane, 3, fields="") == [2, 3, 4]


async def test_rows_written_again_are_not_claimed_again(plane: ControlPlane) -> None:
    ids = (await plane.produce("p", write(3, ["x"]), soon())).ids
    assert await claim(plane, 2) == ids[:2]
    await plane.produce("p", write(3, ["x"], ids=ids), soon())
    assert await ready(plane) == (1, 0)


async def test_one_task_may_ask_for_different_fields(plane: ControlPlane, admin: Admin) -> None:
    """Each way of asking has an index of its own, built once; consumption is the task's."""
    ids = (await plane.produce("p", write(6, ["x"]), soon())).ids
    await plane.produce("p", write(4, ["y"], ids=ids[2:]), soon())
    assert await claim(plane, 1, fields="xy") == [3]
    assert await claim(plane, 3, fields="x") == [1, 2, 4]
    indexes = f"{plane.keys.summary('p')}:indexes"
    before = admin.hgetall(indexes)
    assert await ready(plane, fields="xy") == (2, 0)
    assert await ready(plane, fields="x") == (2, 0)
    assert await claim(plane, 2, fields="yx") == [5, 6]
    assert await ready(plane, fields="x") == (0, 0)
    assert admin.hgetall(indexes) == before
    assert set(before) == {"t:0:x", "t:0:x|y"}


async def test_indexes_of_one_task_do_not_undo_each_other(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two consumers that ask differently, on a partition that takes many steps to index."""
    monkeypatch.setattr("tq_redis.control.asking._CELLS_PER_BUILD", 6)
    ids = (await plane.produce("p", write(20, ["x", "y"]), soon())).ids
    done: set[str] = set()
    for number in range(10):
        for field in ("x", "y"):
            values = step_of_a_claim([field], request=f"{field}{number}")
            raw = await plane.connection.run("claim", plane.keys.summary("p"), values, soon())
            if decode(raw, ClaimReply).code != "again":
                done.add(field)
    assert done == {"x", "y"}
    assert await claim(plane, 20) == ids


def step_of_a_claim(fields: list[str], request: str, group_size: int = 0) -> bytes:
    """One claim of too many rows, that may index three of those that may lack the field."""
    return arguments(
        {
            "request": request,
            "request_ttl": 60,
            "idle_ttl": 1000,
            "task": "t",
            "fields": fields,
            "count": 8000,
            "need": 8000,
            "lease": 0,
            "limit": 5,
            "group_size": group_size,
            "index": index_name("t", group_size, fields),
            "consumer": "me",
            "cells": 27 if group_size else 9,
        }
    )


async def test_what_all_samples_have_is_looked_up_for_none(plane: ControlPlane) -> None:
    """The nine cells of a step are four rows, however many fields these have."""
    fields = "abcdefgh"

    async def step(number: int) -> str:
        values = step_of_a_claim(list(fields), f"r{number}")
        raw = await plane.connection.run("claim", plane.keys.summary("p"), values, soon())
        return decode(raw, ClaimReply).code

    ids = (await plane.produce("p", write(7, list(fields)), soon())).ids
    assert [await step(number) for number in range(2)] == ["again", "short"]
    await plane.produce("p", write(1, ["a"]), soon())
    assert await claim(plane, 7, fields=fields) == ids


@pytest.mark.parametrize("group_size", [0, 1])
async def test_rows_may_change_while_an_index_is_built(
    plane: ControlPlane, admin: Admin, group_size: int
) -> None:
    async def put(count: int, field: str) -> list[int]:
        groups = [uuid.uuid4().hex for _ in range(count)]
        return (await plane.produce("p", write(count, [field], groups=groups), soon())).ids

    async def step(number: int) -> str:
        values = step_of_a_claim(["x"], f"r{number}", group_size)
        raw = await plane.connection.run("claim", plane.keys.summary("p"), values, soon())
        Partition(admin, plane.keys.summary("p")).check()
        return decode(raw, ClaimReply).code

    ids, late = await put(10, "x"), await put(2, "y")
    assert await step(1) == "again"
    await plane.clear_samples("p", [ids[1], ids[8]], soon())
    await plane.produce("p", write(2, ["x"], ids=late), soon())
    assert await step(2) == "again"
    more = await put(3, "x")
    await plane.produce("p", write(1, ["x"], ids=ids[:1]), soon())
    codes = [await step(number) for number in range(3, 8)]
    assert codes[-1] == "short"
    left = [sample for sample in ids if sample not in (ids[1], ids[8])]
    assert await claim(plane, len(left) + 5, group_size=group_size) == left + late + more


@pytest.mark.parametrize("group_size", [0, 4])
async def test_an_index_in_many_steps(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, group_size: int
) -> None:
    monkeypatch.setattr("tq_redis.control.asking._CELLS_PER_BUILD", 12)
    groups = [f"g{i % 5}" for i in range(20)]
    await plane.produce("p", write(20, ["x"], groups=groups), soon())
    got = await claim(plane, 20, group_size=group_size)
    assert isinstance(got, list)
    assert sorted(got) == list(range(1, 21))


# Groups


async def test_only_whole_groups(plane: ControlPlane) -> None:
    """Ready are all four of one group and seven rows of others: the one group is taken."""
    groups = ["a", "b", "c", "a", "b", "c", "a", "b", "c", "d", "a"]
    ids = (await plane.produce("p", write(11, ["x"], groups=groups), soon())).ids
    whole = [sample for sample, group in zip(ids, groups, strict=True) if group == "a"]
    assert await ready(plane, group_size=4) == (11, 1)
    assert await claim(plane, 4, group_size=4) == whole
    assert await ready(plane, group_size=4) == (7, 0)


async def test_groups_come_one_after_the_other_by_their_first_row(plane: ControlPlane) -> None:
    groups = ["b", "a", "c", "a", "b", "c"]
    await plane.produce("p", write(6, ["x"], groups=groups), soon())
    assert await claim(plane, 6, group_size=2) == [1, 5, 2, 4, 3, 6]


async def test_a_group_may_grow_over_several_puts(plane: ControlPlane) -> None:
    assert await claim(plane, 2, group_size=2) == NotEnough(
        exists=False, ready=0, groups=0, event="0-0"
    )
    one = await plane.produce("p", write(1, ["x"], groups=["g"]), soon())
    assert await ready(plane, group_size=2) == (1, 0)
    two = await plane.produce("p", write(1, ["y"], groups=["g"]), soon())
    assert await ready(plane, group_size=2) == (1, 0)
    await plane.produce("p", write(1, ["x"], ids=two.ids), soon())
    assert await claim(plane, 2, group_size=2) == one.ids + two.ids


async def test_a_group_of_more_samples_than_a_claim_takes(plane: ControlPlane) -> None:
    """No sample is given out that is not ready, and none is left for ever."""
    await plane.produce("p", write(4, ["x"], groups=["g"] * 4), soon())
    unready = await plane.produce("p", write(5, ["y"], groups=["g"] * 5), soon())
    await plane.produce("p", write(2, ["x"], groups=["h", "h"]), soon())
    assert await ready(plane, group_size=2) == (6, 3)
    assert await claim(plane, 2, group_size=2) == [1, 2]
    await plane.produce("p", write(5, ["x"], ids=unready.ids), soon())
    assert await ready(plane, group_size=2) == (9, 4)
    got = await claim(plane, 8, group_size=2)
    assert isinstance(got, list)
    assert sorted(got) == [3, 4, 5, 6, 7, 8, 10, 11]
    assert await ready(plane, group_size=2) == (1, 0)


async def test_groups_of_another_size_and_single_samples_share_consumption(
    plane: ControlPlane,
) -> None:
    await plane.produce("p", write(8, ["x"], groups=["g"] * 4 + ["h"] * 4), soon())
    assert await ready(plane, group_size=2) == (8, 4)
    assert await ready(plane, group_size=4) == (8, 2)
    assert await claim(plane, 1) == [1]
    assert await claim(plane, 2, group_size=2) == [2, 3]
    assert await claim(plane, 4, group_size=4) == [5, 6, 7, 8]
    assert await ready(plane) == (1, 0)
    assert await ready(plane, group_size=2) == (1, 0)


async def test_samples_without_a_group_are_not_in_groups(plane: ControlPlane) -> None:
    await plane.produce("p", write(4, ["x"]), soon())
    assert await ready(plane, group_size=1) == (0, 0)
    assert await claim(plane, 4) == [1, 2, 3, 4]


async def test_group_names_may_hold_anything(plane: ControlPlane) -> None:
    names = ["a", "a:", "a;", "a\x00", "", ":whole", "ä}{", "[a", "a:0000000000000001"]
    await plane.produce("p", write(18, ["x"], groups=names * 2), soon())
    got = await claim(plane, 18, group_size=2)
    assert got == [sample for first in range(1, 10) for sample in (first, first + 9)]


# Cost


async def test_the_work_of_a_claim_does_not_grow_with_the_partition(
    plane: ControlPlane, admin: Admin
) -> None:
    async def commands_of_a_claim() -> int:
        await claim(plane, 1)
        before = admin.info("commandstats")
        assert isinstance(await claim(plane, 64), list)
        after = admin.info("commandstats")
        return sum(
            stat["calls"] - before.get(name, {"calls": 0})["calls"]
            for name, stat in after.items()
            if name != "cmdstat_info"
        )

    await plane.produce("p", write(1000, ["x"]), soon())
    few = await commands_of_a_claim()
    for _ in range(12):
        await plane.produce("p", write(2000, ["x"]), soon())
    assert await commands_of_a_claim() == few


async def test_blocks_of_claimed_rows_stay(plane: ControlPlane) -> None:
    put = write(1, ["x"])
    ids = (await plane.produce("p", put, soon())).ids
    await claim(plane, 1)
    assert (await plane.locate("p", ids, ["x"], soon()))["x"] == [(handle(put), 0, 1)]
