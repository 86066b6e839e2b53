from __future__ import annotations

import logging

import pytest

from tests.control.build import claimed, soon, write
from tests.control.state import Admin, Partition
from tq_redis.control.plane import ControlPlane
from tq_redis.metadata import Claim

pytestmark = pytest.mark.asyncio


async def test_samples_come_back_to_every_index_of_the_task(
    plane: ControlPlane, admin: Admin
) -> None:
    put = write(4, ["x", "y"], groups=["a", "b", "a", "b"])
    ids = (await plane.produce("p", put, soon())).ids
    await claimed(plane, 1, fields="y", task="t")
    await plane.reset_consumption("p", "t", soon())
    await claimed(plane, 2, group_size=2, lease_s=60.0)
    first = await claimed(plane, 1, lease_s=60.0)
    assert first.ids == ids[1:2]
    await plane.release("p", Claim("t", 2), [ids[0], ids[2], ids[1]], soon())
    Partition(admin, plane.keys.summary("p")).check()
    assert (await claimed(plane, 2, group_size=2)).ids == [ids[0], ids[2]]
    assert (await claimed(plane, 1, fields="y")).ids == ids[3:]


async def test_who_holds_nothing_gives_nothing_back(plane: ControlPlane, admin: Admin) -> None:
    ids = (await plane.produce("p", write(2, ["x"]), soon())).ids
    await claimed(plane, 2)  # for good
    await plane.release("p", Claim("t", 1), ids, soon())
    await plane.release("p", Claim("t", 7), ids, soon())
    await plane.release("nowhere", Claim("t", 1), ids, soon())
    assert (await plane.summary("p", soon()))["consumed:t"] == 2
    assert await plane.partitions(soon()) == ["p"]


async def test_after_the_last_delivery_a_sample_is_set_aside(
    plane: ControlPlane, admin: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    ids = (await plane.produce("p", write(2, ["x"]), soon())).ids
    for number in (1, 2):
        await claimed(plane, 1, lease_s=60.0, max_deliveries=2, consumer="me")
        with caplog.at_level(logging.WARNING):
            await plane.release("p", Claim("t", number), ids[:1], soon())
    key = plane.keys.summary("p")
    assert admin.hgetall(f"{key}:task:t") == {"1": "aside:2:me"}
    assert (await plane.summary("p", soon()))["set_aside:t"] == 1
    assert "Samples [1] of partition 'p' are set aside for task 't'" in caplog.text
    assert (await claimed(plane, 1)).ids == ids[1:]
    await plane.clear_samples("p", ids[:1], soon())
    assert (await plane.summary("p", soon()))["set_aside:t"] == 0
