from __future__ import annotations

import decimal
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from tests.data.columns import (
    DTYPES,
    LENGTHS,
    ROWS,
    jagged,
    random,
    strided,
    tensor_columns,
    value_columns,
)
from tests.data.same import assert_same, rows_of
from tq_redis.data.base import Column, EncodedBlock, Run
from tq_redis.data.codec import StoredBlock, decode, encode
from tq_redis.errors import InputError
from tq_redis.metadata.schema import FieldSchema

BIG = 1 << 30


def blocks_of(
    columns: Mapping[str, Column], block_bytes: int = BIG, *, pickle: bool = False
) -> dict[str, EncodedBlock]:
    encoded = encode(columns, block_bytes=block_bytes, allow_pickle=pickle)
    return {f"b{number}": block for number, block in enumerate(encoded)}


def read(
    blocks: Mapping[str, EncodedBlock],
    wanted: Mapping[str, Sequence[Run]],
    *,
    copy: bool = True,
    pickle: bool = False,
) -> dict[str, Column]:
    stored = {
        handle: StoredBlock(block.header, [read_only(buffer) for buffer in block.buffers])
        for handle, block in blocks.items()
    }
    return decode(wanted, stored, copy=copy, allow_pickle=pickle)


def read_only(buffer: Any) -> Any:
    stored = np.array(buffer)
    stored.flags.writeable = False
    return stored


def runs_in_order(blocks: Mapping[str, EncodedBlock], field: str) -> list[Run]:
    return [(name, 0, block.rows) for name, block in blocks.items() if field in block.schema]


def round_trip(column: Column, *, block_bytes: int = BIG, pickle: bool = False) -> Column:
    blocks = blocks_of({"x": column}, block_bytes, pickle=pickle)
    return read(blocks, {"x": runs_in_order(blocks, "x")}, pickle=pickle)["x"]


def plain(column: Any) -> Any:
    """What should come back: no gradient, no parameter."""
    return column.detach() if isinstance(column, torch.Tensor) else column


ALL = {**tensor_columns(), **value_columns()}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("block_bytes", [BIG, 40], ids=["one block", "many blocks"])
def test_what_goes_in_comes_out(name: str, block_bytes: int) -> None:
    assert_same(round_trip(ALL[name], block_bytes=block_bytes), plain(ALL[name]))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("order", [[4, 0, 3], [2, 2, 1, 0, 4, 3, 3], [1, 2], [2]], ids=str)
def test_rows_in_any_order_and_repeated(name: str, copy: bool, order: list[int]) -> None:
    blocks = blocks_of({"x": ALL[name]})
    got = read(blocks, {"x": [("b0", row, 1) for row in order]}, copy=copy)["x"]
    assert_same(got, plain(rows_of(ALL[name], order)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    for column in (
        random((ROWS,), dtype),
        random((ROWS, 3), dtype),
        random((2, ROWS), dtype).t(),
        torch.nested.nested_tensor_from_jagged(
            random((sum(LENGTHS),), dtype), torch.tensor([0, *LENGTHS]).cumsum(0)
        ),
    ):
        assert_same(round_trip(column), column)
        assert form_of(column).dtype == str(dtype).removeprefix("torch.")


def form_of(column: Column) -> FieldSchema:
    """What a block says of a column."""
    (block,) = encode({"x": column}, block_bytes=BIG, allow_pickle=False)
    return block.schema["x"]


@given(
    order=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    block_bytes=st.sampled_from([BIG, 40]),
)
def test_rows_that_are_one_object(order: list[int], block_bytes: int) -> None:
    """One prompt of a group of samples, say. The third is kept beside the msgpack text."""
    values = [{"a": [1]}, [1, 2], np.arange(20_000), "", [np.arange(20_000), "b"]]
    column = [values[number] for number in order]
    got = round_trip(column, block_bytes=block_bytes)
    assert_same(got, column)
    assert len(set(map(id, got))) == len(got) - max(0, order.count(3) - 1)  # texts may be shared


def test_one_row_keeps_its_kind() -> None:
    for column in (
        random((1,)),
        random((1, 1)),
        jagged([random((3,))]),
        strided([random((2, 3))]),
        [{"a": 1}],
        [[1, 2]],
    ):
        assert_same(round_trip(column), column)


def test_schema_of_each_kind() -> None:
    columns = tensor_columns()
    assert form_of(columns["scalars"]) == FieldSchema("dense", "float32", ())
    assert form_of(columns["matrix"]) == FieldSchema("dense", "float32", (3, 2))
    assert form_of(columns["jagged_wide"]) == FieldSchema("jagged", "bfloat16", (-1, 4))
    assert form_of(columns["jagged_in_dim_2"]) == FieldSchema("jagged", "float32", (3, -1))
    assert form_of(columns["strided"]) == FieldSchema("strided", "float32", (2, -1))
    assert form_of(["a"]) == FieldSchema("object")


def merged(*columns: Column) -> Column:
    """Row 1 of each column, put one by one."""
    blocks = {
        f"put{number}": block
        for number, column in enumerate(columns)
        for block in blocks_of({"x": column}).values()
    }
    return read(blocks, {"x": [(name, 1, 1) for name in blocks]})["x"]


def test_dense_rows_of_unequal_shape_become_jagged() -> None:
    a, b = random((2, 3)), random((2, 5))
    assert_same(merged(a, b, a), jagged([a[1], b[1], a[1]]))


def test_dense_rows_that_differ_in_a_later_dimension_become_jagged_there() -> None:
    a, b = random((2, 4, 3)), random((2, 4, 5))
    expected = jagged([a[1].t(), b[1].t()]).transpose(1, 2)
    assert_same(merged(a, b), expected)


def test_dense_and_jagged_rows_become_jagged() -> None:
    a, b = random((2, 3)), jagged([random((1,)), random((2,))])
    assert_same(merged(a, b), jagged([a[1], b.unbind()[1]]))


def test_equal_shapes_stay_as_they_were_put() -> None:
    a = random((2, 3))
    b = jagged([random((3,)), random((3,))])
    assert_same(merged(a, a), torch.stack([a[1], a[1]]))
    assert_same(merged(b, b), jagged([b.unbind()[1]] * 2))


def test_strided_with_another_kind_becomes_strided() -> None:
    s, j, d = (
        strided([random((2, 3)), random((2, 5))]),
        jagged([random((2, 3))] * 2),
        random((2, 1, 1)),
    )
    assert_same(merged(s, j, d), strided([s.unbind()[1], j.unbind()[1], d[1]]))


@pytest.mark.parametrize(
    "columns",
    [
        (random((2, 3)), ["a", "b"]),
        (random((2, 3)), random((2, 3), torch.float16)),
        (random((2, 3)), random((2,))),
        (random((2, 3, 4)), random((2, 4, 3))),
        (jagged([random((1,))] * 2), ["a", {"k": 1}]),
    ],
    ids=["values", "dtypes", "ranks", "two ragged dimensions", "jagged and values"],
)
def test_what_no_tensor_can_hold_becomes_a_list(columns: tuple[Column, ...]) -> None:
    got = merged(*columns)
    assert isinstance(got, list)
    expected = [c[1] if isinstance(c, list) else c.unbind()[1] for c in columns]
    assert_same(got, [e.detach() if isinstance(e, torch.Tensor) else e for e in expected])


def test_none_in_one_put_only() -> None:
    assert_same(merged(["a", None], ["b", "c"]), [None, "c"])


def test_equal_values_of_two_puts_stay_apart() -> None:
    assert_same(merged(["a", "a"], ["b", "a"]), ["a", "a"])


def test_a_large_put_is_cut_into_blocks_of_one_field_and_bounded_size() -> None:
    columns: dict[str, Column] = {
        "a": random((64, 100)),
        "b": jagged([random((n,)) for n in range(1, 65)]),
        "c": ["x" * 200] * 64,
    }
    blocks = blocks_of(columns, 4000)
    assert all(len(block.schema) == 1 for block in blocks.values())
    assert all(block.nbytes < 2 * 4000 for block in blocks.values())
    for field, column in columns.items():
        mine = [block for block in blocks.values() if tuple(block.schema) == (field,)]
        assert len(mine) > 1
        assert [block.first_row for block in mine] == [
            sum(block.rows for block in mine[:number]) for number in range(len(mine))
        ]
        assert_same(read(blocks, {field: runs_in_order(blocks, field)})[field], column)


def test_a_row_larger_than_a_block_gets_its_own() -> None:
    column = random((3, 100))
    assert [block.rows for block in blocks_of({"x": column}, 40).values()] == [1, 1, 1]


def test_a_put_up_to_the_block_size_is_one_block() -> None:
    assert len(blocks_of({"x": random((2, 5)), "y": random((2, 5))}, 80)) == 1
    assert len(blocks_of({"x": random((2, 5)), "y": random((2, 5))}, 79)) == 2


def test_results_are_private_and_writable() -> None:
    columns = {"x": random((4, 3)), "j": jagged([random((n,)) for n in (1, 2, 3, 4)])}
    blocks = blocks_of(columns)
    for rows in ([(0, 4)], [(2, 1), (0, 1)]):
        wanted = {field: [("b0", *run) for run in rows] for field in columns}
        stored = {
            handle: StoredBlock(block.header, [read_only(b) for b in block.buffers])
            for handle, block in blocks.items()
        }
        first = decode(wanted, stored, copy=True, allow_pickle=False)
        expected = {field: bytes_of(column) for field, column in first.items()}
        for column in first.values():
            assert isinstance(column, torch.Tensor)
            (column.values() if column.is_nested else column).add_(1)
        again = decode(wanted, stored, copy=True, allow_pickle=False)
        assert {field: bytes_of(column) for field, column in again.items()} == expected


def bytes_of(column: Any) -> bytes:
    return (column.values() if column.is_nested else column).numpy().tobytes()


def test_views_share_memory_and_do_not_warn() -> None:
    columns = {"x": random((4, 3)), "j": jagged([random((n,)) for n in (1, 2, 3, 4)])}
    (block,) = encode(columns, block_bytes=BIG, allow_pickle=False)
    buffers = [read_only(buffer) for buffer in block.buffers]
    stored = {"b0": StoredBlock(block.header, buffers)}
    addresses = [buffer.ctypes.data for buffer in buffers]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = [("b0", 0, 2), ("b0", 2, 2)]
        got: Any = decode({"x": whole, "j": whole}, stored, copy=False, allow_pickle=False)
        part: Any = decode({"x": [("b0", 1, 2)]}, stored, copy=False, allow_pickle=False)
        apart: Any = decode(
            {"x": [("b0", 2, 1), ("b0", 0, 1)]}, stored, copy=False, allow_pickle=False
        )
    assert_same(got["x"], columns["x"])
    assert_same(got["j"], columns["j"])
    assert got["x"].data_ptr() in addresses
    assert got["j"].values().data_ptr() in addresses
    assert part["x"].data_ptr() - 12 in addresses
    assert not addresses[0] <= apart["x"].data_ptr() < addresses[0] + buffers[0].nbytes


def test_a_view_outlives_everything_else() -> None:
    column = random((1000, 100))
    expected = column.clone()
    blocks = blocks_of({"x": column})
    got = read(blocks, {"x": [("b0", 0, 1000)]}, copy=False)["x"]
    del blocks, column
    torch.zeros(1000, 100)  # would reuse the memory, had it been freed
    assert_same(got, expected)


def test_fields_of_equal_lengths_can_be_multiplied() -> None:
    a, b = (jagged([random((n,)) for n in LENGTHS]) for _ in range(2))
    blocks = blocks_of({"a": a, "b": b})
    got: Any = read(blocks, {f: [("b0", 3, 1), ("b0", 0, 2)] for f in "ab"})
    assert (got["a"] * got["b"]).size(0) == 3


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"a": torch.ones(3), "b": torch.ones(2)}, "b"),
        ({"a": torch.ones(3), "b": ["x"]}, "b"),
        ({"a": torch.ones(3), "b": jagged([torch.ones(2)])}, "b"),
        ({"a": torch.tensor(1.0)}, "a"),
        ({"a": torch.ones(3).to_sparse()}, "a"),
        ({"a": torch.ones(3, device="meta")}, "a"),
        ({"a": torch.ones(0, 5)}, "a"),
        ({"a": []}, "a"),
        ({"a": "text"}, "a"),
        ({"a": np.ones(3)}, "a"),
        ({"a": {"b": 1}}, "a"),
        ({"a": None}, "a"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_columns_are_refused(columns: Any, field: str) -> None:
    with pytest.raises(InputError) as raised:
        encode(columns, block_bytes=BIG, allow_pickle=False)
    assert field in raised.value.fields
    assert repr(field) in str(raised.value) or "no rows" in str(raised.value)


@pytest.mark.parametrize("columns", [{}, {"": torch.ones(2)}, {3: torch.ones(2)}])
def test_bad_names_and_empty_puts_are_refused(columns: Any) -> None:
    with pytest.raises(InputError):
        encode(columns, block_bytes=BIG, allow_pickle=False)


def self_containing() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value",
    [
        decimal.Decimal(1),
        object(),
        range(3),
        {"deep": [decimal.Decimal(1)]},
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        torch.ones(2).to_sparse(),
        self_containing(),
        "\ud800",
    ],
    ids=["decimal", "object", "range", "inside", "structured", "sparse", "cycle", "surrogate"],
)
def test_values_that_cannot_be_stored_are_refused_with_field_and_row(value: Any) -> None:
    with pytest.raises(InputError, match="row 1") as raised:
        encode({"ok": [1, 2], "bad": ["ok", value]}, block_bytes=BIG, allow_pickle=False)
    assert (raised.value.fields, raised.value.rows) == (("bad",), (1,))


def test_pickle_is_used_only_when_allowed_on_both_sides() -> None:
    values = [decimal.Decimal("1.5"), {"inside": decimal.Decimal(2)}]
    assert round_trip(values, pickle=True) == values
    blocks = blocks_of({"x": values}, pickle=True)
    with pytest.raises(InputError, match=r"data\.pickle"):
        read(blocks, {"x": [("b0", 0, 2)]}, pickle=False)


@pytest.mark.parametrize(
    "wanted",
    [{"x": []}, {"nope": [("b0", 0, 1)]}, {"x": [("b0", 2, 2)]}, {"x": [("b0", -1, 1)]}],
    ids=["no runs", "no such field", "too many rows", "negative row"],
)
def test_runs_that_do_not_fit_are_refused(wanted: dict[str, list[Run]]) -> None:
    with pytest.raises(InputError):
        read(blocks_of({"x": random((3, 2))}), wanted)


numbers = st.one_of(st.integers(), st.floats(), st.booleans(), st.complex_numbers())
arrays = npst.arrays(
    st.one_of(
        npst.integer_dtypes(),
        npst.floating_dtypes(),
        npst.boolean_dtypes(),
        npst.unicode_string_dtypes(),
        npst.byte_string_dtypes(),
        npst.datetime64_dtypes(),
    ),
    npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
leaves = st.one_of(
    st.none(), numbers, st.text(), st.binary(), arrays, st.builds(bytearray, st.binary())
)
keys = st.one_of(st.text(), st.integers(), st.none(), st.tuples(st.integers(), st.text()))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=5), inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.sets(st.integers(), max_size=4),
    ),
    max_leaves=12,
)


@given(column=st.lists(values, min_size=1, max_size=5), block_bytes=st.sampled_from([1, 50, BIG]))
@settings(max_examples=200)
def test_any_values_round_trip(column: list[Any], block_bytes: int) -> None:
    assert_same(round_trip(column, block_bytes=block_bytes), column)


@given(data=st.data(), column=st.lists(st.text(), min_size=1, max_size=6))
@settings(max_examples=100)
def test_any_rows_of_any_texts(data: st.DataObject, column: list[str]) -> None:
    order = data.draw(st.lists(st.integers(0, len(column) - 1), min_size=1, max_size=9))
    for block_bytes in (1, BIG):
        blocks = blocks_of({"x": column}, block_bytes)
        places = [(name, row, 1) for name, block in blocks.items() for row in range(block.rows)]
        got = read(blocks, {"x": [places[row] for row in order]})["x"]
        assert_same(got, [column[row] for row in order])


def test_texts_and_other_values_of_one_field_come_back_in_order() -> None:
    assert_same(merged(["a", "ä"], [1, None], ["c", "\x00"]), ["ä", None, "\x00"])


@st.composite
def any_tensor_column(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    rows = draw(st.integers(1, 6))
    inner = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    kind = draw(st.sampled_from(["dense", "jagged", "transposed"]))
    if kind == "dense":
        return random((rows, *inner), dtype)
    lengths = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = random((sum(lengths), *inner), dtype)
    if kind == "transposed" and inner:
        return torch.nested.nested_tensor_from_jagged(values.movedim(0, 1), offsets, jagged_dim=2)
    return torch.nested.nested_tensor_from_jagged(values, offsets)


@given(data=st.data(), column=any_tensor_column(), block_bytes=st.sampled_from([1, 20, BIG]))
@settings(max_examples=200)
def test_any_rows_of_any_tensor_column(
    data: st.DataObject, column: torch.Tensor, block_bytes: int
) -> None:
    blocks = blocks_of({"x": column}, block_bytes)
    places = [(name, row) for name, block in blocks.items() for row in range(block.rows)]
    order = data.draw(st.lists(st.integers(0, len(places) - 1), min_size=1, max_size=12))
    runs = [(*places[row], 1) for row in order]
    for copy in (True, False):
        got = read(blocks, {"x": runs}, copy=copy)["x"]
        assert_same(got, rows_of(column, order))
