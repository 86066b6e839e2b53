"""A reply is lost after the server has run the command, and the command is sent again."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.control.build import handle, soon, write
from tests.control.conftest import IDLE_TTL_S
from tests.control.proxy import CuttingProxy
from tests.control.state import Admin
from tq_redis.config import RedisConfig
from tq_redis.control.connection import RedisConnection
from tq_redis.control.owner import Ownership
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Claimed

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
    await plane.claim("p", "other", ["x"], 1, "me", soon())
    proxy.cuts = times
    found = await cut.claim("p", "t", ["x"], 8, "me", soon())
    assert isinstance(found, Claimed)
    assert found.ids == ids[:8]
    assert proxy.lost == times
    assert (await plane.summary("p", soon()))["consumed:t"] == 8
    rows = await plane.describe("p", soon(), task="t")
    assert sum(rows.consumed) == 8


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
