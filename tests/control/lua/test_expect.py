from __future__ import annotations

import pytest

from tests.control.build import claim, claimed, soon, write
from tests.control.state import Admin, dump
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import NotEnough
from tq_redis.errors import PartitionEndedError

pytestmark = pytest.mark.asyncio


async def left(plane: ControlPlane) -> tuple[int | None, bool]:
    found = await claim(plane, 1000)
    assert isinstance(found, NotEnough)
    return found.left, found.complete


async def test_how_many_can_still_come(plane: ControlPlane) -> None:
    await plane.produce("p", write(4, ["x"]), soon())
    assert await left(plane) == (None, False)
    await plane.expect("p", 6, soon())
    assert await left(plane) == (6, False)
    await claimed(plane, 1)
    await claimed(plane, 1, lease_s=60.0)  # may come back
    assert await left(plane) == (5, False)
    await plane.clear_samples("p", [1, 4], soon())  # one was consumed, one was not
    assert await left(plane) == (4, False)
    await plane.produce("p", write(2), soon())  # no field yet, but they are there
    assert await left(plane) == (4, True)
    await plane.expect("p", 9, soon())
    assert await left(plane) == (7, False)
    await plane.expect("p", None, soon())
    assert await left(plane) == (4, True)


async def test_upserts_of_keys_that_exist_make_no_sample(plane: ControlPlane) -> None:
    await plane.expect("p", 2, soon())
    await plane.produce("p", write(2, ["x"], keys=["a", "b"]), soon())
    await plane.produce("p", write(2, ["y"], keys=["b", "a"]), soon())
    with pytest.raises(PartitionEndedError):
        await plane.produce("p", write(2, ["x"], keys=["a", "c"]), soon())
    assert (await plane.summary("p", soon()))["made"] == 2


@pytest.mark.parametrize("samples", [1, None])
async def test_what_is_refused_writes_nothing(
    plane: ControlPlane, admin: Admin, samples: int | None
) -> None:
    await plane.produce("p", write(1, ["x"]), soon())
    await plane.expect("p", samples, soon())
    before = dump(admin, plane.keys.namespace)
    with pytest.raises(PartitionEndedError):
        await plane.produce("p", write(1, ["x"]), soon())
    with pytest.raises(PartitionEndedError):
        await plane.expect("p", 0, soon())
    assert dump(admin, plane.keys.namespace) == before


async def test_a_partition_may_begin_with_it(plane: ControlPlane) -> None:
    await plane.expect("p", 3, soon())
    await plane.expect("q", None, soon())
    assert await plane.partitions(soon()) == ["p", "q"]
    first = (await plane.summary("p", soon()))["generation"]
    await plane.clear_partition("p", soon())
    await plane.expect("p", 3, soon())
    assert (await plane.summary("p", soon()))["generation"] != first
    assert (await plane.produce("p", write(3, ["x"]), soon())).freed == []
