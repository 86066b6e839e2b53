from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.control.build import handle, soon, write
from tests.control.state import Admin
from tq_redis.control.plane import ControlPlane
from tq_redis.errors import (
    FieldNotFoundError,
    NotReadyError,
    PartitionNotFoundError,
    SampleNotFoundError,
)

pytestmark = pytest.mark.asyncio


async def test_runs_stand_in_the_order_of_the_rows(plane: ControlPlane) -> None:
    first, second = write(4, ["x", "y"]), write(3, ["x", "y"])
    ids = (await plane.produce("p", first, soon())).ids
    ids += (await plane.produce("p", second, soon())).ids
    a, b = handle(first), handle(second)
    where = await plane.locate("p", [ids[i] for i in (2, 3, 4, 5, 0, 6)], ["x"], soon())
    assert where == {"x": [(a, 2, 2), (b, 0, 2), (a, 0, 1), (b, 2, 1)]}
    where = await plane.locate("p", [ids[i] for i in (1, 0, 0)], ["y", "x"], soon())
    assert where["x"] == where["y"] == [(a, 1, 1), (a, 0, 1), (a, 0, 1)]


async def test_fields_of_different_blocks(plane: ControlPlane) -> None:
    puts = {"x": write(3, ["x"]), "y": write(3, ["y"]), "z": write(2, ["z"])}
    ids = (await plane.produce("p", puts["x"], soon())).ids
    await plane.produce("p", write(3, ["y"], ids=ids), soon())
    rewritten = write(2, ["y"], ids=ids[1:])
    await plane.produce("p", rewritten, soon())
    where = await plane.locate("p", ids, ["y", "x"], soon())
    assert where["x"] == [(handle(puts["x"]), 0, 3)]
    assert [count for _, _, count in where["y"]] == [1, 2]
    assert where["y"][1] == (handle(rewritten), 0, 2)


@settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(picks=st.lists(st.integers(0, 19), min_size=1, max_size=40), page=st.integers(1, 9))
async def test_any_choice_of_rows_in_any_pages(
    plane: ControlPlane, picks: list[int], page: int
) -> None:
    puts = [write(5, ["x", "y"]) for _ in range(4)]
    ids: list[int] = []
    for put in puts:
        ids += (await plane.produce("p", put, soon())).ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tq_redis.control.plane.CELLS_PER_CALL", 2 * page)
        where = await plane.locate("p", [ids[i] for i in picks], ["x", "y"], soon())
    for name in ("x", "y"):
        cells = [(h, row + i) for h, row, count in where[name] for i in range(count)]
        assert cells == [(handle(puts[i // 5]), i % 5) for i in picks]


async def test_rows_that_lack_a_field_are_named(plane: ControlPlane) -> None:
    ids = (await plane.produce("p", write(4, ["x"]), soon())).ids
    await plane.produce("p", write(2, ["reward"], ids=ids[:2]), soon())
    with pytest.raises(NotReadyError, match="'reward'.*not produced yet") as caught:
        await plane.locate("p", ids, ["x", "reward"], soon())
    assert caught.value.fields == ("reward",)
    assert caught.value.rows == tuple(ids[2:])


async def test_a_field_that_nobody_has(plane: ControlPlane) -> None:
    ids = (await plane.produce("p", write(2, ["reward", "prompt"]), soon())).ids
    with pytest.raises(FieldNotFoundError, match="Did you mean 'reward'") as caught:
        await plane.locate("p", ids, ["rewards"], soon())
    assert (caught.value.partition, caught.value.fields) == ("p", ("rewards",))


async def test_cleared_rows_are_stale_whatever_they_had(plane: ControlPlane) -> None:
    ids = (await plane.produce("p", write(4, ["x"]), soon())).ids
    await plane.clear_samples("p", ids[1:3], soon())
    with pytest.raises(SampleNotFoundError) as caught:
        await plane.locate("p", [*ids, 999], ["x"], soon())
    assert caught.value.rows == (ids[1], ids[2], 999)


async def test_a_partition_that_does_not_exist(plane: ControlPlane) -> None:
    with pytest.raises(PartitionNotFoundError, match="None is known yet"):
        await plane.locate("p", [1], ["x"], soon())


async def test_looking_changes_nothing(plane: ControlPlane, admin: Admin) -> None:
    ids = (await plane.produce("p", write(4, ["x"]), soon())).ids
    before = admin.info("persistence")["rdb_changes_since_last_save"]
    await plane.locate("p", ids, ["x"], soon())
    await plane.describe("p", soon())
    assert admin.info("persistence")["rdb_changes_since_last_save"] == before
