from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.control.build import claim, soon, write
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Rows, Write
from tq_redis.errors import PartitionNotFoundError
from tq_redis.metadata import FieldSchema

pytestmark = pytest.mark.asyncio

DENSE = FieldSchema("dense", "float32", (3,))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
TAGS = st.dictionaries(st.text(min_size=1), JSON, max_size=4)


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that look at three rows of two fields."""
    monkeypatch.setattr("tq_redis.control.plane.CELLS_PER_CALL", 15)


async def test_all_rows_by_page(plane: ControlPlane, small_pages: None) -> None:
    ids = (await plane.produce("p", write(7, ["x"], keys=list("abcdefg")), soon())).ids
    await plane.produce("p", write(2, ["y"], ids=ids[5:]), soon())
    await plane.set_tags("p", ids[3:4], [{"t": 1}], soon())
    await claim(plane, 2)
    rows = await plane.describe("p", soon(), task="t")
    assert rows == Rows(
        ids=ids,
        keys=list("abcdefg"),
        tags=[{}, {}, {}, {"t": 1}, {}, {}, {}],
        schema={"x": DENSE, "y": DENSE},
        produced={"x": [True] * 7, "y": [False] * 5 + [True] * 2},
        states=["consumed", "consumed", "open", "open", "open", "open", "open"],
        groups=[],
    )
    assert rows.common_fields() == ["x"]


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tags=st.lists(TAGS, min_size=1, max_size=6))
async def test_any_tags(plane: ControlPlane, tags: list[dict[str, Any]]) -> None:
    ids = (await plane.produce("p", write(len(tags), tags=tags), soon())).ids
    found = await plane.describe("p", soon(), ids=ids)
    assert found.tags == tags


@pytest.mark.parametrize("count", [1, 3, 6, 7])
async def test_the_last_page_may_be_full(
    plane: ControlPlane, small_pages: None, count: int
) -> None:
    ids = (await plane.produce("p", write(count, ["x", "y"]), soon())).ids
    assert (await plane.describe("p", soon())).ids == ids


async def test_rows_by_id_in_their_order(plane: ControlPlane, small_pages: None) -> None:
    ids = (await plane.produce("p", write(9, ["x"], keys=list("abcdefghi")), soon())).ids
    picked = [ids[i] for i in (8, 0, 0, 4, 3, 2, 7)]
    rows = await plane.describe("p", soon(), ids=picked, fields=())
    assert rows.ids == picked
    assert rows.keys == list("iaaedch")
    assert rows.schema == {}
    assert (await plane.describe("p", soon(), ids=[999])).keys == [None]


async def test_rows_by_key_in_their_order(plane: ControlPlane, small_pages: None) -> None:
    keys = [f"k{i}" for i in range(8)]
    ids = (await plane.produce("p", write(8, ["x", "y"], keys=keys), soon())).ids
    rows = await plane.describe("p", soon(), keys=["k7", "unknown", "k0", "k7", "k1"])
    assert rows.ids == [ids[7], 0, ids[0], ids[7], ids[1]]
    assert rows.keys == ["k7", None, "k0", "k7", "k1"]
    assert rows.produced["x"] == [True, False, True, True, True]


async def test_nothing_asked_for_nothing_told(plane: ControlPlane) -> None:
    await plane.produce("p", write(2, ["x"]), soon())
    assert (await plane.describe("p", soon(), ids=[])).ids == []
    assert (await plane.describe("p", soon(), keys=[])).ids == []


async def test_only_the_fields_asked_for(plane: ControlPlane) -> None:
    await plane.produce("p", write(1, ["x", "y"]), soon())
    rows = await plane.describe("p", soon(), fields=["y", "no such field"])
    assert rows.schema == {"y": DENSE}
    assert rows.produced == {"y": [True]}


async def test_samples_without_key_or_field(plane: ControlPlane) -> None:
    await plane.produce("p", Write(2), soon())
    rows = await plane.describe("p", soon(), task="t")
    assert rows == Rows([1, 2], [None, None], [{}, {}], {}, {}, ["open"] * 2, [])


async def test_a_field_that_appears_between_two_pages(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, small_pages: None
) -> None:
    ids = (await plane.produce("p", write(6, ["x"]), soon())).ids

    async def appear() -> None:
        await plane.produce("p", write(6, ["y"], ids=ids), soon())

    _before_page(plane, monkeypatch, 2, appear)
    rows = await plane.describe("p", soon())
    assert rows.produced["x"] == [True] * 6
    assert len(rows.produced["y"]) == 6
    assert not rows.produced["y"][0]
    assert rows.produced["y"][5]


async def test_a_partition_made_anew_between_two_pages(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, small_pages: None
) -> None:
    await plane.produce("p", write(6, ["x"]), soon())

    async def make_anew() -> None:
        await plane.clear_partition("p", soon())
        await plane.produce("p", write(1, ["y"]), soon())

    _before_page(plane, monkeypatch, 2, make_anew)
    rows = await plane.describe("p", soon())
    assert {len(flags) for flags in rows.produced.values()} == {len(rows.ids)}


def _before_page(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, page: int, action: Any
) -> None:
    """Run ``action`` before the call that reads this page."""
    run, pages = plane.connection.run, 0

    async def run_with_action(verb: str, *rest: Any) -> bytes:
        nonlocal pages
        if verb == "describe":
            pages += 1
            if pages == page:
                await action()
        return await run(verb, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(plane.connection, "run", run_with_action)


async def test_a_partition_that_does_not_exist(plane: ControlPlane) -> None:
    await plane.produce("train_1", write(1, ["x"]), soon())
    for select in ({}, {"ids": [1]}, {"keys": ["k"]}):
        with pytest.raises(PartitionNotFoundError, match="Did you mean 'train_1'"):
            await plane.describe("train1", soon(), **select)  # type: ignore[arg-type]


async def test_groups_and_states(plane: ControlPlane) -> None:
    await plane.produce("p", write(2, ["x"], groups=["", "b:="]), soon())
    await plane.produce("p", write(2, ["x"]), soon())
    await claim(plane, 1)
    await claim(plane, 1, lease_s=60.0)
    rows = await plane.describe("p", soon(), fields=(), task="t", groups=True)
    assert rows.groups == ["", "b:=", None, None]
    assert rows.states == ["consumed", "leased", "open", "open"]
