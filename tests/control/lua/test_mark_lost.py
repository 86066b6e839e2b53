from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.control.build import block, claim, claimed, handle, soon, write
from tests.control.state import Admin, Partition, dump
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Lost, NotEnough, Taken, Wanted, Write
from tq_redis.errors import NotReadyError, SampleNotFoundError
from tq_redis.metadata import Claim, FieldSchema

pytestmark = pytest.mark.asyncio

NOTHING = Lost({}, {}, [], [])


def by(task: str | None, put: Write) -> Write:
    """The same write, of that task."""
    return replace(put, task=task)


async def prompts(plane: ControlPlane, rows: int = 4, **more: Any) -> list[int]:
    """Samples with ``x``, which some trainer put."""
    return (await plane.produce("p", write(rows, ["x"], **more), soon())).ids


async def answered(
    plane: ControlPlane, ids: list[int], fields: str = "y", task: str = "gen"
) -> str:
    """A task writes more fields; the handle of their block."""
    put = by(task, write(len(ids), list(fields), ids=ids))
    await plane.produce("p", put, soon())
    return handle(put)


async def test_the_task_that_wrote_them_may_claim_them_again(plane: ControlPlane) -> None:
    ids = await prompts(plane)
    await claimed(plane, 4, task="gen")
    await claim(plane, 9, task="train", fields="xy")
    dead = await answered(plane, ids)

    lost = await plane.mark_lost("p", ids[1:3], ["y"], [dead], soon())

    assert lost == Lost({"y": ids[1:3]}, {"gen": ids[1:3]}, [], [])
    summary = await plane.summary("p", soon())
    counters = ("samples", "produced:x", "produced:y", "consumed:gen", "lost")
    assert [summary[name] for name in counters] == [4, 4, 2, 2, 2]
    with pytest.raises(NotReadyError) as caught:
        await plane.locate("p", ids, ["x", "y"], soon())
    assert caught.value.rows == tuple(ids[1:3])
    assert isinstance(await claim(plane, 3, task="train", fields="xy"), NotEnough)
    assert (await claimed(plane, 2, task="gen")).ids == ids[1:3]
    await answered(plane, ids[1:3])
    assert (await claimed(plane, 4, task="train", fields="xy")).ids == ids


async def test_a_waiting_consumer_is_woken(plane: ControlPlane) -> None:
    ids = await prompts(plane)
    await claimed(plane, 4, task="gen")
    dead = await answered(plane, ids)
    waiting = await claim(plane, 1, task="gen")
    assert isinstance(waiting, NotEnough)
    await plane.mark_lost("p", ids[:1], ["y"], [dead], soon())
    await plane.wait("p", waiting.event, soon())
    assert (await claimed(plane, 1, task="gen")).ids == ids[:1]


async def test_the_end_is_not_the_end_any_more(plane: ControlPlane) -> None:
    ids = await prompts(plane, 2)
    await plane.expect("p", None, soon())
    await claimed(plane, 2, task="gen")
    dead = await answered(plane, ids)
    await plane.mark_lost("p", ids[:1], ["y"], [dead], soon())
    found = await claim(plane, 2, task="gen")
    assert isinstance(found, NotEnough)
    assert found.left == 1


async def test_a_second_time_changes_nothing(plane: ControlPlane, admin: Admin) -> None:
    ids = await prompts(plane)
    await claimed(plane, 4, task="gen", lease_s=60.0, draw="0:0")
    dead = await answered(plane, ids, "yz")
    await plane.mark_lost("p", ids, ["y", "z"], [dead], soon())
    before = dump(admin, plane.keys.namespace)
    assert await plane.mark_lost("p", ids, ["y", "z"], [dead], soon()) == NOTHING
    assert dump(admin, plane.keys.namespace) == before


async def test_the_block_is_freed_with_its_last_cell(plane: ControlPlane, admin: Admin) -> None:
    put = write(4, ["x", "y"])
    ids = (await plane.produce("p", put, soon())).ids
    dead = handle(put)
    for rows, fields, freed in ((ids[:2], "xy", []), (ids[2:], "x", []), (ids[2:], "y", [dead])):
        assert (await plane.mark_lost("p", rows, list(fields), [dead], soon())).freed == freed
        Partition(admin, plane.keys.summary("p")).check()
    assert await plane.freed("p", soon()) == [dead]
    assert (await plane.summary("p", soon()))["bytes"] == 0


async def test_what_was_written_again_stays(plane: ControlPlane) -> None:
    ids = await prompts(plane)
    await claimed(plane, 4, task="gen")
    dead = await answered(plane, ids)
    new = await answered(plane, ids[:1])
    lost = await plane.mark_lost("p", ids, ["x", "y"], [dead], soon())
    assert lost == Lost({"y": ids[1:]}, {"gen": ids[1:]}, [], [dead])
    assert await plane.locate("p", ids[:1], ["y"], soon()) == {"y": [(new, 0, 1)]}
    rows = await plane.describe("p", soon(), task="gen")
    assert rows.states == ["consumed", "open", "open", "open"]
    assert rows.produced["x"] == [True] * 4


async def test_what_is_not_there_is_passed_over(plane: ControlPlane, admin: Admin) -> None:
    ids = await prompts(plane)
    dead = await answered(plane, ids)
    await plane.clear_samples("p", ids[:1], soon())
    before = dump(admin, plane.keys.namespace)
    for partition, rows, fields, handles in (
        ("nowhere", ids, ["y"], [dead]),
        ("p", [ids[0], 10**6], ["y"], [dead]),
        ("p", ids, ["never"], [dead]),
        ("p", ids, ["y"], ["node/other"]),
        ("p", ids, ["y"], []),
        ("p", ids, [], [dead]),
        ("p", [], ["y"], [dead]),
    ):
        assert await plane.mark_lost(partition, rows, fields, handles, soon()) == NOTHING
    assert dump(admin, plane.keys.namespace) == before
    lost = await plane.mark_lost("p", [*ids, *ids, 10**6], ["y"], [dead], soon())
    assert lost.cells == {"y": ids[1:]}


async def test_without_a_task_they_are_only_not_produced(plane: ControlPlane, admin: Admin) -> None:
    put = write(2, ["x"])
    ids = (await plane.produce("p", put, soon())).ids
    await claimed(plane, 1)
    assert await plane.mark_lost("p", ids, ["x"], [handle(put)], soon()) == Lost(
        {"x": ids}, {}, ids, [handle(put)]
    )
    assert (await plane.describe("p", soon(), task="t")).states == ["consumed", "open"]
    assert isinstance(await claim(plane, 1), NotEnough)
    assert admin.hget(f"{plane.keys.summary('p')}:blocks", "1") is None


async def test_no_task_takes_no_room(plane: ControlPlane, admin: Admin) -> None:
    await plane.produce("p", write(1, ["x"]), soon())
    await plane.produce("p", by("größe: 1", write(1, ["x"])), soon())
    blocks = Partition(admin, plane.keys.summary("p")).blocks
    assert blocks["1"].keys() == {"handle", "bytes", "dtypes"}
    assert blocks["2"]["task"] == "gr%C3%B6%C3%9Fe%3A%201"


async def test_names_are_told_as_they_were_given(plane: ControlPlane) -> None:
    task, field = "größe: 1", "a {b}:ü"
    put = by(task, write(1, [field]))
    ids = (await plane.produce("p", put, soon())).ids
    lost = await plane.mark_lost("p", ids, [field], [handle(put)], soon())
    assert lost == Lost({field: ids}, {task: ids}, [], [handle(put)])


async def test_every_step_of_a_put_names_its_task(plane: ControlPlane) -> None:
    ids = await prompts(plane, 2)
    first = block(1, ["y"])
    schema = {"y": FieldSchema("dense", "float32", ())}
    step = Write(1, ids=ids[:1], blocks=[first], schema=schema, task="gen")
    (number,) = (await plane.produce("p", step, soon())).numbers
    later = replace(step, ids=ids[1:], blocks=[replace(first, offset=1, number=number)])
    await plane.produce("p", later, soon())
    lost = await plane.mark_lost("p", ids, ["y"], [first.handle], soon())
    assert lost.tasks == {"gen": ids}


async def test_what_others_hold_stays_theirs(plane: ControlPlane) -> None:
    """A reader that met the loss keeps its lease, and may acknowledge or release."""
    ids = await prompts(plane)
    await claimed(plane, 4, task="gen")
    dead = await answered(plane, ids)
    reader = await claimed(plane, 4, task="train", fields="xy", lease_s=60.0)
    (held,) = set(reader.claims)
    assert held is not None
    await plane.mark_lost("p", ids[:2], ["y"], [dead], soon())
    assert await plane.ack("p", held, ids[1:3], soon()) == []
    await plane.release("p", held, [ids[0], ids[3]], soon())
    assert (await claimed(plane, 1, task="train", fields="xy")).ids == ids[3:]
    assert (await claimed(plane, 2, task="gen")).ids == ids[:2]
    await answered(plane, ids[:2])
    assert (await claimed(plane, 1, task="train", fields="xy")).ids == ids[:1]


async def test_the_writer_s_own_lease_ends(plane: ControlPlane, admin: Admin) -> None:
    """It has put, and not acknowledged yet."""
    ids = await prompts(plane)
    found = await claimed(plane, 4, task="gen", lease_s=60.0, max_deliveries=1)
    (held,) = set(found.claims)
    assert held is not None
    dead = await answered(plane, ids)
    assert await plane.ack("p", held, ids[:1], soon()) == []

    lost = await plane.mark_lost("p", ids[:3], ["y"], [dead], soon())

    assert lost.tasks == {"gen": ids[:3]}
    Partition(admin, plane.keys.summary("p")).check()
    again = await claimed(plane, 3, task="gen", lease_s=60.0)
    assert again.ids == ids[:3]
    assert await plane.ack("p", held, ids, soon()) == ids[:3]
    assert await plane.renew("p", held, None, soon()) is None
    # The delivery that had no end counts; the one that was acknowledged does not.
    deliveries = admin.hgetall(f"{plane.keys.summary('p')}:deliveries:gen")
    assert deliveries == {"1": "1", "2": "2", "3": "2"}


async def test_what_was_set_aside_stays_so(plane: ControlPlane) -> None:
    ids = await prompts(plane, 2)
    dead = await answered(plane, ids)
    await claimed(plane, 1, task="gen", lease_s=60.0, max_deliveries=1)
    await plane.release("p", Claim("gen", 1), ids[:1], soon())
    lost = await plane.mark_lost("p", ids, ["y"], [dead], soon())
    assert lost == Lost({"y": ids}, {"gen": ids[1:]}, ids[:1], [dead])
    assert (await plane.describe("p", soon(), task="gen")).states == ["aside", "open"]


@pytest.mark.parametrize("lease", [None, 60.0])
async def test_a_draw_that_lost_samples_is_made_anew(
    plane: ControlPlane, lease: float | None
) -> None:
    ids = await prompts(plane)
    drawn = await claimed(plane, 2, task="gen", draw="0:0", lease_s=lease)
    other = await claimed(plane, 1, task="gen", draw="1:0", lease_s=lease)
    assert (drawn.ids, other.ids) == (ids[:2], ids[2:3])
    dead = await answered(plane, ids[:3])
    await plane.mark_lost("p", ids[:1], ["y"], [dead], soon())
    assert (await claimed(plane, 1, task="gen", draw="1:0", lease_s=lease)).ids == ids[2:3]
    anew = await claimed(plane, 2, task="gen", draw="0:0", lease_s=lease)
    assert anew.ids == [ids[0], ids[3]]
    assert (await claimed(plane, 2, task="gen", draw="0:0", lease_s=lease)).ids == anew.ids


async def test_a_sampler_draws_anew_too(plane: ControlPlane) -> None:
    ids = await prompts(plane, 3)
    await claimed(plane, 2, task="gen", draw="0:0")
    dead = await answered(plane, ids)
    await plane.mark_lost("p", ids[:1], ["y"], [dead], soon())
    wanted = Wanted("gen", ["x"], 1, draw="0:0")
    ready, _ = await plane.ready("p", wanted, "me", soon())
    if ready is None:  # so far it looks as if it was drawn
        assert await plane.claim_chosen("p", wanted, "me", [], soon()) == Taken([])
        ready, _ = await plane.ready("p", wanted, "me", soon())
    assert ready is not None
    assert ready.ids == [ids[0], ids[2]]


async def test_a_draw_whose_samples_were_cleared_says_so(plane: ControlPlane) -> None:
    ids = await prompts(plane, 3)
    await claimed(plane, 2, task="gen", draw="0:0")
    dead = await answered(plane, ids)
    await plane.clear_samples("p", ids[:1], soon())
    await plane.mark_lost("p", ids[2:], ["y"], [dead], soon())
    with pytest.raises(SampleNotFoundError) as caught:
        await claim(plane, 2, task="gen", draw="0:0")
    assert caught.value.rows == (ids[0],)


async def test_a_share_that_nobody_has_asked_for_waits_on(
    plane: ControlPlane, admin: Admin
) -> None:
    """Its rank will work on it anyway."""
    ids = await prompts(plane, 2)
    dead = await answered(plane, ids)
    mine, theirs = Wanted("gen", ["x"], 1, draw="0:0"), Wanted("gen", ["x"], 1, draw="1:0")
    shares = {"0:0": ids[:1], "1:0": ids[1:]}
    await plane.claim_chosen("p", mine, "me", ids, soon(), shares=shares)
    lost = await plane.mark_lost("p", ids, ["y"], [dead], soon())
    assert lost.tasks == {"gen": ids}
    Partition(admin, plane.keys.summary("p")).check()
    found = await plane.claim("p", theirs, "you", soon())
    assert not isinstance(found, NotEnough)
    assert found.ids == ids[1:]
    assert (await claimed(plane, 1, task="gen")).ids == ids[:1]


async def test_groups_lose_and_get_back_members(plane: ControlPlane, admin: Admin) -> None:
    ids = await prompts(plane, 6, groups="aaabbb")
    await claimed(plane, 6, task="gen")
    dead = await answered(plane, ids)
    assert isinstance(await claim(plane, 99, task="adv", fields="y", group_size=3), NotEnough)
    await plane.mark_lost("p", ids[1:2], ["y"], [dead], soon())
    Partition(admin, plane.keys.summary("p")).check()
    assert (await claimed(plane, 3, task="adv", fields="y", group_size=3)).ids == ids[3:]
    await answered(plane, ids[1:2])
    assert (await claimed(plane, 3, task="adv", fields="y", group_size=3)).ids == ids[:3]


async def test_two_tasks_wrote_one_row(plane: ControlPlane) -> None:
    ids = await prompts(plane, 3)
    for task in ("gen", "ref"):
        await claimed(plane, 3, task=task)
    one, two = await answered(plane, ids, "y"), await answered(plane, ids[1:], "z", "ref")
    lost = await plane.mark_lost("p", ids, ["y", "z"], [one, two], soon())
    assert lost.cells == {"y": ids, "z": ids[1:]}
    assert lost.tasks == {"gen": ids, "ref": ids[1:]}
    assert sorted(lost.freed) == sorted([one, two])
    for task, rows in lost.tasks.items():
        assert (await claimed(plane, len(rows), task=task)).ids == rows


async def test_what_a_task_reads_is_lost_as_well(plane: ControlPlane) -> None:
    """It can claim the rows when that was put again."""
    put = write(2, ["x"])
    ids = (await plane.produce("p", put, soon())).ids
    await claimed(plane, 2, task="gen")
    dead = await answered(plane, ids)
    lost = await plane.mark_lost("p", ids, ["x", "y"], [handle(put), dead], soon())
    assert (lost.tasks, lost.left) == ({"gen": ids}, ids)
    assert isinstance(await claim(plane, 1, task="gen"), NotEnough)
    await plane.produce("p", write(2, ["x"], ids=ids), soon())
    assert (await claimed(plane, 2, task="gen")).ids == ids


async def test_many_rows_blocks_and_fields_in_several_steps(
    plane: ControlPlane, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_redis.control.plane.CELLS_PER_CALL", 40)
    monkeypatch.setattr("tq_redis.control.plane.ROWS_PER_PAGE", 7)
    ids = await prompts(plane, 40)
    await claimed(plane, 40, task="gen")
    blocks = [block(1, ["y", "z"], first_row=row) for row in range(40)]
    schema = {name: FieldSchema("dense", "float32", ()) for name in "yz"}
    put = Write(40, ids=ids, blocks=blocks, schema=schema, task="gen")
    await plane.produce("p", put, soon())
    handles = [entry.handle for entry in blocks]
    lost = await plane.mark_lost("p", ids[::-1], ["z", "y"], handles, soon())
    assert lost.cells == {"y": ids, "z": ids}
    assert lost.tasks == {"gen": ids}
    assert sorted(lost.freed) == sorted(handles)
    Partition(admin, plane.keys.summary("p")).check()


async def test_bytes_stay_while_a_save_copies_them(plane: ControlPlane) -> None:
    put = write(1, ["x"])
    ids = (await plane.produce("p", put, soon())).ids
    await plane.freeze("p", "save", "all", 60.0, soon(), first=True)
    await plane.freeze("p", "save", "keep", 60.0, soon())
    lost = await plane.mark_lost("p", ids, ["x"], [handle(put)], soon())
    assert lost == Lost({"x": ids}, {}, ids, [])
    assert await plane.freed("p", soon()) == [handle(put)]
    await plane.freeze("p", "save", "none", 60.0, soon())
