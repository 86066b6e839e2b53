"""In which form columns come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tests.compat.peer import differs, stack, tq

pytestmark = pytest.mark.usefixtures("client")

jagged: Any = torch.jagged
nested: Any = torch.nested.as_nested_tensor


def round_trip(column: Any, rows: int = 2) -> Any:
    keys = [f"k{n}" for n in range(rows)]
    tq.kv_batch_put(keys, "p", TensorDict({"v": column}, batch_size=rows))
    return tq.kv_batch_get(keys, "p").get("v")


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(torch.arange(6).view(2, 3), id="equal shapes"),
        pytest.param(torch.arange(24.0).view(2, 3, 4), id="matrices"),
        pytest.param(torch.zeros(2, 0), id="empty rows"),
        pytest.param(torch.ones(2, 3, dtype=torch.bfloat16), id="bfloat16"),
        pytest.param(torch.ones(2, 3) > 0, id="bool"),
        pytest.param(nested([torch.ones(2), torch.ones(5)], layout=jagged), id="jagged"),
        pytest.param(
            nested([torch.ones(2), torch.ones(5)], layout=torch.strided), id="strided 1-D"
        ),
        pytest.param(
            nested([torch.ones(3, 2), torch.ones(3, 4)], layout=torch.strided), id="ragged in 2"
        ),
    ],
)
def test_tensors_with_a_dimension_come_back_jagged(rows: Any) -> None:
    got = round_trip(rows)
    assert got.is_nested
    assert got.layout == torch.jagged
    assert got.dtype == rows.dtype
    for mine, theirs in zip(got.unbind(), rows.unbind(), strict=True):
        assert torch.equal(mine, theirs)


def test_jagged_columns_can_be_padded() -> None:
    got = round_trip(torch.tensor([[1, 2], [3, 4]]))
    assert got.offsets().diff().tolist() == [2, 2]
    assert got.to_padded_tensor(padding=0).tolist() == [[1, 2], [3, 4]]
    got = round_trip(nested([torch.tensor([1]), torch.tensor([2, 3])], layout=jagged))
    assert got.offsets().diff().tolist() == [1, 2]
    assert got.to_padded_tensor(padding=-1).tolist() == [[1, -1], [2, 3]]


def test_a_whole_tensordict_can_be_padded() -> None:
    tq.kv_batch_put(
        ["a", "b"],
        "p",
        TensorDict(
            {"v": nested([torch.ones(1), torch.ones(2)], layout=jagged), "n": torch.ones(2)},
            batch_size=2,
        ),
    )
    padded = tq.kv_batch_get(["a", "b"], "p").to_padded_tensor()
    assert padded["v"].tolist() == [[1, 0], [1, 1]]


def test_rows_that_differ_in_two_dimensions_come_back_nested() -> None:
    got = round_trip(nested([torch.ones(3, 2), torch.ones(2, 4)], layout=torch.strided))
    assert [tuple(row.shape) for row in got.unbind()] == [(3, 2), (2, 4)]


def test_scalars_come_back_dense() -> None:
    got = round_trip(torch.tensor([1.5, 2.5]))
    assert not got.is_nested
    assert got.tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    "values",
    [
        ["x", "y"],
        ["x", "x"],
        [None, {"a": 1}],
        [[1, 2], [3]],
        [{"t": torch.ones(2)}, None],
        [torch.ones(2), None],
    ],
)
def test_other_values_come_back_as_a_stack(values: list[Any]) -> None:
    got = round_trip(stack(*values))
    assert isinstance(got, NonTensorStack)
    assert str(got.tolist()) == str(values)


def test_tensors_in_a_stack_are_a_column_of_tensors() -> None:
    got = round_trip(stack(torch.ones(2), torch.zeros(3)))
    assert got.layout == torch.jagged
    assert [row.tolist() for row in got.unbind()] == [[1, 1], [0, 0, 0]]


def test_lists_are_columns_too() -> None:
    assert round_trip(["x", "y"]).tolist() == ["x", "y"]
    wrapped: Any = NonTensorData(["x", "y"])
    assert round_trip(wrapped).tolist() == ["x", "y"]
    meta = tq.get_client().put(TensorDict({"v": wrapped}, batch_size=2), partition_id="q")
    assert tq.get_client().get_data(meta).get("v").tolist() == ["x", "y"]


@differs("TypeError")
def test_one_value_is_that_of_all_rows() -> None:
    assert round_trip(NonTensorData("x")).tolist() == ["x", "x"]


def test_arrays_are_tensors() -> None:
    got = round_trip(np.arange(4, dtype=np.float32).reshape(2, 2))
    assert got.dtype == torch.float32
    assert [row.tolist() for row in got.unbind()] == [[0, 1], [2, 3]]


def test_values_of_one_sample_need_no_batch_dimension() -> None:
    tq.kv_put(
        "k",
        "p",
        {"t": torch.arange(3), "z": torch.tensor(2.0), "s": "x", "l": [1, 2], "a": np.arange(2)},
    )
    got = tq.kv_batch_get("k", "p")
    assert got["t"].to_padded_tensor(padding=0).tolist() == [[0, 1, 2]]
    assert got["z"].tolist() == [2.0]
    assert (got.get("s").tolist(), got.get("l").tolist()) == (["x"], [[1, 2]])
    assert np.array_equal(got.get("a").tolist()[0], np.arange(2))
    tq.kv_put("k", "p", {"s": {"a": 1}, "l": None})
    again = tq.kv_batch_get("k", "p", ["s", "l"])
    assert (again.get("s").tolist(), again.get("l").tolist()) == ([{"a": 1}], [None])


def test_one_row_can_be_taken_out() -> None:
    tq.kv_batch_put(
        ["a", "b"],
        "p",
        TensorDict({"v": torch.tensor([[1, 2], [3, 4]]), "u": stack("x", "y")}, batch_size=2),
    )
    row = tq.kv_batch_get(["b"], "p")[0]
    assert row["v"].tolist() == [3, 4]
    assert row["u"] == "y"


def test_results_can_be_written_to_and_are_nobody_elses() -> None:
    first = round_trip(torch.ones(2, 3))
    first.values()[:] = 7
    again = tq.kv_batch_get(["k0", "k1"], "p")["v"]
    assert again.values().tolist() == [1] * 6


def test_rows_of_several_puts_come_back_in_one_column() -> None:
    tq.kv_put("a", "p", {"v": torch.ones(2)})
    tq.kv_put("b", "p", {"v": torch.ones(3)})
    assert tq.kv_batch_get(["a", "b"], "p")["v"].offsets().diff().tolist() == [2, 3]


@differs("the second dtype is cast to the first, or the call fails")
def test_rows_of_two_dtypes_come_back_as_they_are() -> None:
    tq.kv_put("a", "p", {"v": torch.ones(2, dtype=torch.int64)})
    tq.kv_put("b", "p", {"v": torch.ones(2, dtype=torch.float64)})
    rows = tq.kv_batch_get(["a", "b"], "p").get("v").tolist()
    assert [row.dtype for row in rows] == [torch.int64, torch.float64]


def test_one_tensor_for_many_rows_can_be_put_again() -> None:
    got = round_trip(nested([torch.ones(2), torch.ones(5)], layout=jagged))
    again = round_trip(got * 2)
    assert [row.tolist() for row in again.unbind()] == [[2] * 2, [2] * 5]


def test_a_result_can_be_saved_and_put_again(tmp_path: Path) -> None:
    fields = {"v": nested([torch.ones(2), torch.ones(5)], layout=jagged), "u": stack("x", "y")}
    tq.kv_batch_put(["a", "b"], "p", TensorDict(fields, batch_size=2))
    torch.save(tq.kv_batch_get(["a", "b"], "p"), tmp_path / "rollout.pt")
    saved = torch.load(tmp_path / "rollout.pt", weights_only=False)
    tq.kv_batch_put(["c", "d"], "p", saved)
    got = tq.kv_batch_get(["d", "c"], "p")
    assert got["v"].offsets().diff().tolist() == [5, 2]
    assert got.get("u").tolist() == ["y", "x"]
