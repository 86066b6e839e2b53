from __future__ import annotations

from collections import defaultdict

import msgspec
import pytest

from tests.control.build import claim, claimed, soon, write
from tests.control.state import Admin
from tq_redis.control import snapshots
from tq_redis.control.plane import ControlPlane

pytestmark = pytest.mark.asyncio


async def keys_of(plane: ControlPlane) -> dict[tuple[str, str], list[str]]:
    """Everything that a snapshot gives, pages joined."""
    found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    async for suffix, kind, items in plane.snapshot("p", soon()):
        found[suffix, kind] += msgspec.msgpack.decode(items, type=list[str])
    return dict(found)


async def test_all_that_a_load_cannot_make_anew(plane: ControlPlane, admin: Admin) -> None:
    put = write(8, ["x", "y"], keys=list("abcdefgh"), groups=list("gghhiijj"), tags=[{"n": 1}] * 8)
    ids = (await plane.produce("p", put, soon())).ids
    await plane.produce("p", write(8, ["x"], ids=ids), soon())
    await claimed(plane, 2, group_size=2)
    await claimed(plane, 2, group_size=2, lease_s=60, draw="0:0")
    await claim(plane, 99, task="waits")
    found = await keys_of(plane)
    key = plane.keys.summary("p")
    left_out = {":changes", ":events", ":freed", ":leases:t", ":waiters"}
    there = {
        name.removeprefix(key)
        for name in admin.scan_iter(f"{key}*", count=1000)
        if ":req:" not in name and ":ready:" not in name
    }
    assert {f":{suffix}" if suffix else "" for suffix, _ in found} == there - left_out
    for suffix, kind in found:
        assert admin.type(f"{key}:{suffix}" if suffix else key) == kind
    pairs = found["field:x", "hash"]
    assert dict(zip(pairs[::2], pairs[1::2], strict=True)) == admin.hgetall(f"{key}:field:x")
    scores = found["samples", "zset"]
    assert sorted(map(int, scores[::2])) == ids
    assert scores[::2] == scores[1::2]
    assert found["tagnames", "set"] == ["n"]


async def test_large_keys_come_in_pages(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "_ENTRIES_PER_PAGE", 100)
    ids = (await plane.produce("p", write(3000, ["x"]), soon())).ids
    pages = [s async for s, _, _ in plane.snapshot("p", soon())]
    assert 15 < pages.count("field:x") < 60
    found = (await keys_of(plane))["field:x", "hash"]
    assert sorted({int(sample) for sample in found[::2]}) == ids


async def test_nothing_is_written(plane: ControlPlane, admin: Admin) -> None:
    await plane.produce("p", write(3, ["x"]), soon())
    before = admin.info("commandstats")
    await keys_of(plane)
    after = admin.info("commandstats")
    for command in ("hset", "zadd", "sadd", "set", "expireat", "xadd", "del", "unlink"):
        name = f"cmdstat_{command}"
        assert before.get(name, {}).get("calls") == after.get(name, {}).get("calls"), command


async def test_a_partition_that_is_not_there(plane: ControlPlane) -> None:
    assert await keys_of(plane) == {}
