from __future__ import annotations

import pytest

from tests.control.build import claimed, soon, write
from tests.control.state import Admin, Partition
from tq_redis.control.plane import ControlPlane
from tq_redis.metadata import Claim

pytestmark = pytest.mark.asyncio


async def test_what_is_done_is_consumed_by_who_claimed_it(
    plane: ControlPlane, admin: Admin
) -> None:
    ids = (await plane.produce("p", write(3, ["x"]), soon())).ids
    await claimed(plane, 3, lease_s=60.0, consumer="me")
    key = plane.keys.summary("p")
    assert set(admin.hgetall(f"{key}:task:t").values()) == {"leased:1:me"}
    assert await plane.ack("p", Claim("t", 1), ids[:2], soon()) == []
    assert admin.hgetall(f"{key}:task:t") == {
        "1": "consumed:1:me",
        "2": "consumed:1:me",
        "3": "leased:1:me",
    }
    Partition(admin, key).check()
    assert await plane.ack("p", Claim("t", 1), ids, soon()) == []
    for name in ("claims", "leases", "deliveries"):
        assert not admin.exists(f"{key}:{name}:t")
    summary = await plane.summary("p", soon())
    assert (summary["claimed:t"], summary["consumed:t"]) == (0, 3)


async def test_what_the_claim_does_not_hold_is_named(plane: ControlPlane) -> None:
    ids = (await plane.produce("p", write(4, ["x"]), soon())).ids
    await claimed(plane, 2, lease_s=60.0)
    await claimed(plane, 1, lease_s=60.0)
    await plane.clear_samples("p", ids[:1], soon())
    assert await plane.ack("p", Claim("t", 1), ids, soon()) == ids[2:]
    assert await plane.ack("p", Claim("u", 1), ids[1:2], soon()) == ids[1:2]
    assert await plane.ack("p", Claim("t", 9), ids[2:3], soon()) == ids[2:3]
    assert await plane.ack("nowhere", Claim("t", 1), ids, soon()) == []
