"""Samples by user key: the functions, case by case."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.compat.peer import differs, stack, tq

pytestmark = pytest.mark.usefixtures("client")


def columns(rows: int, **more: Any) -> TensorDict:
    return TensorDict(
        {"x": torch.tensor([[2 * n, 2 * n + 1] for n in range(rows)]), **more}, batch_size=rows
    )


def rows_of(data: TensorDict, field: str) -> list[Any]:
    column: Any = data[field]
    return [row.tolist() for row in column.unbind()]


# Writing


def test_a_new_key_makes_row_and_partition() -> None:
    tq.kv_batch_put(["b", "a"], "p", columns(2), [{"n": 1}, {"n": 2}])
    assert tq.kv_list() == {"p": {"b": {"n": 1}, "a": {"n": 2}}}
    assert list(tq.kv_list("p")["p"]) == ["b", "a"]  # in the order of the puts


def test_a_known_key_is_written_again_and_keeps_the_rest() -> None:
    tq.kv_batch_put(["a", "b"], "p", columns(2, s=torch.zeros(2)), [{"n": 1, "m": 1}, {}])
    meta = tq.kv_put("a", "p", {"x": torch.tensor([7, 7])}, {"n": 2})
    assert meta.tags == [{"n": 2, "m": 1}]
    assert meta.fields == ["s", "x"]
    got = tq.kv_batch_get(["a", "b"], "p")
    assert rows_of(got, "x") == [[7, 7], [2, 3]]
    assert got["s"].tolist() == [0, 0]


def test_a_put_returns_what_was_merged() -> None:
    tq.kv_batch_put(["a", "b"], "p", columns(2), [{"n": 1}, {"n": 2}])
    tq.kv_put("a", "p", {"only": torch.ones(1)})
    meta = tq.kv_batch_put(["b", "a"], "p", TensorDict({"e": torch.ones(2)}, batch_size=2))
    assert (meta.keys, meta.partition_id) == (["b", "a"], "p")
    assert meta.tags == [{"n": 2}, {"n": 1}]
    assert meta.fields == ["e", "x"]  # of all rows, sorted
    assert meta.extra_info == {}
    meta.extra_info["mine"] = 1


def test_a_field_may_come_later_for_some_rows() -> None:
    tq.kv_batch_put(["a", "b"], "p", columns(2))
    tq.kv_put("b", "p", {"late": torch.ones(3)})
    assert sorted(tq.kv_batch_get(["a", "b"], "p").keys()) == ["x"]
    assert sorted(tq.kv_batch_get(["b"], "p").keys()) == ["late", "x"]


def test_a_tag_alone_registers_a_key_or_is_merged() -> None:
    assert tq.kv_put("k", "p", tag={"status": "running"}).fields == []
    assert tq.kv_put("k", "p", tag={"done": True}).tags == [{"status": "running", "done": True}]
    tq.kv_put("k", "p", {"x": torch.ones(1)})
    assert tq.kv_put("k", "p", tag={}).fields == ["x"]
    assert tq.kv_batch_put(["l", "m"], "p", tags=[{}, {}]).fields == []


def test_columns_without_a_field_are_no_columns() -> None:
    meta = tq.kv_batch_put(["a", "b"], "p", TensorDict({}, batch_size=2), [{"n": 1}, {"n": 2}])
    assert (meta.fields, meta.tags) == ([], [{"n": 1}, {"n": 2}])


def test_a_field_may_change_its_dtype_and_kind() -> None:
    tq.kv_batch_put(["a", "b"], "p", columns(2))
    tq.kv_put("a", "p", {"x": torch.ones(2, dtype=torch.float64)})
    tq.kv_put("c", "p", {"x": torch.ones(2, dtype=torch.float64)})
    assert tq.kv_batch_get(["a", "c"], "p")["x"].dtype == torch.float64
    tq.kv_put("b", "p", {"x": "text"})
    assert tq.kv_batch_get("b", "p").get("x").tolist() == ["text"]


def test_a_data_parser_makes_the_columns_that_are_kept() -> None:
    def double(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": batch["x"] * 2}

    tq.kv_batch_put(["a", "b"], "p", columns(2), data_parser=double)
    assert rows_of(tq.kv_batch_get(["a", "b"], "p"), "x") == [[0, 2], [4, 6]]


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda batch: batch | {"more": batch["x"]}, id="another field"),
        pytest.param(lambda batch: {"x": batch["x"][:1]}, id="fewer rows"),
        pytest.param(list, id="no dict"),
    ],
)
def test_a_data_parser_may_change_values_alone(wrong: Any) -> None:
    tq.kv_batch_put(["a", "b"], "p", columns(2))
    with pytest.raises((ValueError, RuntimeError)):
        tq.kv_batch_put(["a", "b"], "p", columns(2) + 7, data_parser=wrong)
    assert rows_of(tq.kv_batch_get(["a", "b"], "p"), "x") == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("call", "arguments", "error"),
    [
        ("kv_put", {"key": "k"}, ValueError),
        ("kv_put", {"key": "k", "fields": [1]}, ValueError),
        ("kv_put", {"key": 5, "tag": {}}, TypeError),
        ("kv_batch_put", {"keys": ["k"]}, ValueError),
        ("kv_batch_put", {"keys": [], "tags": []}, ValueError),
        ("kv_batch_put", {"keys": ["a", 1], "tags": [{}, {}]}, TypeError),
        ("kv_batch_put", {"keys": ["a"], "fields": columns(2)}, ValueError),
        ("kv_batch_put", {"keys": ["a", "b"], "tags": [{}]}, ValueError),
        ("kv_batch_put", {"keys": ["a", "a"], "fields": columns(2)}, ValueError),
        (
            "kv_put",
            {"key": "k", "fields": {"x": torch.nested.nested_tensor([torch.ones(1)])}},
            ValueError,
        ),
    ],
)
def test_a_bad_put_is_refused(call: str, arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        getattr(tq, call)(partition_id="p", **arguments)


@differs("keys stay registered after the error")
@pytest.mark.parametrize(
    "arguments",
    [
        {"keys": ["a", "b"], "tags": [{}]},
        {"keys": ["a", "a"], "fields": columns(2)},
        {"keys": ["a"], "fields": columns(2)},
    ],
)
def test_a_bad_put_leaves_nothing(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Got|distinct"):
        tq.kv_batch_put(partition_id="p", **arguments)
    assert tq.kv_list() == {}


@differs("AttributeError")
def test_a_batch_may_be_a_mapping() -> None:
    tq.kv_batch_put(["a", "b"], "p", {"x": torch.ones(2, 3), "u": ["v", None]})
    assert tq.kv_batch_get(["b"], "p").get("u").tolist() == [None]


@differs("updates that run at the same time overwrite each other")
def test_tags_put_at_the_same_time_are_all_kept() -> None:
    async def update() -> None:
        await asyncio.gather(*(tq.async_kv_put("k", "p", tag={f"tag{n}": n}) for n in range(20)))

    asyncio.run(update())
    assert tq.kv_list("p") == {"p": {"k": {f"tag{n}": n for n in range(20)}}}


# Reading


def test_rows_come_in_the_order_of_the_keys_and_may_repeat() -> None:
    tq.kv_batch_put(["a", "b", "c"], "p", columns(3))
    got = tq.kv_batch_get(["c", "a", "c"], "p")
    assert rows_of(got, "x") == [[4, 5], [0, 1], [4, 5]]
    assert got.batch_size == torch.Size([3])
    assert rows_of(tq.kv_batch_get("b", "p"), "x") == [[2, 3]]


def test_fields_that_not_all_rows_have_are_left_out() -> None:
    tq.kv_batch_put(["a", "b"], "p", columns(2, y=torch.ones(2)))
    tq.kv_put("a", "p", {"part": torch.ones(1)})
    got = tq.kv_batch_get(["a", "b"], "p", ["part", "y", "unknown"])
    assert list(got.keys()) == ["y"]
    assert sorted(tq.kv_batch_get(["a", "b"], "p").keys()) == ["x", "y"]
    assert list(tq.kv_batch_get(["a"], "p", "part").keys()) == ["part"]


def test_only_unknown_fields_give_an_empty_result() -> None:
    tq.kv_batch_put(["a", "b"], "p", columns(2))
    got = tq.kv_batch_get(["a", "b"], "p", ["unknown"])
    assert (list(got.keys()), got.batch_size) == ([], torch.Size([0]))


def test_missing_keys_are_left_out() -> None:
    tq.kv_batch_put(["a", "b"], "p", columns(2))
    assert rows_of(tq.kv_batch_get(["gone", "b", "a"], "p"), "x") == [[2, 3], [0, 1]]


@pytest.mark.parametrize(("key", "partition"), [("gone", "p"), ("a", "nowhere")])
def test_no_key_at_all_is_an_error(key: str, partition: str) -> None:
    tq.kv_put("a", "p", {"x": torch.ones(1)})
    with pytest.raises(ValueError, match="not found"):
        tq.kv_batch_get([key], partition)


@pytest.mark.parametrize("select_fields", [None, ["x"]])
@pytest.mark.parametrize("keys", [["tagged"], ["a", "tagged"]])
def test_rows_without_a_common_field_are_an_error(
    keys: list[str], select_fields: list[str] | None
) -> None:
    tq.kv_put("a", "p", {"x": torch.ones(1)})
    tq.kv_put("tagged", "p", tag={})
    with pytest.raises(ValueError, match="not ready"):
        tq.kv_batch_get(keys, "p", select_fields)


@pytest.mark.parametrize(("keys", "error"), [([], ValueError), ([1], TypeError)])
@pytest.mark.parametrize("call", ["kv_batch_get", "kv_clear"])
def test_bad_keys_are_refused(call: str, keys: list[Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        getattr(tq, call)(keys, "p")


def test_metadata_names_the_rows_and_fields_to_get() -> None:
    meta = tq.kv_batch_put(["a", "b"], "p", columns(2, y=torch.ones(2)))
    assert sorted(tq.kv_batch_get_by_meta(meta).keys()) == ["x", "y"]
    assert list(tq.kv_batch_get_by_meta(meta, "y").keys()) == ["y"]
    with pytest.raises(ValueError, match="not found in the metadata"):
        tq.kv_batch_get_by_meta(meta, ["y", "z"])
    with pytest.raises(ValueError, match="partition_id"):
        tq.kv_batch_get_by_meta(tq.KVBatchMeta(keys=["a"], tags=[{}]))


# Listing and clearing


def test_the_list_knows_partitions_and_tags() -> None:
    assert tq.kv_list() == {}
    assert tq.kv_list("nowhere") == {}
    tq.kv_put("a", "p", tag={"n": None, "deep": {"l": [1, 2.5, "x"]}})
    tq.kv_put("b", "q", {"x": torch.ones(1)})
    assert tq.kv_list() == {"p": {"a": {"n": None, "deep": {"l": [1, 2.5, "x"]}}}, "q": {"b": {}}}
    assert tq.kv_list("q") == {"q": {"b": {}}}


def test_rows_without_a_key_are_not_listed() -> None:
    tq.get_client().put(columns(2), partition_id="p")
    assert tq.kv_list() == {"p": {}}


def test_clearing_forgets_rows_and_keeps_the_partition() -> None:
    tq.kv_batch_put(["a", "b", "c"], "p", columns(3), [{}, {"n": 1}, {}])
    tq.kv_clear(["a", "gone"], "p")
    assert tq.kv_list() == {"p": {"b": {"n": 1}, "c": {}}}
    tq.kv_clear("b", "p")
    tq.kv_clear(["b"], "p")
    tq.kv_clear(["c"], "p")
    assert tq.kv_list() == {"p": {}}
    tq.kv_clear(["a"], "nowhere")
    tq.kv_put("a", "p", {"x": torch.tensor([9])})  # made anew
    assert rows_of(tq.kv_batch_get("a", "p"), "x") == [[9]]


# Loops


def test_twins_can_be_awaited_from_any_loop() -> None:
    async def use(key: str) -> Any:
        await tq.async_kv_put(key, "p", {"x": torch.ones(2)}, {"n": 1})
        meta = await tq.async_kv_batch_put([key], "p", tags=[{"m": 2}])
        got = await tq.async_kv_batch_get_by_meta(meta)
        same = await tq.async_kv_batch_get([key], "p")
        assert rows_of(got, "x") == rows_of(same, "x")
        listed = await tq.async_kv_list("p")
        await tq.async_kv_clear([key], "p")
        return listed

    for key in ("a", "b", "c"):
        assert asyncio.run(use(key)) == {"p": {key: {"n": 1, "m": 2}}}


def test_blocking_calls_are_legal_inside_a_running_loop() -> None:
    async def use() -> Any:
        tq.kv_put("a", "p", {"x": torch.ones(2)})
        return tq.kv_batch_get("a", "p")

    assert rows_of(asyncio.run(use()), "x") == [[1, 1]]


def test_many_callers_at_the_same_time_get_their_own_rows() -> None:
    async def use(n: int) -> Any:
        await tq.async_kv_put(f"k{n}", "p", {"x": torch.full((3,), n)})
        return rows_of(await tq.async_kv_batch_get(f"k{n}", "p"), "x")

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(use(n) for n in range(16)))

    assert asyncio.run(all_of_them()) == [[[n] * 3] for n in range(16)]


def test_values_of_any_kind_come_back() -> None:
    values = ["", None, {"a": [1, {"b": None}]}, [1, "x"], b"bytes", float("inf"), True]
    fields = TensorDict({"v": stack(*values)}, batch_size=len(values))
    keys = [str(n) for n in range(len(values))]
    tq.kv_batch_put(keys, "p", fields)
    assert tq.kv_batch_get(keys, "p").get("v").tolist() == values


def test_a_list_is_its_callers_own() -> None:
    tq.kv_put("a", "p", tag={"deep": {"l": [1]}})
    tq.kv_list()["p"]["a"]["deep"]["l"].append(2)
    tq.kv_list("p")["p"].clear()
    assert tq.kv_list() == {"p": {"a": {"deep": {"l": [1]}}}}
