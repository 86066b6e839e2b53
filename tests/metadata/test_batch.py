from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.metadata.build import SCHEMAS, batches
from tq_redis.errors import InputError
from tq_redis.metadata import BatchMeta, Claim, FieldSchema

DENSE = FieldSchema("dense", "float32", (3,))


def rows_of(meta: BatchMeta) -> list[tuple[Any, ...]]:
    columns = (meta.production_status.tolist(), meta.custom_meta, meta.claims)
    return list(zip(meta.global_indexes, meta.partition_ids, *columns, strict=True))


def scribble(meta: BatchMeta) -> None:
    """Change everything in place."""
    meta.global_indexes[:] = [-1] * meta.size
    meta.partition_ids[:] = ["changed"] * meta.size
    meta.production_status[:] = 7
    meta.claims[:] = [Claim("changed", 7)] * meta.size
    meta.field_schema.clear()
    for values in (*meta.custom_meta, meta.extra_info):
        for value in values.values():
            if isinstance(value, list):
                value.append("changed")
        values["changed"] = True


# Making one


def test_what_it_says_of_itself() -> None:
    meta = BatchMeta([3, 1, 2], "p", {"b": DENSE, "a": DENSE})
    assert (len(meta), meta.size, meta.field_names) == (3, 3, ["a", "b"])
    assert meta.partition_ids == ["p"] * 3
    assert (meta.partition_id, meta.is_ready) == ("p", True)
    assert repr(meta) == "BatchMeta(3 samples of p: ['a', 'b'])"
    assert repr(BatchMeta()) == "BatchMeta(0 samples of nowhere: [])"
    assert not BatchMeta.empty().is_ready
    assert not BatchMeta([1], "p", production_status=np.zeros(1, np.int8)).is_ready


@pytest.mark.parametrize(
    "wrong",
    [
        {"partition_ids": ["p"]},
        {"production_status": np.ones(3, np.int8)},
        {"custom_meta": [{}]},
        {"claims": [Claim("t", 1)]},
        {"field_schema": {"x": {"dtype": "float32"}}},
        {"field_schema": ["x"]},
        {"padding": 3},
        {"padding": -1},
        {"task": ""},
        {"task": 7},
    ],
)
def test_what_cannot_be_right_is_refused(wrong: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"partition_ids": "p"} | wrong
    name = "FieldSchema" if "field_schema" in wrong else next(iter(wrong))
    with pytest.raises(InputError, match=name):
        BatchMeta([1, 2], **arguments)


def test_one_partition_is_asked_for_but_there_are_several() -> None:
    with pytest.raises(InputError, match=r"\['p', 'q'\]"):
        _ = BatchMeta([1, 2], ["q", "p"]).partition_id
    with pytest.raises(InputError, match=r"\[\]"):
        _ = BatchMeta().partition_id


def test_ids_are_plain_integers_whatever_they_came_as() -> None:
    """They go to Redis, which knows no scalars of numpy or torch."""
    kinds: list[Any] = [np.array([1, 2]), torch.tensor([1, 2]), (1, 2)]
    for ids in kinds:
        meta = BatchMeta(ids, "p")
        assert meta.global_indexes == [1, 2]
        assert {type(sample) for sample in meta.global_indexes} == {int}
    with pytest.raises(TypeError):
        BatchMeta([1.5], "p")  # type: ignore[list-item]


def test_it_shares_nothing_with_what_it_was_made_of() -> None:
    status, tags, ids, names = np.ones(2, np.int8), [{"a": 1}, {}], [1, 2], ["p", "p"]
    meta = BatchMeta(ids, names, {"x": DENSE}, status, {"step": 1}, tags)
    twin = copy.deepcopy(meta)
    scribble(meta)
    assert (status.tolist(), tags, ids, names) == ([1, 1], [{"a": 1}, {}], [1, 2], ["p", "p"])
    assert twin == BatchMeta(ids, names, {"x": DENSE}, status, {"step": 1}, tags)


# Rows


@given(batches(), st.integers(1, 25))
def test_chunks_put_together_are_the_batch(meta: BatchMeta, chunks: int) -> None:
    parts = meta.chunk(chunks)
    sizes = [part.size for part in parts]
    assert len(parts) == chunks
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert BatchMeta.concat(parts) == meta


def test_uneven_chunks() -> None:
    assert [part.size for part in BatchMeta(range(146), "p").chunk(4)] == [37, 37, 36, 36]
    assert [part.size for part in BatchMeta(range(2), "p").chunk(4)] == [1, 1, 0, 0]
    with pytest.raises(InputError, match="positive"):
        BatchMeta([1], "p").chunk(0)


@given(batches(min_size=1), st.integers(1, 4))
def test_parts_share_nothing(meta: BatchMeta, chunks: int) -> None:
    parts = [*meta.chunk(chunks), *meta.chunk_by_partition(), meta.copy(), meta[:], meta[0]]
    twins = [copy.deepcopy(part) for part in parts]
    scribble(parts[0])
    scribble(meta)
    assert parts[1:] == twins[1:]


@given(batches(), st.randoms(use_true_random=False))
def test_reordering_has_an_inverse(meta: BatchMeta, random: Any) -> None:
    order = list(range(meta.size))
    random.shuffle(order)
    before = meta.copy()
    meta.reorder(order)
    assert rows_of(meta) == [rows_of(before)[row] for row in order]
    meta.reorder([order.index(row) for row in range(meta.size)])
    assert meta == before


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3], [1, 2, 3]])
def test_only_a_permutation_reorders(order: list[int]) -> None:
    meta = BatchMeta([5, 6, 7], "p")
    with pytest.raises(InputError, match="permutation"):
        meta.reorder(order)
    assert meta.global_indexes == [5, 6, 7]


@given(batches(min_size=1), st.data())
def test_selected_rows(meta: BatchMeta, data: st.DataObject) -> None:
    picks = data.draw(st.lists(st.integers(0, meta.size - 1), max_size=10))
    selected = meta.select_samples(picks)
    assert rows_of(selected) == [rows_of(meta)[row] for row in picks]
    assert selected.field_schema == meta.field_schema
    assert selected.extra_info == meta.extra_info


@given(batches(min_size=1), st.data())
def test_selecting_twice_is_selecting_once(meta: BatchMeta, data: st.DataObject) -> None:
    first = data.draw(st.lists(st.integers(0, meta.size - 1), min_size=1, max_size=10))
    second = data.draw(st.lists(st.integers(0, len(first) - 1), max_size=10))
    once = meta.select_samples([first[row] for row in second])
    assert meta.select_samples(first).select_samples(second) == once


@given(batches(), st.integers(1, 5), st.lists(st.sampled_from(["ids", "mask", "unknown"])))
def test_rows_and_fields_are_chosen_in_either_order(
    meta: BatchMeta, chunks: int, names: list[str]
) -> None:
    parts = [part.select_fields(names) for part in meta.chunk(chunks)]
    assert parts == meta.select_fields(names).chunk(chunks)


@given(batches(min_size=1), st.data())
def test_a_selected_permutation_is_the_reordered_batch(
    meta: BatchMeta, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(meta.size)))
    selected = meta.select_samples(order)
    meta.reorder(order)
    assert selected == meta


@given(batches(), st.slices(20))
def test_slices_are_those_of_lists(meta: BatchMeta, part: slice) -> None:
    assert rows_of(meta[part]) == rows_of(meta)[part]


def test_rows_by_position() -> None:
    meta = BatchMeta([5, 6, 7], "p")
    assert [row.global_indexes for row in meta] == [[5], [6], [7]]
    name: Any = "x"
    with pytest.raises(TypeError):
        meta[name]
    assert (meta[0].global_indexes, meta[-1].global_indexes) == ([5], [7])
    position: Any = np.int64(1)
    assert meta[position].global_indexes == [6]
    for outside in (3, -4):
        with pytest.raises(IndexError, match="of a batch of 3"):
            meta[outside]
        with pytest.raises(InputError, match="No rows"):
            meta.select_samples([outside])


@given(batches())
def test_parts_by_partition(meta: BatchMeta) -> None:
    parts = meta.chunk_by_partition()
    names = [part.partition_id for part in parts]
    assert names == list(dict.fromkeys(meta.partition_ids))
    for part in parts:
        assert rows_of(part) == [row for row in rows_of(meta) if row[1] == part.partition_id]


# Padding


@given(batches(min_size=1, max_size=9), st.integers(1, 12))
def test_padding_repeats_rows_from_the_first(meta: BatchMeta, divisor: int) -> None:
    padded = meta.padded(divisor)
    assert padded.size % divisor == 0
    assert 0 <= padded.padding == padded.size - meta.size < divisor
    assert rows_of(padded) == (rows_of(meta) * (divisor + 1))[: padded.size]
    assert padded.unpadded() == meta


@given(batches(min_size=1, max_size=9), st.integers(1, 12), st.integers(1, 12))
def test_padding_is_gone_after_a_round_over_the_workers(
    meta: BatchMeta, divisor: int, workers: int
) -> None:
    padded = meta.padded(divisor)
    parts = padded.chunk(workers)
    assert sum(part.padding for part in parts) == padded.padding
    assert BatchMeta.concat(parts) == BatchMeta.concat([padded]) == meta


@pytest.mark.parametrize(("size", "workers"), [(2, 4), (146, 4), (1, 8)])
def test_padded_batches_of_a_worker_group(size: int, workers: int) -> None:
    meta = BatchMeta(range(100, 100 + size), "p", {"x": DENSE})
    parts = meta.padded(workers).chunk(workers)
    assert len({part.size for part in parts}) == 1
    real = [sample for part in parts for sample in part.unpadded().global_indexes]
    assert real == list(range(100, 100 + size))


def test_what_needs_no_padding_gets_none() -> None:
    assert BatchMeta([1, 2], "p").padded(2).padding == 0
    assert BatchMeta().padded(4).size == 0
    with pytest.raises(InputError, match="already"):
        BatchMeta([1, 2, 3], "p").padded(2).padded(3)
    with pytest.raises(InputError, match="positive"):
        BatchMeta([1], "p").padded(0)


def test_padding_stays_behind_the_real_rows() -> None:
    """Else it could not be told apart any more, and real rows would be dropped in its place."""
    padded = BatchMeta([1, 2, 3], "p").padded(4)
    assert padded.select_samples([0, 3]).padding == 1
    assert padded[2:].padding == 1
    assert padded[3].padding == 1
    for mixed in (lambda: padded.select_samples([3, 0]), lambda: padded[::-1]):
        with pytest.raises(InputError, match="behind a padding row"):
            mixed()
    with pytest.raises(InputError, match="before padding"):
        padded.reorder([0, 1, 2, 3])


# Several batches


def test_concat_is_more_rows_of_the_same_fields() -> None:
    one = BatchMeta([1], "p", {"x": DENSE}, extra_info={"step": 1}, custom_meta=[{"a": 1}])
    two = BatchMeta([2], "q", {"x": DENSE}, np.zeros(1, np.int8), {"loss": 2.0})
    both = BatchMeta.concat([one, BatchMeta(), two])
    assert rows_of(both) == [(1, "p", 1, {"a": 1}, None), (2, "q", 0, {}, None)]
    assert both.extra_info == {"step": 1, "loss": 2.0}
    assert BatchMeta.concat([]) == BatchMeta()
    assert BatchMeta.concat([BatchMeta(extra_info={"a": 1})]).extra_info == {"a": 1}


@given(batches(), batches(), batches())
def test_concat_is_associative(a: BatchMeta, b: BatchMeta, c: BatchMeta) -> None:
    for meta in (b, c):
        meta.field_schema, meta.extra_info = dict(a.field_schema), dict(a.extra_info)
    together = BatchMeta.concat([a, b, c])
    assert together == BatchMeta.concat([BatchMeta.concat([a, b]), c])
    assert together == BatchMeta.concat([a, BatchMeta.concat([b, c])])
    assert rows_of(together) == rows_of(a) + rows_of(b) + rows_of(c)


def test_what_one_part_forbids_the_whole_forbids() -> None:
    free, bound = BatchMeta([1], "p"), BatchMeta([2], "p", read_only=True)
    assert BatchMeta.concat([free, bound]).read_only
    assert not BatchMeta.concat([free, free]).read_only
    assert BatchMeta([2], "p").union(bound).read_only
    assert bound.union(BatchMeta([2], "p")).read_only


def test_work_of_several_tasks_is_nobody_s() -> None:
    one, two = BatchMeta([1], "p", task="gen"), BatchMeta([2], "p", task="reward")
    bare = BatchMeta([3], "p")
    assert BatchMeta.concat([one, BatchMeta(), one]).task == "gen"
    assert [BatchMeta.concat(metas).task for metas in ([one, two], [one, bare], [])] == [None] * 3
    same = BatchMeta([1], "p")
    assert one.union(same).task == same.union(one).task == one.union(one).task == "gen"
    assert one.union(BatchMeta([1], "p", task="reward")).task is None
    assert BatchMeta.concat([one, two]) != BatchMeta([1, 2], "p", task="gen")


@given(batches(), st.integers(1, 25))
def test_a_batch_keeps_its_task(meta: BatchMeta, chunks: int) -> None:
    parts = [*meta.chunk(chunks), *meta.chunk_by_partition(), meta.copy(), meta[:1]]
    parts += [meta.select_fields([]), meta.with_fields({}), meta.padded(3).unpadded()]
    parts += [pickle.loads(pickle.dumps(meta))]
    assert {part.task for part in parts} == {meta.task}


@given(batches(min_size=1))
def test_concat_shares_nothing_with_its_parts(meta: BatchMeta) -> None:
    together = BatchMeta.concat([meta])
    twin = copy.deepcopy(together)
    scribble(meta)
    assert together == twin


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"y": DENSE}, "same fields.*union"),
        ({}, "same fields"),
        ({"x": FieldSchema("dense", "int64", (3,))}, "'x' is float32 and int64"),
        ({"x": FieldSchema("object")}, "'x' is float32 and non-tensor"),
    ],
)
def test_concat_refuses_other_fields(schema: dict[str, FieldSchema], message: str) -> None:
    with pytest.raises(InputError, match=message):
        BatchMeta.concat([BatchMeta([1], "p", {"x": DENSE}), BatchMeta([2], "p", schema)])


@pytest.mark.parametrize(
    ("a", "b", "form"),
    [
        (DENSE, DENSE, DENSE),
        (DENSE, FieldSchema("dense", "float32", (5,)), FieldSchema("jagged", "float32", (-1,))),
        (DENSE, FieldSchema("jagged", "float32", (-1,)), FieldSchema("jagged", "float32", (-1,))),
        (
            FieldSchema("strided", "float32", (2, 3)),
            FieldSchema("dense", "float32", (2, 5)),
            FieldSchema("strided", "float32", (2, -1)),
        ),
        (
            DENSE,
            FieldSchema("dense", "float32", (3, 1)),
            FieldSchema("strided", "float32", (-1, -1)),
        ),
        (FieldSchema("object"), FieldSchema("object"), FieldSchema("object")),
    ],
)
def test_concat_says_what_form_the_rows_have_in_common(
    a: FieldSchema, b: FieldSchema, form: FieldSchema
) -> None:
    one, two = BatchMeta([1], "p", {"x": a}), BatchMeta([2], "p", {"x": b})
    assert BatchMeta.concat([one, two]).field_schema == {"x": form}
    assert BatchMeta.concat([two, one]).field_schema == {"x": form}


def test_union_is_more_fields_of_the_same_rows() -> None:
    """The other side wins; a row is ready if both sides are."""
    other_mask = FieldSchema("dense", "bool", (3,))
    a = BatchMeta(
        [3, 1, 2], "p", {"a": DENSE, "mask": DENSE}, np.array([1, 1, 0], np.int8),
        {"step": 1}, [{"t": 1}, {}, {}],
    )  # fmt: skip
    b = BatchMeta(
        [3, 1, 2], "p", {"mask": other_mask, "b": DENSE}, np.array([1, 0, 1], np.int8),
        {"step": 2, "n": [1]}, [{"t": 2}, {}, {"u": 3}],
    )  # fmt: skip
    both = a.union(b)
    assert both.field_schema == {"a": DENSE, "mask": other_mask, "b": DENSE}
    assert both.production_status.tolist() == [1, 0, 0]
    assert both.extra_info == {"step": 2, "n": [1]}
    assert both.custom_meta == [{"t": 2}, {}, {"u": 3}]
    scribble(b)
    assert both.extra_info == {"step": 2, "n": [1]}


@given(batches(min_size=1), st.data())
def test_union_follows_its_rules(meta: BatchMeta, data: st.DataObject) -> None:
    other = data.draw(batches(min_size=meta.size, max_size=meta.size))
    other.global_indexes, other.partition_ids = meta.global_indexes[:], meta.partition_ids[:]
    before = (meta.copy(), other.copy())
    both = meta.union(other)
    assert (meta, other) == before
    assert both.field_schema == meta.field_schema | other.field_schema
    assert both.extra_info == meta.extra_info | other.extra_info
    for row, (mine, theirs, joined) in enumerate(
        zip(meta.samples, other.samples, both.samples, strict=True)
    ):
        assert joined.global_index == meta.global_indexes[row]
        assert joined.production_status == (mine.production_status and theirs.production_status)
        assert joined.custom_meta == {**mine.custom_meta, **theirs.custom_meta}
        assert joined.claim == (mine.claim or theirs.claim)
    tasks = {meta.task, other.task} - {None}
    assert {both.task} == (tasks if len(tasks) == 1 else {None})


def test_union_refuses_other_padding() -> None:
    """Else padding could pass for real rows, and be written back."""
    padded = BatchMeta([1, 2, 3], "p").padded(4)
    with pytest.raises(InputError, match="same padding"):
        BatchMeta([1, 2, 3, 1], "p").union(padded)
    assert padded.union(padded) == padded


@pytest.mark.parametrize(
    "other",
    [
        BatchMeta([1, 2, 3], "p"),
        BatchMeta([3, 1], "p"),
        BatchMeta([3, 1, 2], "q"),
        BatchMeta([3, 1, 4], "p"),
    ],
)
def test_union_refuses_other_rows(other: BatchMeta) -> None:
    with pytest.raises(InputError, match="same order"):
        BatchMeta([3, 1, 2], "p").union(other)


@given(batches(min_size=1), SCHEMAS)
def test_union_with_oneself_and_with_nothing(
    meta: BatchMeta, schema: dict[str, FieldSchema]
) -> None:
    assert meta.union(meta) == meta
    assert meta.union(BatchMeta()) == meta == BatchMeta().union(meta)
    assert meta.union(BatchMeta()) is not meta


# Fields


def test_a_single_name_is_not_taken_for_its_letters() -> None:
    with pytest.raises(InputError, match="the string 'ids'"):
        BatchMeta([1], "p", {"ids": DENSE}).select_fields("ids")


@given(batches(), st.lists(st.sampled_from(["ids", "mask", "unknown"])))
def test_selected_fields(meta: BatchMeta, names: list[str]) -> None:
    selected = meta.select_fields(names)
    assert set(selected.field_names) == set(names) & set(meta.field_names)
    assert rows_of(selected) == rows_of(meta)


def test_rows_without_a_field_become_ready_with_their_first() -> None:
    """As made by mode="insert"."""
    inserted = BatchMeta([1, 2], "p", {}, np.zeros(2, np.int8))
    assert inserted.with_fields({"x": DENSE}).is_ready
    assert not inserted.is_ready
    partly = BatchMeta([1, 2], "p", {"y": DENSE}, np.array([1, 0], np.int8))
    assert partly.with_fields({"x": DENSE}).production_status.tolist() == [1, 0]


# Travelling


@given(batches())
def test_pickling_keeps_everything(meta: BatchMeta) -> None:
    again = pickle.loads(pickle.dumps(meta))
    assert again == meta
    assert rows_of(again) == rows_of(meta)
    if again.size:
        again.production_status[0] = 5  # writable, also where Ray gives a read-only buffer
        padded = meta.padded(7)
        padded.read_only = True
        twin = pickle.loads(pickle.dumps(padded))
        assert (twin, twin.padding, twin.read_only) == (padded, padded.padding, True)


@pytest.mark.parametrize("partitions", [["train_17"], ["train_17", "train_18"]])
def test_a_thousand_rows_are_a_few_kilobytes(partitions: list[str]) -> None:
    fields = [
        "input_ids",
        "attention_mask",
        "position_ids",
        "responses",
        "rewards",
        "old_log_probs",
    ]
    meta = BatchMeta(
        range(5_000_000_000, 5_000_001_024),
        [partitions[row % len(partitions)] for row in range(1024)],
        {name: FieldSchema("dense", "bfloat16", (8192,)) for name in fields},
        np.array([row % 2 for row in range(1024)], np.int8),
        {"temperature": 1.0, "global_steps": 7},
    )
    packed = pickle.dumps(meta)
    assert len(packed) < 16 << 10
    assert pickle.loads(packed) == meta


def test_equality() -> None:
    meta = BatchMeta([1, 2], "p", {"x": DENSE}, extra_info={"a": torch.ones(2)})
    assert meta == meta.copy()
    assert meta != meta[:1]
    assert meta != meta.select_fields([])
    assert meta != BatchMeta([1, 2], "p", {"x": DENSE}, extra_info={"a": torch.zeros(2)})
    assert meta != "meta"
    with pytest.raises(TypeError, match="unhashable"):
        hash(meta)
