from __future__ import annotations

import pytest

from tests.control.build import soon, write
from tests.control.state import Admin
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Changes, Version
from tq_redis.errors import PartitionNotFoundError

pytestmark = pytest.mark.asyncio

NEW = {"status": "new"}
DONE = {"status": "done"}


async def version(plane: ControlPlane) -> Version:
    return (await plane.changes("p", None, soon())).version


async def tags_since(plane: ControlPlane, since: Version) -> dict[str, dict[str, str] | None]:
    changes = await plane.changes("p", since, soon())
    assert not changes.whole
    assert changes.tags.keys() == changes.samples.keys()
    return {key: changes.tags[key] if sample else None for key, sample in changes.samples.items()}


async def test_nothing_has_changed(plane: ControlPlane) -> None:
    await plane.produce("p", write(2, ["x"], keys=["a", "b"]), soon())
    since = await version(plane)
    assert await plane.changes("p", since, soon()) == Changes(since, False, {}, {})


async def test_who_knows_nothing_is_told_all(plane: ControlPlane) -> None:
    await plane.produce("p", write(2, ["x"], keys=["a", "b"]), soon())
    await plane.produce("p", write(1, ["x"]), soon())
    found = await plane.changes("p", None, soon())
    assert found.whole
    assert (found.samples, found.tags) == ({"a": 1, "b": 2}, {"a": {}, "b": {}})


async def test_new_keys_changed_tags_and_cleared_ones(plane: ControlPlane) -> None:
    await plane.produce("p", write(3, ["x"], keys=["a", "b", "c"], tags=[NEW] * 3), soon())
    since = await version(plane)
    await plane.produce("p", write(2, ["x"], keys=["c", "d"]), soon())
    assert await tags_since(plane, since) == {"d": {}}
    a, b = (await plane.describe("p", soon(), keys=["a", "b"])).ids
    await plane.produce("p", write(1, ids=[a], tags=[{"n": "1"}]), soon())
    await plane.set_tags("p", [b], [DONE], soon())
    assert await tags_since(plane, since) == {"d": {}, "a": {**NEW, "n": "1"}, "b": DONE}
    await plane.clear_samples("p", [b], soon())
    assert (await tags_since(plane, since))["b"] is None
    await plane.produce("p", write(1, ["x"], keys=["b"]), soon())
    assert (await tags_since(plane, since))["b"] == {}


async def test_columns_and_rows_without_a_key_are_no_change(plane: ControlPlane) -> None:
    ids = (await plane.produce("p", write(2, ["x"], keys=["a", "b"]), soon())).ids
    since = await version(plane)
    await plane.produce("p", write(2, ["y"], ids=ids), soon())
    await plane.produce("p", write(2, ["y"], keys=["a", "b"]), soon())
    plain = (await plane.produce("p", write(2, ["x"], tags=[NEW] * 2), soon())).ids
    await plane.set_tags("p", plain, [DONE] * 2, soon())
    await plane.clear_samples("p", plain, soon())
    assert await tags_since(plane, since) == {}


async def test_another_partition_of_that_name_is_to_be_listed(plane: ControlPlane) -> None:
    await plane.produce("p", write(2, ["x"], keys=["a", "b"]), soon())
    since = await version(plane)
    await plane.clear_partition("p", soon())
    with pytest.raises(PartitionNotFoundError):
        await plane.changes("p", since, soon())
    await plane.produce("p", write(2, ["x"], keys=["a", "b"]), soon())
    found = await plane.changes("p", since, soon())
    assert found.whole
    assert found.version.generation != since.generation


async def test_many_changes_come_in_several_steps(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_redis.control.plane.CELLS_PER_CALL", 10)
    await plane.produce("p", write(1, ["x"], keys=["first"]), soon())
    since = await version(plane)
    keys = [f"k{number}" for number in range(33)]
    await plane.produce("p", write(33, ["x"], keys=keys, tags=[NEW] * 33), soon())
    assert await tags_since(plane, since) == dict.fromkeys(keys, NEW)


async def test_old_changes_are_forgotten(plane: ControlPlane, admin: Admin) -> None:
    first = await version_after(plane, "k", 0)
    second = await version_after(plane, "k", 1)
    kept = 16384
    step = 1024
    for start in range(0, kept, step):
        keys = [f"other{number}" for number in range(start, start + step)]
        await plane.produce("p", write(step, keys=keys), soon())
    assert admin.zcard(f"{plane.keys.summary('p')}:changes") == kept
    assert (await plane.changes("p", first, soon())).whole
    assert len(await tags_since(plane, second)) == kept


async def version_after(plane: ControlPlane, name: str, number: int) -> Version:
    await plane.produce("p", write(1, ["x"], keys=[f"{name}{number}"]), soon())
    return await version(plane)
