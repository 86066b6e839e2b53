from __future__ import annotations

import pytest

from tests.control.build import soon, write
from tests.control.state import Admin
from tq_redis.control.plane import ControlPlane

pytestmark = pytest.mark.asyncio

PAGES = {
    "field:x": ("hash", ["1", "1:0", "2", "1:1"]),
    "samples": ("zset", ["1", "1", "2", "2"]),
    "tagnames": ("set", ["n", "m"]),
    "": ("hash", ["samples", "2"]),
}


async def test_pages_are_written_beside_the_partition(plane: ControlPlane, admin: Admin) -> None:
    await plane.produce("p", write(1, ["x"]), soon())
    before = await plane.summary("p", soon())
    for number, (suffix, (kind, items)) in enumerate(PAGES.items(), 1):
        for _ in range(2):  # may be repeated
            assert await plane.stage("p", "l", suffix, kind, items, 50, soon(), number=number)
    more = ("field:x", "hash", ["3", "1:2"], 60)
    assert await plane.stage("p", "l", *more, soon(), number=5, handles=["a", "b"])
    names = {suffix: plane.keys.staged("p", "l", suffix) for suffix in PAGES}
    assert admin.hgetall(names["field:x"]) == {"1": "1:0", "2": "1:1", "3": "1:2"}
    assert admin.zrange(names["samples"], 0, -1, withscores=True) == [("1", 1.0), ("2", 2.0)]
    assert admin.smembers(names["tagnames"]) == {"n", "m"}
    assert admin.hgetall(names[""]) == {"samples": "2"}
    assert await plane.loading_blocks("p", soon()) == {"a", "b"}
    lifetimes = {suffix: admin.ttl(name) for suffix, name in names.items()}
    assert 50 < lifetimes.pop("field:x") <= 60
    assert all(0 < left <= 50 for left in lifetimes.values())
    assert 0 < admin.ttl(plane.keys.loading("p")) <= 60
    assert await plane.summary("p", soon()) == before
    await plane.unstage("p", "l", list(PAGES), soon())
    assert list(admin.scan_iter(f"{plane.keys.summary('p')}:load*", count=1000)) == []


async def test_a_page_whose_predecessor_was_lost_is_refused(
    plane: ControlPlane, admin: Admin
) -> None:
    page = ("hash", ["1", "1"], 60)
    assert await plane.stage("p", "l", "group", *page, soon(), number=1)
    assert not await plane.stage("p", "l", "keys", *page, soon(), number=3)
    admin.delete(plane.keys.staged_pages("p", "l"))
    assert not await plane.stage("p", "l", "keys", *page, soon(), number=2)
    assert not admin.exists(plane.keys.staged("p", "l", "keys"))
    await plane.unstage("p", "l", ["group"], soon())


async def test_a_large_page(plane: ControlPlane, admin: Admin) -> None:
    items = [text for number in range(20_000) for text in (str(number), str(number))]
    await plane.stage("p", "l", "samples", "zset", items, 60, soon(), number=1)
    await plane.stage("p", "l", "group", "hash", items, 60, soon(), number=2)
    assert admin.zcard(plane.keys.staged("p", "l", "samples")) == 20_000
    assert admin.hlen(plane.keys.staged("p", "l", "group")) == 20_000
    await plane.unstage("p", "l", ["samples", "group"], soon())
