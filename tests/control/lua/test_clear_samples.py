from __future__ import annotations

import pytest

from tests.control.build import block, claim, handle, soon, write
from tests.control.state import Admin, dump
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import BlockEntry, Claimed, NotEnough, Write
from tq_redis.metadata import FieldSchema

pytestmark = pytest.mark.asyncio


async def test_everything_about_the_rows_is_forgotten(plane: ControlPlane, admin: Admin) -> None:
    put = write(4, ["x", "y"], keys=list("abcd"), groups=["g", "g", "h", "h"], tags=[{"t": 1}] * 4)
    ids = (await plane.produce("p", put, soon())).ids
    await claim(plane, 3)
    assert await plane.clear_samples("p", ids, soon()) == [handle(put)]
    left = dump(admin, plane.keys.namespace)
    assert not [key for key in left if any(part in key for part in (":task:", ":ready:", ":tag:"))]
    summary = await plane.summary("p", soon())
    counters = ("samples", "bytes", "produced:x", "produced:y", "consumed:t")
    assert [summary[name] for name in counters] == [0] * 5
    assert await plane.partitions(soon()) == ["p"]


async def test_a_block_is_freed_with_its_last_row(plane: ControlPlane) -> None:
    put = write(4, ["x", "y"])
    ids = (await plane.produce("p", put, soon())).ids
    assert await plane.clear_samples("p", [ids[0], ids[3]], soon()) == []
    assert await plane.clear_samples("p", ids, soon()) == [handle(put)]


async def test_a_block_without_bytes(plane: ControlPlane) -> None:
    """Columns of shape (B, 0)."""
    empty = BlockEntry("node/empty", 0, 0, 2, {"x": "float32"})
    schema = {"x": FieldSchema("dense", "float32", (0,))}
    ids = (await plane.produce("p", Write(2, blocks=[empty], schema=schema), soon())).ids
    assert await plane.clear_samples("p", ids, soon()) == ["node/empty"]


async def test_rows_named_twice_are_cleared_once(plane: ControlPlane) -> None:
    """Else their cells would be taken off twice, and a block in use be freed."""
    put = write(3, ["x"])
    ids = (await plane.produce("p", put, soon())).ids
    assert await plane.clear_samples("p", [ids[0], ids[1], ids[0]], soon()) == []
    assert await plane.locate("p", ids[2:], ["x"], soon()) == {"x": [(handle(put), 2, 1)]}


async def test_unknown_rows_are_passed_over(plane: ControlPlane) -> None:
    put = write(2, ["x"])
    ids = (await plane.produce("p", put, soon())).ids
    kept = (await plane.produce("p", write(1, ["x"]), soon())).ids
    assert await plane.clear_samples("p", [*ids, 99], soon()) == [handle(put)]
    assert await plane.clear_samples("p", [*ids, 99], soon()) == []
    assert await plane.clear_samples("nope", ids, soon()) == []
    assert (await plane.describe("p", soon())).ids == kept


async def test_keys_and_groups_can_be_used_again(plane: ControlPlane) -> None:
    old = (await plane.produce("p", write(2, ["x"], keys=["a", "b"], groups="gg"), soon())).ids
    await plane.clear_samples("p", old[:1], soon())
    new = (await plane.produce("p", write(2, ["x"], keys=["a", "c"], groups="gg"), soon())).ids
    assert not set(old) & set(new)
    rows = await plane.describe("p", soon(), keys=["a", "b", "c"])
    assert rows.ids == [new[0], old[1], new[1]]


@pytest.mark.parametrize("cleared", [[0], [1, 2], [0, 5], [0, 1, 2, 3], list(range(8))])
async def test_parts_of_groups(plane: ControlPlane, cleared: list[int]) -> None:
    """A group that lost a row cannot be claimed; one that lost a spare row still can."""
    groups = ["g"] * 3 + ["h"] * 5
    ids = (await plane.produce("p", write(8, ["x"], groups=groups), soon())).ids
    assert isinstance(await claim(plane, 99, group_size=3), NotEnough)
    await plane.clear_samples("p", [ids[i] for i in cleared], soon())
    left = [i for i in range(8) if i not in cleared]
    whole = [
        ids[i]
        for members in ([i for i in left if i < 3], [i for i in left if i >= 3])
        for i in members[:3]
        if len(members) >= 3
    ]
    found = await claim(plane, max(3, len(whole)), group_size=3)
    assert (found.ids if isinstance(found, Claimed) else []) == whole
    more = await plane.produce("p", write(3, ["x"], groups=["g"] * 3), soon())
    found = await claim(plane, 3, group_size=3)
    assert isinstance(found, Claimed)
    assert set(found.ids) & set(more.ids)


async def test_consumed_and_ready_rows(plane: ControlPlane) -> None:
    ids = (await plane.produce("p", write(6, ["x"]), soon())).ids
    await claim(plane, 2)
    await plane.clear_samples("p", ids[1:4], soon())
    summary = await plane.summary("p", soon())
    assert (summary["samples"], summary["consumed:t"]) == (3, 1)
    found = await claim(plane, 2)
    assert isinstance(found, Claimed)
    assert found.ids == ids[4:]


async def test_many_rows_in_several_steps(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every handle is told once, however many steps there are."""
    monkeypatch.setattr("tq_redis.control.plane.CELLS_PER_CALL", 24)
    schema = {"x": FieldSchema("dense", "float32", ())}
    blocks = [block(1, ["x"], first_row=row) for row in range(40)]
    ids = (await plane.produce("p", Write(40, blocks=blocks, schema=schema), soon())).ids
    freed = await plane.clear_samples("p", ids[::-1], soon())
    assert sorted(freed) == sorted(entry.handle for entry in blocks)
    assert (await plane.describe("p", soon())).ids == []


async def test_a_step_of_one_row_is_the_least(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_redis.control.plane.CELLS_PER_CALL", 1)
    ids = (await plane.produce("p", write(3, ["x", "y"]), soon())).ids
    await plane.clear_samples("p", ids, soon())
    assert (await plane.describe("p", soon())).ids == []
