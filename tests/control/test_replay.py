"""A reply is lost after the server has run the command, and the command is sent again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from tests.control.build import claim, claimed, handle, soon, write
from tests.control.conftest import IDLE_TTL_S
from tests.control.proxy import CuttingProxy
from tests.control.state import Admin
from tq_redis.config import RedisConfig
from tq_redis.control.connection import RedisConnection
from tq_redis.control.owner import Ownership
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Lost, Wanted
from tq_redis.control.replies import ClaimReply
from tq_redis.metadata.claim import Claim

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def proxy(redis_url: str) -> AsyncIterator[CuttingProxy]:
    async with CuttingProxy(redis_url, b"EVALSHA") as proxy:
        yield proxy


@pytest_asyncio.fixture
async def cut(proxy: CuttingProxy, plane: ControlPlane) -> AsyncIterator[ControlPlane]:
    """The same namespace, seen through the proxy."""
    connection = RedisConnection(proxy.url, RedisConfig())
    yield ControlPlane(connection, plane.keys.namespace, IDLE_TTL_S)
    await connection.close()


@pytest.mark.parametrize("times", [1, 3])
async def test_a_claim_is_made_once(
    cut: ControlPlane, plane: ControlPlane, proxy: CuttingProxy, times: int
) -> None:
    ids = (await plane.produce("p", write(20, ["x"]), soon())).ids
    await claim(plane, 1, task="other")
    proxy.cuts = times
    assert (await claimed(cut, 8)).ids == ids[:8]
    assert proxy.lost == times
    assert (await plane.summary("p", soon()))["consumed:t"] == 8
    rows = await plane.describe("p", soon(), task="t")
    assert rows.states == ["consumed"] * 8 + ["open"] * 12


@pytest.mark.parametrize("times", [1, 3])
async def test_a_put_is_made_once(
    cut: ControlPlane, plane: ControlPlane, proxy: CuttingProxy, times: int
) -> None:
    await plane.produce("p", write(1, ["x"]), soon())
    proxy.cuts = times
    put = write(4, ["x", "y"], keys=list("abcd"))
    ids = (await cut.produce("p", put, soon())).ids
    assert proxy.lost == times
    assert (await plane.describe("p", soon(), keys=list("abcd"))).ids == ids
    summary = await plane.summary("p", soon())
    assert [summary[name] for name in ("samples", "produced:x", "produced:y")] == [5, 5, 4]
    proxy.cuts = times
    again = await cut.produce("p", write(4, ["x", "y"], ids=ids), soon())
    assert (again.ids, again.freed) == (ids, [handle(put)])


async def test_the_first_put_is_listed(
    cut: ControlPlane, plane: ControlPlane, proxy: CuttingProxy
) -> None:
    proxy.cuts = 1
    await cut.produce("p", write(1, ["x"]), soon())
    assert await plane.partitions(soon()) == ["p"]


async def test_a_clear_tells_again_what_to_free(
    cut: ControlPlane, plane: ControlPlane, proxy: CuttingProxy
) -> None:
    put = write(4, ["x"])
    ids = (await plane.produce("p", put, soon())).ids
    proxy.cuts = 1
    assert await cut.clear_samples("p", ids, soon()) == [handle(put)]
    assert (await plane.summary("p", soon()))["samples"] == 0
    kept = write(2, ["x"])
    await plane.produce("p", kept, soon())
    proxy.cuts = 1
    (generation,) = await cut.clear_partition("p", soon())
    assert set(await plane.trash("p", generation, soon())) == {handle(put), handle(kept)}
    assert proxy.lost == 2


async def test_a_loss_is_told_again(
    cut: ControlPlane, plane: ControlPlane, proxy: CuttingProxy
) -> None:
    put = replace(write(4, ["x"]), task="t")
    ids = (await plane.produce("p", put, soon())).ids
    held, _ = await leased(plane)
    proxy.cuts = 1
    lost = await cut.mark_lost("p", ids, ["x"], [handle(put)], soon())
    assert lost == Lost({"x": ids}, {"t": ids}, [], [handle(put)])
    assert await plane.ack("p", held, ids, soon()) == ids
    summary = await plane.summary("p", soon())
    assert [summary[name] for name in ("produced:x", "claimed:t", "lost")] == [0, 0, 4]
    assert proxy.lost == 1


async def test_tags_are_set(cut: ControlPlane, plane: ControlPlane, proxy: CuttingProxy) -> None:
    ids = (await plane.produce("p", write(2), soon())).ids
    proxy.cuts = 1
    await cut.set_tags("p", ids, [{"a": 1}, {}], soon())
    assert (await plane.describe("p", soon())).tags == [{"a": 1}, {}]
    assert proxy.lost == 1


async def test_ownership_is_taken_and_given_up(
    cut: ControlPlane, proxy: CuttingProxy, admin: Admin
) -> None:
    ownership = Ownership(cut.connection, cut.keys)
    for call in (ownership.take, ownership.renew, ownership.give_up):
        proxy.cuts = 1
        await call(soon())
    assert proxy.lost == 3
    assert admin.get(cut.keys.owner) is None


# Leases


def counts(summary: dict[str, int | str]) -> list[int | str]:
    return [summary.get(f"{name}:t", 0) for name in ("claimed", "consumed", "set_aside")]


async def leased(plane: ControlPlane, count: int = 4) -> tuple[Claim, list[int]]:
    found = await claimed(plane, count, lease_s=1000.0, max_deliveries=1)
    (held,) = set(found.claims)
    assert held is not None
    return held, found.ids


@pytest.mark.parametrize("flush", [True, False])
async def test_what_becomes_of_leased_samples(
    cut: ControlPlane, plane: ControlPlane, proxy: CuttingProxy, admin: Admin, flush: bool
) -> None:
    await plane.produce("p", write(12, ["x"]), soon())

    def lose() -> None:
        proxy.cuts = 1
        if flush:
            admin.script_flush()

    await claim(plane, 99)
    lose()
    held, ids = await leased(cut)
    lose()
    assert await cut.ack("p", held, ids[:2], soon()) == []
    lose()
    assert await cut.ack("p", held, ids[:3], soon()) == []
    assert counts(await plane.summary("p", soon())) == [1, 3, 0]
    lose()
    assert await cut.renew("p", held, None, soon()) == 1000.0
    lose()
    await cut.release("p", held, ids[2:], soon())  # delivered once: it is set aside
    assert counts(await plane.summary("p", soon())) == [0, 3, 1]
    lose()
    assert await cut.ack("p", held, ids, soon()) == ids[3:]
    lose()
    assert await cut.renew("p", held, None, soon()) is None
    held, ids = await leased(plane)
    lose()
    assert await cut.reset_consumption("p", "t", soon()) == 8
    assert counts(await plane.summary("p", soon())) == [0, 0, 0]
    assert (await claimed(plane, 12)).ids == list(range(1, 13))
    assert proxy.lost == 8


async def test_a_claim_is_cancelled_once(
    cut: ControlPlane, plane: ControlPlane, proxy: CuttingProxy
) -> None:
    """Also where the claim's own reply was lost before, and others claimed since."""
    await plane.produce("p", write(8, ["x"]), soon())
    await claim(plane, 99)
    wanted = Wanted("t", ["x"], 4, lease_s=1000.0)
    arguments = cut._claim_arguments(wanted, "me") | {"count": 4, "need": 4}
    proxy.cuts = 1
    await cut._run_again("p", "claim", "t", arguments, ClaimReply, soon(), "request")
    proxy.cuts = 1
    await cut._undo("p", "t", "request")
    _, ids = await leased(plane)
    assert ids == [1, 2, 3, 4]
    proxy.cuts = 1
    await cut._undo("p", "t", "request")
    assert counts(await plane.summary("p", soon())) == [4, 0, 0]
    late = await plane._run_again("p", "claim", "t", arguments, ClaimReply, soon(), "request")
    assert late.code == "cancelled"
    assert proxy.lost == 3


async def test_room_is_kept_and_made_once(
    cut: ControlPlane, plane: ControlPlane, proxy: CuttingProxy
) -> None:
    proxy.cuts = 1
    await cut.limit("p", "t", 4, "evict", soon())
    await plane.admit("p", "first", 4, 60, soon())
    put = write(4, ["x"])
    proxy.cuts = 1
    ids = (await cut.produce("p", put.within("first"), soon())).ids
    for _ in range(2):
        proxy.cuts = 1
        assert (await cut.admit("p", "second", 2, 60, soon())).full is None
    assert await plane.evicted("p", "t", soon()) == ids[:2]
    assert (await plane.summary("p", soon()))["evicted:t"] == 2
    proxy.cuts = 1
    await cut.limit("p", "t", None, "wait", soon())
    assert proxy.lost == 5


async def test_what_is_to_come_is_said_once(
    cut: ControlPlane, plane: ControlPlane, proxy: CuttingProxy
) -> None:
    for samples in (5, 3, None, None):
        proxy.cuts = 1
        await cut.expect("p", samples, soon())
    summary = await plane.summary("p", soon())
    assert summary["expected"] == 3
    assert "ended" in summary
    assert await plane.partitions(soon()) == ["p"]
    assert proxy.lost == 4
