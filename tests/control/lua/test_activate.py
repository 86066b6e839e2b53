from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from tests.control.build import claim, claimed, handle, soon, write
from tests.control.proxy import CuttingProxy
from tests.control.state import Admin, Partition, dump
from tq_redis.config import RedisConfig
from tq_redis.control.connection import RedisConnection
from tq_redis.control.freeze import Freeze
from tq_redis.control.plane import ControlPlane
from tq_redis.deadline import Deadline
from tq_redis.errors import DeadlineError

pytestmark = pytest.mark.asyncio


Staged = tuple[list[str], int]
"""Suffixes of the keys, and how many pages they have."""


async def staged(plane: ControlPlane, source: str, partition: str) -> Staged:
    """The state of one partition, staged as that of another."""
    suffixes: dict[str, None] = {}
    pages = 0
    async for suffix, kind, packed in plane.snapshot(source, soon()):
        items = msgspec.msgpack.decode(packed, type=list[str])
        if not suffix:
            summary = dict(zip(items[::2], items[1::2], strict=True))
            del summary["expires_at"]
            summary["generation"] = "77"
            items = [text for pair in summary.items() for text in pair]
        suffixes[suffix] = None
        pages += 1
        await plane.stage(
            partition, "l", suffix, kind, items, 60, soon(), number=pages, handles=["h"]
        )
    return list(suffixes), pages


async def filled(plane: ControlPlane) -> tuple[Staged, list[int]]:
    """Partition ``new`` is to take the place of ``p``, which has other rows."""
    put = write(4, ["x"], keys=list("abcd"), tags=[{"n": 1}] * 4)
    ids = (await plane.produce("new", put, soon())).ids
    return await staged(plane, "new", "p"), ids


async def empty(plane: ControlPlane, generations: Sequence[str] | None) -> None:
    assert generations is not None
    for generation in generations:
        await plane.empty_trash("p", generation, soon())


async def test_a_partition_takes_the_place_of_the_one_that_is_there(
    plane: ControlPlane, admin: Admin
) -> None:
    old = write(3, ["old"], keys=list("abc"), tags=[{"o": 1}] * 3, groups=list("ggg"))
    await plane.produce("p", old, soon())
    await claimed(plane, 1, fields=["old"], lease_s=60)
    state, ids = await filled(plane)
    generations = await plane.activate("p", "l", *state, soon())
    Partition(admin, plane.keys.summary("p")).check()
    assert (await plane.describe("p", soon())).ids == ids
    assert await plane.fields("p", soon()) == ["x"]
    assert (await claimed(plane, 2)).ids == ids[:2]
    assert generations is not None
    (generation,) = generations
    assert await plane.trash("p", generation, soon()) == [handle(old)]
    key = plane.keys.summary("p")
    left = [
        name for name in admin.scan_iter(f"{key}*", count=1000) if ":old" in name or "load" in name
    ]
    assert left == []
    assert not admin.exists(f"{key}:tag:o", f"{key}:group", f"{key}:claims:t")
    await empty(plane, generations)


async def test_where_there_was_none_before(plane: ControlPlane, admin: Admin) -> None:
    state, ids = await filled(plane)
    assert await plane.activate("p", "l", *state, soon()) == []
    Partition(admin, plane.keys.summary("p")).check()
    assert await plane.partitions(soon()) == ["new", "p"]
    assert (await plane.describe("p", soon())).ids == ids


@pytest.mark.parametrize("gone", ["a key", "the last page"])
async def test_nothing_is_done_when_some_of_it_is_gone(
    plane: ControlPlane, admin: Admin, gone: str
) -> None:
    """It has expired, or a server that took over had not got it."""
    await plane.produce("p", write(3, ["old"]), soon())
    state, _ = await filled(plane)
    if gone == "a key":
        admin.delete(plane.keys.staged("p", "l", "field:x"))
    else:
        admin.set(plane.keys.staged_pages("p", "l"), state[1] - 1, ex=60)
    before = dump(admin, plane.keys.namespace)
    assert await plane.activate("p", "l", *state, soon()) is None
    assert dump(admin, plane.keys.namespace) == before
    assert await plane.activate("none", "l", [""], 1, soon()) is None
    assert await plane.partitions(soon()) == ["new", "p"]
    await plane.unstage("p", "l", state[0], soon())


async def test_it_is_done_once_though_the_reply_was_lost(
    plane: ControlPlane, redis_url: str
) -> None:
    await plane.produce("p", write(3, ["old"]), soon())
    state, ids = await filled(plane)
    async with CuttingProxy(redis_url, b"EVALSHA") as proxy:
        connection = RedisConnection(proxy.url, RedisConfig())
        cut = ControlPlane(connection, plane.keys.namespace, 1000)
        await claim(cut, 1, task="other")  # the proxy's server has the scripts, and lifetimes
        proxy.cuts = 1
        await empty(plane, await cut.activate("p", "l", *state, soon()))
        await cut.close()
    assert proxy.lost == 1
    assert (await plane.describe("p", soon())).ids == ids


async def test_it_waits_for_a_save(plane: ControlPlane) -> None:
    await plane.produce("p", write(3, ["old"]), soon())
    state, ids = await filled(plane)
    async with Freeze(plane) as freeze:
        await freeze.all(soon())
        with pytest.raises(DeadlineError, match="being saved"):
            await plane.activate("p", "l", *state, Deadline(0.2))
        await freeze.keep("p", soon())
        assert await plane.activate("p", "l", *state, soon()) == []  # the save frees bytes
    assert (await plane.describe("p", soon())).ids == ids
    await empty(plane, await plane.trashes("p", soon()))


async def test_who_waits_for_samples_is_woken(plane: ControlPlane) -> None:
    state, ids = await filled(plane)
    waiting = asyncio.ensure_future(plane.wait("p", "0-0", Deadline(10)))
    await plane.describe("new", soon())
    await plane.activate("p", "l", *state, soon())
    async with asyncio.timeout(3):
        await waiting
    assert (await claimed(plane, 4)).ids == ids
