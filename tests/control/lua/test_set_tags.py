from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.control.build import soon, write
from tests.control.state import Admin, dump
from tq_redis.control.plane import ControlPlane
from tq_redis.errors import InputError, PartitionNotFoundError, SampleNotFoundError

pytestmark = pytest.mark.asyncio


async def tags_of(plane: ControlPlane) -> list[dict[str, Any]]:
    return (await plane.describe("p", soon())).tags


async def test_rows_have_exactly_these_tags(plane: ControlPlane) -> None:
    tags = [{"a": 1, "b": 2}, {"a": 3}, {"c": 4}]
    ids = (await plane.produce("p", write(3, tags=tags), soon())).ids
    assert await tags_of(plane) == tags
    await plane.set_tags("p", [ids[2], ids[0]], [{"a": 5}, {}], soon())
    assert await tags_of(plane) == [{}, {"a": 3}, {"a": 5}]


async def test_many_rows_in_several_steps(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tq_redis.control.plane.CELLS_PER_CALL", 10)
    ids = (await plane.produce("p", write(33), soon())).ids
    tags = [{"row": row} for row in range(33)]
    await plane.set_tags("p", ids, tags, soon())
    assert await tags_of(plane) == tags


async def test_values_come_back_as_they_were(plane: ControlPlane) -> None:
    values: list[Any] = [
        None, True, False, 0, -1, 2**60, 0.1, 1e300, "", "null", 'a"\\', "汉字 🙂\x00", [], {},
        [1, [2.5, None]], {"k": {"l": ["m"]}},
    ]  # fmt: skip
    ids = (await plane.produce("p", write(len(values)), soon())).ids
    tags = [{"v {}:é": value} for value in values]
    await plane.set_tags("p", ids, tags, soon())
    got = await tags_of(plane)
    assert got == tags
    assert [type(row["v {}:é"]) for row in got] == [type(value) for value in values]


async def test_scalars_of_numpy_are_numbers(plane: ControlPlane) -> None:
    ids = (await plane.produce("p", write(1), soon())).ids
    tag = {"f": np.float32(0.5), "d": np.float64(0.1), "i": np.int64(7), "b": np.bool_(True)}
    await plane.set_tags("p", ids, [tag], soon())
    assert await tags_of(plane) == [{"f": 0.5, "d": 0.1, "i": 7, "b": True}]


@pytest.mark.parametrize(
    "value", [torch.ones(2), {1, 2}.pop, object(), np.ones(2), "\ud800", {"deep": [object()]}]
)
async def test_what_is_not_json_is_refused_by_name(
    plane: ControlPlane, admin: Admin, value: Any
) -> None:
    ids = (await plane.produce("p", write(2, tags=[{"a": 1}, {"a": 2}]), soon())).ids
    before = dump(admin, plane.keys.namespace)
    with pytest.raises(InputError, match="'score'"):
        await plane.set_tags("p", ids, [{"a": 3}, {"score": value}], soon())
    with pytest.raises(InputError, match="'score'"):
        await plane.produce("p", write(1, tags=[{"score": value}]), soon())
    assert dump(admin, plane.keys.namespace) == before


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, np.float32("nan"), [1.0, {"x": -math.inf}], (None, math.nan)]
)
async def test_numbers_that_json_lacks_are_refused(plane: ControlPlane, value: Any) -> None:
    """They would come back as None."""
    with pytest.raises(InputError, match="'score'.*NaN"):
        await plane.produce("p", write(1, tags=[{"score": value}]), soon())


async def test_stale_rows_are_named_and_nothing_is_written(
    plane: ControlPlane, admin: Admin
) -> None:
    ids = (await plane.produce("p", write(3, tags=[{"a": 1}] * 3), soon())).ids
    await plane.clear_samples("p", ids[:1], soon())
    before = dump(admin, plane.keys.namespace)
    with pytest.raises(SampleNotFoundError) as caught:
        await plane.set_tags("p", ids, [{"b": 1}] * 3, soon())
    assert caught.value.rows == (ids[0],)
    assert dump(admin, plane.keys.namespace) == before
    with pytest.raises(PartitionNotFoundError):
        await plane.set_tags("q", ids, [{"b": 1}] * 3, soon())
