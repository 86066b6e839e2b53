from __future__ import annotations

import pytest

from tests.control.build import claimed, soon, write
from tests.control.state import Admin
from tq_redis.control.plane import ControlPlane
from tq_redis.metadata import Claim

pytestmark = pytest.mark.asyncio


async def test_the_lease_runs_from_now_on(plane: ControlPlane, admin: Admin) -> None:
    await plane.produce("p", write(1, ["x"]), soon())
    await claimed(plane, 1, lease_s=50.0)
    leases = f"{plane.keys.summary('p')}:leases:t"
    before = float(str(admin.zscore(leases, "1")))
    assert await plane.renew("p", Claim("t", 1), 100.0, soon()) == 100.0
    after = float(str(admin.zscore(leases, "1")))
    assert 50_000 <= after - before < 60_000
    assert await plane.renew("p", Claim("t", 1), None, soon()) == 50.0


async def test_a_claim_that_has_ended(plane: ControlPlane, admin: Admin) -> None:
    ids = (await plane.produce("p", write(2, ["x"]), soon())).ids
    await claimed(plane, 1, lease_s=50.0)
    await plane.ack("p", Claim("t", 1), ids[:1], soon())
    await claimed(plane, 1)
    for claim in (Claim("t", 1), Claim("t", 2), Claim("u", 1)):
        assert await plane.renew("p", claim, 10.0, soon()) is None
    assert await plane.renew("nowhere", Claim("t", 1), None, soon()) is None
    assert not admin.exists(f"{plane.keys.summary('p')}:leases:t")
