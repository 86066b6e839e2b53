from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace

import pytest

from tests.control.build import BLOCK_BYTES, block, claim, handle, soon, write
from tests.control.state import Admin, Partition, dump
from tq_redis.control.packing import arguments, write_arguments
from tq_redis.control.plane import CELLS_PER_CALL, BlockGoneError, ControlPlane
from tq_redis.control.records import NotEnough, Write
from tq_redis.control.replies import ProduceReply, decode
from tq_redis.errors import (
    InputError,
    PartitionNotFoundError,
    SampleNotFoundError,
    SchemaConflictError,
)
from tq_redis.metadata import FieldSchema

pytestmark = pytest.mark.asyncio


async def test_new_rows_get_consecutive_ids_and_counters(plane: ControlPlane, admin: Admin) -> None:
    before = int(time.time())
    first = await plane.produce("p", write(3, ["x", "y"]), soon())
    second = await plane.produce("p", write(2, ["x"]), soon())
    assert (first.ids, second.ids) == ([1, 2, 3], [4, 5])
    summary = await plane.summary("p", soon())
    assert summary["samples"] == 5
    assert summary["produced:x"] == 5
    assert summary["produced:y"] == 3
    assert summary["bytes"] == 2 * BLOCK_BYTES
    assert before <= int(summary["created_at"]) <= time.time() + 1
    assert await plane.partitions(soon()) == ["p"]
    locators = admin.hgetall(f"{plane.keys.summary('p')}:field:x")
    assert locators == {"1": "1@1", "2": "1@1", "3": "1@1", "4": "2@4", "5": "2@4"}


async def test_a_row_is_found_as_fast_in_a_small_partition(
    plane: ControlPlane, admin: Admin
) -> None:
    """Redis searches a small hash from its start, unless it is a table."""
    keys = ["a", "b", "c"]
    tags = [{"status": "new"}] * 3
    await plane.produce("p", write(3, ["x"], keys=keys, groups=["g"] * 3, tags=tags), soon())
    await claim(plane, 2, lease_s=60.0)
    summary = plane.keys.summary("p")
    for name in ("field:x", "keys", "key_of", "group", "tag:status", "task:t", "deliveries:t"):
        assert admin.hlen(f"{summary}:{name}") == (2 if name.endswith(":t") else 3), name
        assert admin.object("encoding", f"{summary}:{name}") == "hashtable", name


async def test_ids_are_never_given_out_again(plane: ControlPlane) -> None:
    """A late writer of a cleared partition must not meet the rows of a new one."""
    old = await plane.produce("p", write(4, ["x"]), soon())
    await plane.clear_samples("p", old.ids, soon())
    await plane.clear_partition("p", soon())
    new = await plane.produce("p", write(4, ["x"]), soon())
    other = await plane.produce("q", write(4, ["x"]), soon())
    assert not set(old.ids) & set(new.ids)
    assert not set(new.ids) & set(other.ids)


async def test_fields_are_added_to_existing_rows(plane: ControlPlane) -> None:
    rows = await plane.produce("p", write(4, ["x"]), soon())
    added = await plane.produce("p", write(2, ["y"], ids=rows.ids[2:]), soon())
    assert added.ids == rows.ids[2:]
    found = await plane.describe("p", soon())
    assert found.produced == {"x": [True] * 4, "y": [False, False, True, True]}


async def test_a_block_is_freed_with_its_last_cell(plane: ControlPlane) -> None:
    first = write(4, ["x", "y"])
    ids = (await plane.produce("p", first, soon())).ids
    assert (await plane.produce("p", write(4, ["x"], ids=ids), soon())).freed == []
    assert (await plane.produce("p", write(3, ["y"], ids=ids[:3]), soon())).freed == []
    last = await plane.produce("p", write(1, ["y"], ids=ids[3:]), soon())
    assert last.freed == [handle(first)]
    assert (await plane.summary("p", soon()))["bytes"] == 3 * BLOCK_BYTES


async def test_freed_handles_are_told_to_their_caller_alone(
    plane: ControlPlane, admin: Admin
) -> None:
    """Clients that write meanwhile must not free the same bytes, unless that caller has died."""
    first = write(2, ["x"])
    ids = (await plane.produce("p", first, soon())).ids
    again = await plane.produce("p", write(2, ["x"], ids=ids), soon())
    assert again.freed == [handle(first)]
    assert (await plane.produce("p", write(1, ["x"]), soon())).freed == []

    freed = f"{plane.keys.summary('p')}:freed"
    admin.zadd(freed, {handle(first): time.time() - 3600})
    assert (await plane.produce("p", write(1, ["x"]), soon())).freed == [handle(first)]
    await plane.forget_freed("p", [handle(first)], soon())
    assert (await plane.produce("p", write(1, ["x"]), soon())).freed == []
    assert admin.exists(freed) == 0


async def test_what_dead_clients_left_comes_in_small_portions(
    plane: ControlPlane, admin: Admin
) -> None:
    await plane.produce("p", write(1, ["x"]), soon())
    freed = f"{plane.keys.summary('p')}:freed"
    admin.zadd(freed, {f"dead/{i}": 1 for i in range(1000)})
    assert 0 < len((await plane.produce("p", write(1, ["x"]), soon())).freed) <= 100


async def test_another_dtype_is_refused_before_anything_is_written(
    plane: ControlPlane, admin: Admin
) -> None:
    ids = (await plane.produce("p", write(3, ["x", "y"], keys=["a", "b", "c"]), soon())).ids
    before = dump(admin, plane.keys.namespace)
    for put in (
        write(3, ["z", "x"], ids=ids, dtype="int64"),
        write(2, ["x"], keys=["new", "b"], tags=[{"t": 1}, {"t": 2}], dtype="int64"),
    ):
        with pytest.raises(SchemaConflictError, match=r"'x'.*float32.*int64.*overwrite") as caught:
            await plane.produce("p", put, soon())
        assert caught.value.fields == ("x",)
        assert set(caught.value.rows) <= set(ids)
        assert dump(admin, plane.keys.namespace) == before


async def test_overwrite_allows_another_dtype(plane: ControlPlane) -> None:
    ids = (await plane.produce("p", write(3, ["x"]), soon())).ids
    await plane.produce("p", write(3, ["x"], ids=ids, dtype="", overwrite=True), soon())
    await plane.produce("p", write(3, ["x"], ids=ids, dtype=""), soon())
    with pytest.raises(SchemaConflictError, match="non-tensor"):
        await plane.produce("p", write(3, ["x"], ids=ids), soon())


async def test_stale_rows_are_named_and_nothing_is_written(
    plane: ControlPlane, admin: Admin
) -> None:
    ids = (await plane.produce("p", write(4, ["x"]), soon())).ids
    await plane.clear_samples("p", ids[:2], soon())
    before = dump(admin, plane.keys.namespace)
    with pytest.raises(SampleNotFoundError, match="stale") as caught:
        await plane.produce("p", write(4, ["y"], ids=ids, tags=[{"t": 1}] * 4), soon())
    assert caught.value.rows == tuple(ids[:2])
    assert dump(admin, plane.keys.namespace) == before


async def test_a_late_put_into_a_cleared_partition_is_refused(plane: ControlPlane) -> None:
    ids = (await plane.produce("train_1", write(2, ["x"]), soon())).ids
    await plane.produce("train_2", write(2, ["x"]), soon())
    await plane.clear_partition("train_1", soon())
    with pytest.raises(PartitionNotFoundError, match="Did you mean 'train_2'"):
        await plane.produce("train_1", write(2, ["y"], ids=ids), soon())
    await plane.produce("train_1", write(2, ["x"]), soon())
    with pytest.raises(SampleNotFoundError):
        await plane.produce("train_1", write(2, ["y"], ids=ids), soon())


@pytest.mark.parametrize("names", [{"ids": [1, 2, 1]}, {"keys": ["a", "b", "a"]}])
async def test_a_row_named_twice_is_refused(plane: ControlPlane, names: dict[str, object]) -> None:
    """Its cells would be counted twice, and their block never be freed."""
    await plane.produce("p", write(2, ["x"], keys=["a", "b"]), soon())
    with pytest.raises(InputError, match="distinct.*(1|'a').*more than once"):
        await plane.produce("p", write(3, ["y"], **names), soon())  # type: ignore[arg-type]


async def test_one_put_adds_to_known_keys_and_makes_new_ones(plane: ControlPlane) -> None:
    old = write(2, ["x", "y"], keys=["a", "b"], groups=["g", "g"], tags=[{"t": 1, "u": 1}, {}])
    await plane.produce("p", old, soon())
    put = write(
        3,
        ["x"],
        keys=["c", "a", "d"],
        groups=["h", "ignored", "h"],
        tags=[{"t": 3}, {"t": 2}, {}],
    )
    written = await plane.produce("p", put, soon())
    assert written.freed == []
    rows = await plane.describe("p", soon(), keys=["a", "b", "c", "d"])
    a, b, c, d = rows.ids
    assert written.ids == [c, a, d]
    assert rows.tags == [{"t": 2, "u": 1}, {}, {"t": 3}, {}]
    assert rows.produced == {"x": [True] * 4, "y": [True, True, False, False]}
    found = await claim(plane, 4, group_size=2)
    assert not isinstance(found, NotEnough)
    assert found.ids == [a, b, c, d]
    assert (await plane.summary("p", soon()))["samples"] == 4


async def test_blocks_may_hold_parts_of_the_rows_and_of_the_fields(plane: ControlPlane) -> None:
    blocks = [
        block(3, ["x"], first_row=0),
        block(2, ["x"], first_row=3),
        block(5, ["y", "z"]),
    ]
    schema = {name: FieldSchema("dense", "float32", ()) for name in "xyz"}
    assert isinstance(await claim(plane, 1, fields=["x", "z"]), NotEnough)
    ids = (await plane.produce("p", Write(5, blocks=blocks, schema=schema), soon())).ids
    where = await plane.locate("p", ids, ["x", "y", "z"], soon())
    assert where["x"] == [(blocks[0].handle, 0, 3), (blocks[1].handle, 0, 2)]
    assert where["y"] == where["z"] == [(blocks[2].handle, 0, 5)]
    found = await claim(plane, 5, fields=["x", "z"])
    assert not isinstance(found, NotEnough)


@pytest.mark.parametrize("order", list(itertools.permutations(["x", "y"])))
@pytest.mark.parametrize("group_size", [0, 2])
async def test_rows_become_ready_with_their_last_field(
    plane: ControlPlane, order: tuple[str, str], group_size: int
) -> None:
    async def ready() -> int:
        found = await claim(plane, 100, fields=["x", "y"], group_size=group_size)
        assert isinstance(found, NotEnough)
        return found.ready

    ids = (await plane.produce("p", write(4, [order[0]], groups=list("ggff")), soon())).ids
    assert await ready() == 0
    await plane.produce("p", write(4, ["unread"], ids=ids), soon())
    assert await ready() == 0
    await plane.produce("p", write(2, [order[1]], ids=ids[:2]), soon())
    assert await ready() == 2
    await plane.produce("p", write(3, [order[1]], ids=ids[1:]), soon())
    assert await ready() == 4
    await plane.produce("p", write(2, ["x", "y"], groups=["k", "k"]), soon())
    assert await ready() == 6


async def test_rows_that_arrive_behind_an_index_in_construction(plane: ControlPlane) -> None:
    """Ids are drawn before rows are written, so lower ids may come later."""

    async def produce_at(first: int) -> None:
        values = {"request": f"r{first}", "request_ttl": 60, "idle_ttl": 1000, "first": first}
        packed = arguments(write_arguments(write(4, ["x"])) | values)
        raw = await plane.connection.run("produce", plane.keys.summary("p"), packed, soon())
        assert decode(raw, ProduceReply).code == "ok"

    first = await plane.reserve("p", 12, soon())
    await produce_at(first + 4)
    assert isinstance(await claim(plane, 100), NotEnough)
    await produce_at(first + 8)
    await produce_at(first)
    found = await claim(plane, 12)
    assert not isinstance(found, NotEnough)
    assert found.ids == list(range(first, first + 12))


async def test_rows_without_fields(plane: ControlPlane) -> None:
    ids = (await plane.produce("p", Write(3), soon())).ids
    await plane.produce("p", write(2, keys=["k", "l"], tags=[{"a": [1, None]}, {}]), soon())
    rows = await plane.describe("p", soon())
    assert rows.ids[:3] == ids
    assert rows.keys == [None, None, None, "k", "l"]
    assert rows.tags == [{}, {}, {}, {"a": [1, None]}, {}]
    assert rows.schema == {}


async def test_the_largest_call(plane: ControlPlane, admin: Admin) -> None:
    """As many cells as one script takes; more values than fit on Lua's stack."""
    ids = (await plane.produce("p", write(CELLS_PER_CALL, ["x"]), soon())).ids
    assert len(ids) == CELLS_PER_CALL
    await plane.produce("p", write(CELLS_PER_CALL, ["y"], ids=ids), soon())
    fields = [f"f{i}" for i in range(CELLS_PER_CALL)]
    await plane.produce("q", write(1, fields), soon())
    assert admin.hlen(f"{plane.keys.summary('q')}:schema") == CELLS_PER_CALL


async def test_a_block_may_be_named_in_several_steps(plane: ControlPlane, admin: Admin) -> None:
    """As a put does that is too large for one script."""
    entry = block(5, ["x", "y"])
    form = {name: FieldSchema("dense", "float32", (3,)) for name in ("x", "y")}

    def step(rows: int, offset: int, number: int) -> Write:
        part = replace(entry, rows=rows, offset=offset, number=number)
        return Write(rows, blocks=[part], schema=form)

    first = await plane.produce("p", step(3, 0, 0), soon())
    rest = await plane.produce("p", step(2, 3, first.numbers[0]), soon())
    assert rest.numbers == first.numbers
    Partition(admin, plane.keys.summary("p")).check()
    where = await plane.locate("p", first.ids + rest.ids, ["x", "y"], soon())
    assert where["x"] == where["y"] == [(entry.handle, 0, 5)]
    assert (await plane.summary("p", soon()))["bytes"] == BLOCK_BYTES
    assert await plane.clear_samples("p", first.ids, soon()) == []
    assert await plane.clear_samples("p", rest.ids, soon()) == [entry.handle]
    # All rows of the earlier steps are gone, and the block with them.
    before = dump(admin, plane.keys.namespace)
    with pytest.raises(BlockGoneError):
        await plane.produce("p", step(2, 3, first.numbers[0]), soon())
    assert dump(admin, plane.keys.namespace) == before
    await plane.clear_partition("p", soon())
    with pytest.raises(PartitionNotFoundError):
        await plane.produce("p", step(2, 3, first.numbers[0]), soon())


async def test_a_repeated_request_changes_nothing(plane: ControlPlane, admin: Admin) -> None:
    values = {"request": "once", "request_ttl": 60, "idle_ttl": 1000, "first": 7}
    packed = arguments(write_arguments(write(3, ["x"], keys=["a", "b", "c"])) | values)
    key = plane.keys.summary("p")
    first = await plane.connection.run("produce", key, packed, soon())
    await plane.reserve("p", 10, soon())
    before = dump(admin, plane.keys.namespace)
    assert await plane.connection.run("produce", key, packed, soon()) == first
    assert dump(admin, plane.keys.namespace) == before
    assert decode(first, ProduceReply).ids == [7, 3]


async def test_blocks_are_recorded_as_json(plane: ControlPlane, admin: Admin) -> None:
    put = write(1, ["x"], dtype="bfloat16")
    await plane.produce("p", put, soon())
    (text,) = admin.hgetall(f"{plane.keys.summary('p')}:blocks").values()
    assert json.loads(text) == {
        "handle": handle(put),
        "bytes": BLOCK_BYTES,
        "dtypes": {"x": "bfloat16"},
    }
    Partition(admin, plane.keys.summary("p")).check()
