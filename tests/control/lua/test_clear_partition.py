from __future__ import annotations

from typing import Any

import pytest

from tests.control.build import block, claim, handle, soon, write
from tests.control.state import Admin, dump
from tq_redis.control.packing import arguments
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Write
from tq_redis.metadata import FieldSchema

pytestmark = pytest.mark.asyncio


async def fill(plane: ControlPlane, partition: str) -> tuple[list[int], set[str]]:
    """A partition with a key of every kind; ids and the handles that it must free."""
    put = write(4, ["x", "y"], keys=list("abcd"), groups=list("gghh"), tags=[{"t": 1}] * 4)
    ids = (await plane.produce(partition, put, soon())).ids
    again = write(4, ["x", "y"], ids=ids)
    assert (await plane.produce(partition, again, soon())).freed == [handle(put)]
    await claim(plane, 1, partition=partition)
    await claim(plane, 2, partition=partition, group_size=2)
    return ids, {handle(put), handle(again)}


async def test_nothing_is_left_but_the_handles_to_free(plane: ControlPlane, admin: Admin) -> None:
    _, handles = await fill(plane, "p")
    (generation,) = await plane.clear_partition("p", soon())
    assert await plane.partitions(soon()) == []
    key = plane.keys.summary("p")
    left = {f"{key}:trash", f"{key}:trash:{generation}", f"{key}:trash:{generation}:freed"}
    assert dump(admin, plane.keys.namespace).keys() == left
    assert all(0 < admin.ttl(name) <= 1000 for name in left)
    assert set(await plane.trash("p", generation, soon())) == handles
    await plane.empty_trash("p", generation, soon())
    assert dump(admin, plane.keys.namespace) == {}
    assert await plane.trash("p", generation, soon()) == []


async def test_clearing_can_be_repeated(plane: ControlPlane) -> None:
    await fill(plane, "p")
    assert await plane.clear_partition("nope", soon()) == []
    (generation,) = await plane.clear_partition("p", soon())
    # The first caller died before it had freed the bytes: the next one is told again.
    assert await plane.clear_partition("p", soon()) == [generation]
    await plane.empty_trash("p", generation, soon())
    assert await plane.clear_partition("p", soon()) == []


async def test_generations_are_kept_apart(plane: ControlPlane) -> None:
    _, old = await fill(plane, "p")
    await plane.clear_partition("p", soon())
    _, new = await fill(plane, "p")
    generations = await plane.clear_partition("p", soon())
    found = [set(await plane.trash("p", generation, soon())) for generation in generations]
    assert sorted(found, key=sorted) == sorted([old, new], key=sorted)


async def test_a_repeated_request_spares_what_was_made_since(plane: ControlPlane) -> None:
    """The reply was lost, and before the call is sent again somebody fills the partition anew."""
    await fill(plane, "p")
    packed = arguments({"request": "once", "request_ttl": 60, "idle_ttl": 1000})
    key = plane.keys.summary("p")
    first = await plane.connection.run("clear_partition", key, packed, soon())
    ids, _ = await fill(plane, "p")
    assert await plane.connection.run("clear_partition", key, packed, soon()) == first
    assert (await plane.describe("p", soon())).ids == ids


async def test_a_partition_made_anew_meanwhile_stays_listed(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(plane, "p")
    commands = plane.connection.commands

    async def put_first(*words: Any, **rest: Any) -> list[Any]:
        if words[0][0] == "SREM":
            monkeypatch.undo()
            await fill(plane, "p")
        return await commands(*words, **rest)

    monkeypatch.setattr(plane.connection, "commands", put_first)
    await plane.clear_partition("p", soon())
    assert await plane.partitions(soon()) == ["p"]


@pytest.mark.parametrize("cleared", ["p1", "p11", "p1:x", "p1:field:x", "{p1}", "p1}:samples"])
async def test_partitions_whose_names_begin_alike(plane: ControlPlane, cleared: str) -> None:
    names = {"p1", "p11", "p1:x", "p1:field:x", "{p1}", "p1}:samples"}
    ids = {name: (await fill(plane, name))[0] for name in names}
    await plane.clear_partition(cleared, soon())
    assert await plane.partitions(soon()) == sorted(names - {cleared})
    for name in names - {cleared}:
        assert (await plane.describe(name, soon())).ids == ids[name]
        assert (await plane.summary(name, soon()))["samples"] == 4


async def test_long_lists_of_blocks_are_read_in_pages(plane: ControlPlane) -> None:
    blocks = [block(1, ["x"], first_row=row) for row in range(3000)]
    schema = {"x": FieldSchema("dense", "float32", ())}
    ids = (await plane.produce("p", Write(3000, blocks=blocks, schema=schema), soon())).ids
    handles = {entry.handle for entry in blocks}
    assert await plane.named_blocks("p", soon()) == handles
    freed = await plane.clear_samples("p", ids[:1500], soon())
    assert len(freed) == 1500
    assert len(await plane.named_blocks("p", soon())) == 1500
    (generation,) = await plane.clear_partition("p", soon())
    trash = await plane.trash("p", generation, soon())
    assert sorted(trash) == sorted(handles)


async def test_a_partition_without_blocks(plane: ControlPlane) -> None:
    await plane.produce("p", Write(2), soon())
    (generation,) = await plane.clear_partition("p", soon())
    assert await plane.trash("p", generation, soon()) == []
    await plane.empty_trash("p", generation, soon())
    assert await plane.clear_partition("p", soon()) == []
