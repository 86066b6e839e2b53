from __future__ import annotations

import pytest

from tests.control.build import claimed, soon, write
from tests.control.state import Admin, Partition
from tq_redis.control.plane import ControlPlane
from tq_redis.errors import PartitionNotFoundError
from tq_redis.metadata import Claim

pytestmark = pytest.mark.asyncio


async def test_consumed_held_and_set_aside_samples_come_back(
    plane: ControlPlane, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_redis.control.claims.ROWS_PER_PAGE", 2)
    ids = (await plane.produce("p", write(7, ["x"], groups=["g"] * 7), soon())).ids
    await claimed(plane, 1, lease_s=60.0, max_deliveries=1)
    await plane.release("p", Claim("t", 1), ids[:1], soon())
    await claimed(plane, 2)
    await claimed(plane, 2, group_size=2, lease_s=60.0, draw="0:0")
    await claimed(plane, 3, task="u")
    assert await plane.reset_consumption("p", "t", soon()) == 5
    key = plane.keys.summary("p")
    Partition(admin, key).check()
    for name in ("task", "claims", "leases", "deliveries", "draws"):
        assert not admin.exists(f"{key}:{name}:t")
    assert await plane.ack("p", Claim("t", 3), ids[3:5], soon()) == ids[3:5]
    assert (await claimed(plane, 7)).ids == ids
    assert (await plane.summary("p", soon()))["consumed:u"] == 3


async def test_samples_without_their_fields_do_not_come_back(plane: ControlPlane) -> None:
    ids = (await plane.produce("p", write(2), soon())).ids
    await claimed(plane, 2, fields="")
    await plane.produce("p", write(1, ["x"], ids=ids[:1]), soon())
    assert await plane.reset_consumption("p", "t", soon()) == 2
    assert (await claimed(plane, 1)).ids == ids[:1]
    assert (await claimed(plane, 1, fields="")).ids == ids[1:]


async def test_nothing_to_reset(plane: ControlPlane) -> None:
    await plane.produce("p", write(2, ["x"]), soon())
    assert await plane.reset_consumption("p", "t", soon()) == 0
    with pytest.raises(PartitionNotFoundError):
        await plane.reset_consumption("q", "t", soon())
