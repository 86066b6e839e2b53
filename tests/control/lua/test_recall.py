"""One part of a draw: read, then taken. Whole draws: tests/control/test_draws.py."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_asyncio

from tests.control.build import claimed, soon, write
from tests.control.state import Admin, TaskState, dump
from tq_redis.control import claims, draws
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Wanted
from tq_redis.control.replies import RecallReply
from tq_redis.errors import NotReadyError, SampleNotFoundError

pytestmark = pytest.mark.asyncio

LEASED = Wanted("t", ["x"], 2, lease_s=60.0, draw="1:0", whole="*:0")


async def part(
    plane: ControlPlane, number: int, wanted: Wanted = LEASED, **more: Any
) -> RecallReply:
    return await plane._part("p", wanted, "me", {"part": number, "by": "", **more}, soon())


@pytest_asyncio.fixture
async def ids(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rank 0 has drawn six rows, of which rank 1 has four, in two parts."""
    monkeypatch.setattr(claims, "ROWS_PER_PART", 2)
    monkeypatch.setattr(draws, "ROWS_PER_PART", 2)
    put = write(6, ["x"], tags=[{"n": row} for row in range(6)])
    ids = (await plane.produce("p", put, soon())).ids
    await plane.ready("p", LEASED, "me", soon())
    shares = {"0:0": ids[:2], "1:0": ids[2:]}
    wanted = Wanted("t", ["x"], 6, draw="0:0", whole="*:0")
    await plane.claim_chosen("p", wanted, "me", ids, soon(), shares=shares)
    return ids


async def test_what_is_read_is_not_taken(plane: ControlPlane, admin: Admin, ids: list[int]) -> None:
    before = dump(admin, plane.keys.namespace)
    replies = [await part(plane, number) for number in (1, 2)]
    assert [reply.ids for reply in replies] == [ids[2:4], ids[4:]]
    assert [(reply.parts, reply.waits) for reply in replies] == [(2, True)] * 2
    assert replies[0].tags == [("n", "[2,3]", "")]
    assert dump(admin, plane.keys.namespace) == before


@pytest.mark.parametrize(
    ("wanted", "state"), [(LEASED, "leased"), (Wanted("t", ["x"], 2, draw="1:0"), "consumed")]
)
async def test_a_part_is_taken_once(
    plane: ControlPlane, admin: Admin, ids: list[int], wanted: Wanted, state: str
) -> None:
    for _ in range(2):
        assert (await part(plane, 1, wanted, take=True)).code == "ok"
    task = TaskState(admin, plane.keys.summary("p"), "t")
    assert task.in_state(state) >= set(map(str, ids[2:4]))
    assert set(task.deliveries.values()) <= {1}
    assert [(await part(plane, number)).waits for number in (1, 2)] == [False, True]
    # The other part is its rank's too, for as long.
    assert len(task.leases) == (2 if state == "leased" else 0)
    summary = await plane.summary("p", soon())
    assert summary["consumed:t"] == (4 if state == "consumed" else 2)


async def test_a_draw_that_is_not_the_one_that_was_read(
    plane: ControlPlane, ids: list[int]
) -> None:
    read = await part(plane, 1)
    assert (await part(plane, 2, by=read.by)).code == "ok"
    assert (await part(plane, 2, by="another")).code == "none"
    assert (await part(plane, 3)).code == "none"
    await plane.reset_consumption("p", "t", soon())
    assert (await part(plane, 2, by=read.by, take=True)).code == "none"


async def test_rows_that_are_gone_or_lack_a_field_are_named_and_none_is_taken(
    plane: ControlPlane, admin: Admin, ids: list[int]
) -> None:
    with pytest.raises(NotReadyError) as lacking:
        await claimed(plane, 4, fields="xy", draw="1:0", whole="*:0")
    assert lacking.value.rows == tuple(ids[2:4])
    await plane.clear_samples("p", ids[4:5], soon())
    with pytest.raises(SampleNotFoundError) as gone:
        await claimed(plane, 4, draw="1:0", whole="*:0")
    assert gone.value.rows == (ids[4],)
    task = TaskState(admin, plane.keys.summary("p"), "t")
    assert task.in_state("consumed") == set(map(str, ids[:2]))


async def test_a_partition_or_a_draw_that_does_not_exist(plane: ControlPlane) -> None:
    assert (await part(plane, 1)).code == "no_partition"
    await plane.produce("p", write(1, ["x"]), soon())
    assert (await part(plane, 1)).code == "none"
