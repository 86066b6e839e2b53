from __future__ import annotations

import pytest

from tests.control.build import claimed, soon, write
from tests.control.state import Admin, dump
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Ready, Wanted

pytestmark = pytest.mark.asyncio


async def ready(plane: ControlPlane, **wanted: object) -> Ready | None:
    asked = Wanted("t", ["x"], 1, **wanted)  # type: ignore[arg-type]
    found, _ = await plane.ready("p", asked, "me", soon())
    return found


async def test_all_that_is_ready_in_pages(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_redis.control.claims.ROWS_PER_CLAIM", 3)
    monkeypatch.setattr("tq_redis.control.asking._CELLS_PER_BUILD", 6)
    groups = ["", "=", "a:b", "", "c", "d", "e"]
    tags = [{"n": n} for n in range(7)]
    ids = (await plane.produce("p", write(7, ["x"], groups=groups, tags=tags), soon())).ids
    await plane.produce("p", write(1, ["y"]), soon())
    assert await ready(plane) == Ready(ids, list(groups), list(tags))
    await claimed(plane, 1)
    await claimed(plane, 1, lease_s=60.0)
    found = await ready(plane)
    assert found is not None
    assert found.ids == ids[2:]
    await plane.produce("p", write(1, ["x"]), soon())
    found = await ready(plane)
    assert found is not None
    assert found.groups[-1] is None


async def test_looking_claims_nothing(plane: ControlPlane, admin: Admin) -> None:
    await plane.produce("p", write(2, ["x"]), soon())
    await ready(plane)
    before = dump(admin, plane.keys.namespace)
    await ready(plane)
    assert dump(admin, plane.keys.namespace) == before


async def test_nothing_is_ready(plane: ControlPlane, admin: Admin) -> None:
    asked = Wanted("t", ["x"], 1)
    found, standing = await plane.ready("p", asked, "me", soon())
    assert (found, standing.exists) == (Ready([], [], []), False)
    assert dump(admin, plane.keys.namespace) == {}
    await plane.produce("p", write(2, ["y"]), soon())
    found, standing = await plane.ready("p", asked, "me", soon())
    assert (found, standing.exists, standing.ready) == (Ready([], [], []), True, 0)


async def test_a_draw_that_was_made(plane: ControlPlane) -> None:
    await plane.produce("p", write(4, ["x"]), soon())
    assert await ready(plane, draw="0:0") is not None
    await claimed(plane, 2, draw="0:0")
    assert await ready(plane, draw="0:0") is None
    found = await ready(plane, draw="0:1")
    assert found is not None
    assert found.ids == [3, 4]
