"""BatchMeta: a value, without a queue."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.compat.peer import differs, stack, tq

BatchMeta = tq.BatchMeta

DENSE = {"dtype": torch.int64, "shape": (2,), "is_nested": False, "is_non_tensor": False}


def batch(rows: int = 3, **more: Any) -> Any:
    settings: dict[str, Any] = {
        "field_schema": {"x": dict(DENSE)},
        "production_status": [1] * rows,
        "extra_info": {"step": 1},
        "custom_meta": [{"n": n} for n in range(rows)],
    }
    names = ["p"] * (rows - 1) + ["q"]
    return BatchMeta(range(10, 10 + rows), names, **settings | more)


def ids(meta: Any) -> list[int]:
    return list(meta.global_indexes)


def test_it_says_what_it_holds() -> None:
    meta = batch(field_schema={"x": dict(DENSE), "a": dict(DENSE)})
    assert (meta.size, len(meta), ids(meta)) == (3, 3, [10, 11, 12])
    assert meta.partition_ids == ["p", "p", "q"]
    assert meta.field_names == ["a", "x"]
    assert meta.get_dtypes("x") == [torch.int64] * 3
    assert meta.get_shapes("x") == [(2,)] * 3
    assert "size=3" in str(meta)


def test_fields_that_it_lacks_have_no_dtype() -> None:
    for call in (batch().get_dtypes, batch().get_shapes):
        with pytest.raises(KeyError):
            call("unknown")


@pytest.mark.parametrize(
    ("status", "ready"), [([1, 1, 1], True), ([1, 0, 1], False), (None, False)]
)
def test_it_is_ready_if_all_rows_are(status: list[int] | None, ready: bool) -> None:
    assert batch(production_status=status).is_ready is ready


def test_an_empty_one_is_not_ready() -> None:
    meta = BatchMeta.empty({"k": 1})
    assert (meta.size, meta.is_ready, meta.extra_info, meta.field_names) == (0, False, {"k": 1}, [])


@differs("TypeError; verl calls it")
def test_it_needs_no_arguments() -> None:
    assert BatchMeta().size == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"partition_ids": ["p"]},
        {"production_status": [1]},
        {"custom_meta": [{}]},
        {"_custom_backend_meta": [{}]},
        {"field_schema": {"x": DENSE | {"per_sample_shapes": [(1,)]}}},
    ],
)
def test_lengths_must_fit(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"length|entries|Length"):
        BatchMeta(**({"global_indexes": [1, 2], "partition_ids": ["p", "p"]} | wrong))


def test_rows_can_be_looked_at() -> None:
    shapes = [(1,), (2,), (3,)]
    meta = batch(field_schema={"x": DENSE | {"is_nested": True, "per_sample_shapes": shapes}})
    assert len(meta.samples) == 3
    view = meta.samples[1]
    assert (view.global_index, view.partition_id, view.production_status) == (11, "p", 1)
    assert dict(view.custom_meta) == {"n": 1}
    assert view.fields["x"]["shape"] == (2,)
    assert [view.global_index for view in meta.samples] == ids(meta)
    with pytest.raises(TypeError):
        view.custom_meta["n"] = 2


def test_what_belongs_to_the_batch() -> None:
    meta = batch(extra_info={})
    meta.set_extra_info("a", [1])
    meta.update_extra_info({"b": 2})
    assert meta.get_extra_info("a") == [1]
    assert meta.get_extra_info("z", 5) == 5
    assert meta.has_extra_info("b")
    meta.get_all_extra_info()["a"].append(2)
    assert meta.extra_info == {"a": [1], "b": 2}
    assert (meta.remove_extra_info("b"), meta.remove_extra_info("b")) == (2, None)
    meta.clear_extra_info()
    assert meta.extra_info == {}
    meta.extra_info = {"set": 1}
    assert meta.has_extra_info("set")


def test_tags_of_each_row() -> None:
    meta = batch()
    meta.update_custom_meta([{"m": 1}, {}, {"n": 9}])
    meta.update_custom_meta(None)
    assert meta.get_all_custom_meta() == [{"n": 0, "m": 1}, {"n": 1}, {"n": 9}]
    with pytest.raises(ValueError, match=r"1"):
        meta.update_custom_meta([{}])
    meta.clear_custom_meta()
    assert meta.custom_meta == [{}, {}, {}]


def test_fields_are_added_in_place() -> None:
    meta = batch(2, production_status=[0, 0])
    nested = torch.nested.as_nested_tensor([torch.ones(1), torch.ones(4)], layout=torch.jagged)
    more = TensorDict({"n": nested, "s": torch.zeros(2), "u": stack("a", "b")}, batch_size=2)
    assert meta.add_fields(more) is meta
    assert meta.field_names == ["n", "s", "u", "x"]
    assert meta.is_ready
    assert [tuple(shape) for shape in meta.get_shapes("n")] == [(1,), (4,)]
    assert meta.get_dtypes("s") == [torch.float32] * 2
    assert meta.field_schema["u"]["is_non_tensor"]
    assert meta.field_schema["n"]["is_nested"]


def test_adding_fields_can_leave_rows_unready() -> None:
    meta = batch(2, production_status=[0, 1])
    meta.add_fields(TensorDict({"y": torch.ones(2)}, batch_size=2), set_all_ready=False)
    assert not meta.is_ready
    assert meta.add_fields(TensorDict({}, batch_size=0)) is meta
    with pytest.raises(ValueError, match=r"3"):
        meta.add_fields(TensorDict({"y": torch.ones(3)}, batch_size=3))


def test_rows_are_selected_by_position() -> None:
    meta = batch(field_schema={"x": DENSE | {"per_sample_shapes": [(1,), (2,), (3,)]}})
    part = meta.select_samples([2, 0, 2])
    assert ids(part) == [12, 10, 12]
    assert part.partition_ids == ["q", "p", "q"]
    assert part.get_shapes("x") == [(3,), (1,), (3,)]
    part.custom_meta[0]["n"] = 99
    assert meta.custom_meta[2] == {"n": 2}
    with pytest.raises(ValueError, match="[Rr]ange|No rows"):
        meta.select_samples([3])


def test_unknown_fields_are_passed_over() -> None:
    meta = batch(production_status=[1, 0, 1])
    part = meta.select_fields(["x", "unknown"])
    assert part.field_names == ["x"]
    assert part.production_status.tolist() == [1, 0, 1]
    assert meta.select_fields([]).field_names == []


@pytest.mark.parametrize(
    ("item", "found"), [(0, [10]), (-1, [12]), (np.int64(1), [11]), (slice(1, None), [11, 12])]
)
def test_it_is_indexed_like_a_list(item: Any, found: list[int]) -> None:
    assert ids(batch()[item]) == found


def test_a_bad_index_is_refused() -> None:
    for item, error in ((3, IndexError), (-4, IndexError), ("x", TypeError), ([0], TypeError)):
        with pytest.raises(error):
            batch()[item]


@pytest.mark.parametrize(("chunks", "sizes"), [(1, [3]), (2, [2, 1]), (5, [1, 1, 1, 0, 0])])
def test_chunks_put_together_are_the_batch(chunks: int, sizes: list[int]) -> None:
    meta = batch()
    parts = meta.chunk(chunks)
    assert [part.size for part in parts] == sizes
    assert all(part.extra_info == {"step": 1} for part in parts)
    whole = BatchMeta.concat(parts)
    assert (ids(whole), whole.custom_meta) == (ids(meta), meta.custom_meta)
    assert whole.is_ready
    assert whole.extra_info == {"step": 1}


def test_one_part_per_partition() -> None:
    meta = BatchMeta([1, 2, 3], ["b", "a", "b"])
    assert [(part.partition_ids[0], ids(part)) for part in meta.chunk_by_partition()] == [
        ("b", [1, 3]),
        ("a", [2]),
    ]


def test_union_adds_fields_to_the_same_rows() -> None:
    one = batch(2, production_status=[1, 1], extra_info={"a": 1, "b": 1})
    two = batch(
        2,
        field_schema={"y": dict(DENSE), "x": DENSE | {"dtype": torch.float32}},
        production_status=[1, 0],
        extra_info={"b": 2},
        custom_meta=[{"m": 1}, {"n": 7}],
    )
    both = one.union(two)
    assert both.field_names == ["x", "y"]
    assert both.get_dtypes("x") == [torch.float32] * 2
    assert both.production_status.tolist() == [1, 0]
    assert both.extra_info == {"a": 1, "b": 2}
    assert both.custom_meta == [{"n": 0, "m": 1}, {"n": 7}]
    assert ids(one.union(BatchMeta.empty())) == ids(one)
    assert ids(BatchMeta.empty().union(one)) == ids(one)


@pytest.mark.parametrize(
    "other", [BatchMeta([11, 10], ["p", "q"]), BatchMeta([10, 11], ["p", "p"])]
)
def test_union_needs_the_same_rows_in_the_same_order(other: Any) -> None:
    with pytest.raises(ValueError, match="union"):
        batch(2).union(other)


def test_concat_joins_schemas() -> None:
    nested = DENSE | {"is_nested": True, "per_sample_shapes": [(1,), (4,)]}
    whole = BatchMeta.concat([batch(2, field_schema={"x": nested}), batch(1)])
    assert whole.field_schema["x"]["is_nested"]
    assert whole.get_shapes("x") == [(1,), (4,), (2,)]
    assert BatchMeta.concat([]).size == 0
    assert BatchMeta.concat([BatchMeta.empty({"k": 1}), batch(1)]).extra_info == {"step": 1}


@pytest.mark.parametrize(
    "other",
    [
        {"field_schema": {"y": DENSE}},
        {"field_schema": {"x": DENSE | {"dtype": torch.float32}}},
        {"extra_info": {"step": 2}},
        {"extra_info": {"step": torch.ones(2)}},
    ],
)
def test_concat_refuses_what_does_not_fit(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="concat|differ"):
        BatchMeta.concat([batch(1), batch(1, **other)])


def test_concat_compares_tensors_and_can_skip_the_check_of_fields() -> None:
    same = [batch(1, extra_info={"t": torch.ones(2), "a": np.ones(2)}) for _ in range(2)]
    assert sorted(BatchMeta.concat(same).extra_info) == ["a", "t"]
    other = batch(1, field_schema={"x": DENSE, "y": DENSE})
    assert BatchMeta.concat([batch(1), other], validate=False).field_names == ["x"]


def test_rows_are_reordered_in_place() -> None:
    meta = batch(
        production_status=[1, 0, 1],
        field_schema={"x": DENSE | {"per_sample_shapes": [(1,), (2,), (3,)]}},
    )
    assert meta.reorder([2, 0, 1]) is None
    assert ids(meta) == [12, 10, 11]
    assert meta.partition_ids == ["q", "p", "p"]
    assert meta.production_status.tolist() == [1, 1, 0]
    assert meta.custom_meta == [{"n": 2}, {"n": 0}, {"n": 1}]
    assert meta.get_shapes("x") == [(3,), (1,), (2,)]


@pytest.mark.parametrize("indices", [[0], [0, 0, 1], [0, 1, 3]])
def test_only_a_permutation_is_an_order(indices: list[int]) -> None:
    with pytest.raises(ValueError, match=r"."):
        batch().reorder(indices)


def test_a_copy_shares_nothing() -> None:
    meta = batch()
    other = meta.copy()
    other.custom_meta[0]["n"] = 5
    other.extra_info["step"] = 5
    other.field_schema["x"]["shape"] = (9,)
    other.production_status[0] = 0
    assert (meta.custom_meta[0], meta.extra_info) == ({"n": 0}, {"step": 1})
    assert (meta.get_shapes("x")[0], meta.is_ready) == ((2,), True)


def test_it_survives_pickling_and_read_only_arrays() -> None:
    meta = batch(_custom_backend_meta=[{"x": n} for n in range(3)])
    meta.production_status.flags.writeable = False
    other = pickle.loads(pickle.dumps(meta, protocol=5))
    assert type(other) is BatchMeta
    assert (ids(other), other.custom_meta, other.extra_info) == (
        ids(meta),
        meta.custom_meta,
        meta.extra_info,
    )
    assert other._custom_backend_meta == meta._custom_backend_meta
    other.production_status[:] = 0
