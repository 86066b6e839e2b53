"""A claim whose reply nobody will read. On the wire: tests/control/test_cancelled.py."""

from __future__ import annotations

import pytest

from tests.control.build import soon, write
from tests.control.state import Admin, Partition
from tq_redis.control.keys import index_name
from tq_redis.control.packing import arguments
from tq_redis.control.plane import ControlPlane
from tq_redis.control.replies import ClaimReply, decode

pytestmark = pytest.mark.asyncio

COMMON = {"request": "r1", "request_ttl": 60, "idle_ttl": 1000, "task": "t"}


async def claim(plane: ControlPlane, lease: int) -> ClaimReply:
    values = COMMON | {
        "fields": ["x"],
        "count": 2,
        "need": 2,
        "lease": lease,
        "limit": 1,
        "group_size": 0,
        "index": index_name("t", 0, ["x"]),
        "consumer": "me",
        "cells": 1000,
    }
    raw = await plane.connection.run("claim", plane.keys.summary("p"), arguments(values), soon())
    return decode(raw, ClaimReply)


async def cancel(plane: ControlPlane) -> None:
    await plane.connection.run("cancel", plane.keys.summary("p"), arguments(COMMON), soon())


@pytest.mark.parametrize("lease", [0, 60_000])
async def test_a_claim_that_ran_is_undone(plane: ControlPlane, admin: Admin, lease: int) -> None:
    await plane.produce("p", write(3, ["x"]), soon())
    assert (await claim(plane, lease)).ids == [1, 2]
    await cancel(plane)
    await cancel(plane)
    key = plane.keys.summary("p")
    Partition(admin, key).check()
    assert admin.zrange(f"{key}:ready:t:0:x", 0, -1) == ["1", "2", "3"]
    for name in ("task", "claims", "leases"):
        assert not admin.exists(f"{key}:{name}:t")
    # It was no delivery: of the one that is allowed, none is used up.
    assert set(admin.hvals(f"{key}:deliveries:t")) <= {"0"}


@pytest.mark.parametrize("lease", [0, 60_000])
async def test_a_claim_that_comes_later_does_nothing(plane: ControlPlane, lease: int) -> None:
    await plane.produce("p", write(3, ["x"]), soon())
    await cancel(plane)
    assert (await claim(plane, lease)).code == "cancelled"
    summary = await plane.summary("p", soon())
    assert summary.get("consumed:t", 0) == summary.get("claimed:t", 0) == 0


async def test_what_was_done_meanwhile_stays(plane: ControlPlane, admin: Admin) -> None:
    await plane.produce("p", write(3, ["x"]), soon())
    await claim(plane, 0)
    await plane.clear_samples("p", [1], soon())
    await cancel(plane)
    key = plane.keys.summary("p")
    Partition(admin, key).check()
    assert admin.zrange(f"{key}:ready:t:0:x", 0, -1) == ["2", "3"]
