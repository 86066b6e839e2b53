from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from tq_redis.errors import InputError
from tq_redis.metadata.merge import copied_tags, merge_info, same_value

JAGGED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
OTHER_JAGGED = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged)

SAME: list[tuple[Any, Any]] = [
    (1, 1), (None, None), ("a", "a"), (1.5, 1.5), (math.nan, math.nan), ([1, [2]], [1, [2]]),
    ({"a": [1, math.nan]}, {"a": [1, math.nan]}), ((1,), (1,)),
    (torch.ones(2), torch.ones(2)), (torch.tensor([math.nan]), torch.tensor([math.nan])),
    (torch.ones(0), torch.ones(0)), (JAGGED, JAGGED.clone()),
    (np.ones(2), np.ones(2)), (np.array([math.nan]), np.array([math.nan])),
    (np.array(["a", None], object), np.array(["a", None], object)),
    ({"deep": [torch.ones(2)]}, {"deep": [torch.ones(2)]}),
]  # fmt: skip
DIFFERENT: list[tuple[Any, Any]] = [
    (1, 2), (1, "1"), (math.nan, 1.0), (1.0, math.nan), ([1], [1, 2]), ([1], 1),
    ({"a": 1}, {"b": 1}),
    ({"a": 1}, {"a": 2}), (torch.ones(2), torch.zeros(2)), (torch.ones(2), torch.ones(3)),
    (torch.ones(2), torch.ones(2, dtype=torch.int64)), (torch.ones(2), [1.0, 1.0]),
    (torch.ones(2), np.ones(2)), (np.ones(2), np.ones((2, 1))), (np.ones(2), 1.0),
    (np.ones(2), np.ones(2, np.int8)), (JAGGED, OTHER_JAGGED), (JAGGED, torch.ones(2)),
    ({"deep": [torch.ones(2)]}, {"deep": [torch.zeros(2)]}),
    (np.array(["a"], object), np.array(["b"], object)),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), SAME)
def test_the_same(a: Any, b: Any) -> None:
    assert same_value(a, b)
    assert merge_info([{"x": a}, {"x": b}, {"y": 1}]).keys() == {"x", "y"}


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_not_the_same(a: Any, b: Any) -> None:
    assert not same_value(a, b)
    assert not same_value(b, a)
    with pytest.raises(InputError, match=r"extra_info\['x'\] differs"):
        merge_info([{"x": a}, {"x": b}])


def test_merging_shares_nothing() -> None:
    info = {"x": {"y": [1]}}
    merge_info([info])["x"]["y"].append(2)
    assert info == {"x": {"y": [1]}}


def test_copied_tags_share_nothing_with_their_rows() -> None:
    rows: list[dict[str, Any]] = [{"n": 1, "text": "a", "none": None}, {"n": 2, "deep": {"a": [1]}}]
    before = copy.deepcopy(rows)
    copied = copied_tags(rows)
    assert copied == before
    for row in copied:
        row["n"] = 0
    copied[1]["deep"]["a"].append(2)
    assert rows == before
