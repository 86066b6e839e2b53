"""tqbridge, in one process."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl import DataProto

import tq_redis as tq
from tq_redis.bridge import tqbridge

_stack: Any = NonTensorStack  # typed as abstract


@pytest.fixture
def meta(client: tq.Client) -> tq.BatchMeta:
    columns = {
        "x": torch.arange(4.0),
        "ids": torch.nested.as_nested_tensor(
            [torch.arange(n + 1) for n in range(4)], layout=torch.jagged
        ),
        "note": [["a"], ["b"], None, {"k": 1}],
        "unused": torch.zeros(4, 10),
    }
    meta = client.put(columns, partition_id="p")
    meta.extra_info = {"temperature": 0.5}
    return meta


@tqbridge(reads=("x", "note"), writes=("y", "text"))
def double(data: DataProto, factor: int = 2) -> DataProto:
    assert sorted(data.batch.keys()) == ["x"]
    assert sorted(data.non_tensor_batch) == ["note"]
    assert data.meta_info == {"temperature": 0.5}
    return DataProto.from_dict(
        tensors={"y": data.batch["x"] * factor, "extra": data.batch["x"]},
        non_tensors={
            "text": np.array([repr(v) for v in data.non_tensor_batch["note"]], dtype=object)
        },
        meta_info={"metrics": {"loss": 0.25}},
    )


def test_metadata_in_dataproto_inside_metadata_out(client: tq.Client, meta: tq.BatchMeta) -> None:
    out = double(meta, factor=3)

    assert out.global_indexes == meta.global_indexes
    assert out.extra_info == {"metrics": {"loss": 0.25}}
    assert out.field_names == ["ids", "note", "text", "unused", "x", "y"]  # not "extra"
    columns = client.get_columns(out, ["y", "text"])
    assert columns["y"].tolist() == [0.0, 3.0, 6.0, 9.0]
    assert columns["text"] == ["['a']", "['b']", "None", "{'k': 1}"]


def test_plain_arguments_pass_untouched() -> None:
    @tqbridge(reads=("x",))
    def identity(data: Any, other: Any = None) -> Any:
        return data, other

    batch = DataProto.from_dict(tensors={"z": torch.zeros(2)})
    assert identity(batch, other=3) == (batch, 3)
    assert identity.reads == ("x",)
    assert identity.writes is None


def test_values_of_equal_length_stay_one_per_row(client: tq.Client) -> None:
    @tqbridge(put_data=False)
    def shape(data: DataProto) -> Any:
        return data.non_tensor_batch["pair"].shape, list(data.non_tensor_batch["pair"])

    meta = client.put({"pair": [[1, 2], [3, 4]]}, partition_id="p")
    assert shape(meta) == ((2,), [[1, 2], [3, 4]])


def test_a_tensordict_where_the_annotation_says_so(client: tq.Client, meta: tq.BatchMeta) -> None:
    @tqbridge()
    def lengths(data: TensorDict) -> TensorDict:
        assert data["ids"].is_nested
        assert data["temperature"] == 0.5
        out = TensorDict({"n": data.get("ids").offsets().diff()}, batch_size=[4])
        out.set("s", _stack(*"abcd"))
        out.set("metrics", NonTensorData({"m": 1}))
        return out

    out = lengths(meta.select_fields(["ids"]))

    assert out.extra_info == {"metrics": {"m": 1}}
    columns = client.get_columns(out, ["n", "s"])
    assert columns["n"].tolist() == [1, 2, 3, 4]
    assert columns["s"] == list("abcd")


def test_coroutine_functions(client: tq.Client, meta: tq.BatchMeta) -> None:
    @tqbridge(reads=("x",), writes=("y",))
    async def half(data: DataProto) -> DataProto:
        await asyncio.sleep(0)
        return DataProto.from_dict(tensors={"y": data.batch["x"] / 2})

    out = asyncio.run(half(meta))
    assert client.get_columns(out, ["y"])["y"].tolist() == [0.0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize(
    ("output", "info"),
    [
        (DataProto(batch=None, meta_info={"metrics": {"a": 1}}), {"metrics": {"a": 1}}),
        (DataProto(batch=None, meta_info={}), {}),
        (DataProto(), {}),
        (None, {}),
    ],
)
def test_outputs_without_columns_still_give_metadata(
    meta: tq.BatchMeta, output: Any, info: dict[str, Any]
) -> None:
    out = tqbridge()(lambda data: output)(meta)
    assert out.global_indexes == meta.global_indexes
    assert out.extra_info == info


def test_only_non_tensor_columns(client: tq.Client, meta: tq.BatchMeta) -> None:
    names = np.array([None, "", "b", "b"], dtype=object)
    out = tqbridge()(lambda data: DataProto(batch=None, non_tensor_batch={"name": names}))(meta)
    assert client.get_columns(out, ["name"])["name"] == [None, "", "b", "b"]


def test_other_outputs_are_returned_as_they_are(meta: tq.BatchMeta) -> None:
    assert tqbridge()(lambda data: 3.5)(meta) == 3.5


def test_a_missing_declared_column_is_an_error(client: tq.Client, meta: tq.BatchMeta) -> None:
    bad = tqbridge(writes=("y", "z"))(lambda data: DataProto.from_dict({"y": torch.zeros(4)}))
    with pytest.raises(tq.InputError, match=r"lacks the declared fields \['z'\]"):
        bad(meta)
    assert "produced:y" not in client.get_summary("p")


def test_another_number_of_rows_is_an_error(meta: tq.BatchMeta) -> None:
    bad = tqbridge()(lambda data: DataProto.from_dict({"y": torch.zeros(3)}))
    with pytest.raises(tq.InputError, match="3 rows for 4 samples"):
        bad(meta)


def test_padding_rows_are_computed_on_and_never_written(client: tq.Client) -> None:
    seen: list[list[float]] = []

    @tqbridge()
    def note(data: DataProto) -> DataProto:
        seen.append(data.batch["x"].tolist())
        return DataProto.from_dict({"y": torch.arange(len(data), dtype=torch.float32)})

    real = client.put({"x": torch.tensor([5.0, 6.0])}, partition_id="p")
    padded = real.padded(8)

    out = [note(part) for part in padded.chunk(4)]

    assert seen == [[5.0, 6.0]] * 4
    back = tq.BatchMeta.concat(out)
    assert back.global_indexes == real.global_indexes
    assert client.get_columns(back, ["y"])["y"].tolist() == [0.0, 1.0]
    assert client.get_summary("p")["produced:y"] == 2


def test_padding_rows_of_jagged_columns_are_cut_off(client: tq.Client) -> None:
    real = client.put({"x": torch.tensor([2, 3])}, partition_id="p")

    @tqbridge(form="tensordict")
    def spell(data: TensorDict) -> TensorDict:
        rows = [torch.arange(n) for n in data["x"].tolist()]
        ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return TensorDict({"ids": ids}, batch_size=[len(rows)])

    out = [spell(part) for part in real.padded(3).chunk(3)]  # the last one is padding alone

    ids = client.get_columns(tq.BatchMeta.concat(out), ["ids"])["ids"]
    assert [row.tolist() for row in ids.unbind()] == [[0, 1], [0, 1, 2]]


def test_a_device_that_is_not_there_is_refused(client: tq.Client, meta: tq.BatchMeta) -> None:
    called: list[Any] = []
    for absent in ("tpu", "npu:0"):
        with pytest.raises(tq.InputError, match=f"device='{absent}'"):
            tqbridge(device=absent)(called.append)(meta)
    assert called == []


def test_a_read_only_batch_is_not_written(client: tq.Client, meta: tq.BatchMeta) -> None:
    meta.read_only = True
    out = tqbridge(writes=("y",))(lambda data: None)(meta)
    assert out.size == 4
    assert "produced:y" not in client.get_summary("p")


def test_batches_by_key(client: tq.Client) -> None:
    kv = tq.kv_batch_put(["b", "a"], "p", {"x": torch.tensor([1.0, 2.0])}, [{"n": 1}, {"n": 2}])

    out = tqbridge()(lambda data: DataProto.from_dict({"y": data.batch["x"] + 1}))(kv)

    assert isinstance(out, tq.KVBatchMeta)
    assert (out.keys, out.tags, out.fields) == (["b", "a"], [{"n": 1}, {"n": 2}], ["x", "y"])
    assert tq.kv_batch_get(["a", "b"], "p", "y")["y"].tolist() == [3.0, 2.0]


def test_several_batches_in_one_call(client: tq.Client) -> None:
    one = client.put({"x": torch.tensor([1.0])}, partition_id="p")
    two = client.put({"x": torch.tensor([2.0])}, partition_id="p")

    @tqbridge()
    def add(*parts: DataProto, last: DataProto) -> DataProto:
        return DataProto.from_dict(
            {"sum": torch.stack([p.batch["x"] for p in (*parts, last)]).sum(0)}
        )

    out = add(one, two, last=two)
    assert out.global_indexes == one.global_indexes
    assert client.get_columns(out, ["sum"])["sum"].tolist() == [5.0]


def test_inside_the_function_tensors_are_private(client: tq.Client, meta: tq.BatchMeta) -> None:
    def scribble(data: DataProto) -> None:
        data.batch["x"].fill_(-1)

    tqbridge(reads=("x",))(scribble)(meta)
    assert client.get_columns(meta)["x"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_optional_fields_travel_where_they_are(client: tq.Client) -> None:
    @tqbridge(reads=("x",), may_read=("mask",), writes=("y",), may_write=("z",))
    def seen(data: DataProto) -> DataProto:
        out = {"y": data.batch["x"] + 1, "undeclared": data.batch["x"]}
        if "mask" in data.batch:
            out["z"] = data.batch["mask"]
        return DataProto.from_dict(out, meta_info={"fields": sorted(data.batch.keys())})

    bare = seen(client.put({"x": torch.zeros(2), "other": torch.ones(2)}, partition_id="p"))
    full = seen(client.put({"x": torch.zeros(2), "mask": torch.ones(2)}, partition_id="q"))

    assert bare.extra_info["fields"] == ["x"]
    assert bare.field_names == ["other", "x", "y"]
    assert full.extra_info["fields"] == ["mask", "x"]
    assert full.field_names == ["mask", "x", "y", "z"]
    assert seen.may_read == ("mask",)
    assert seen.may_write == ("z",)


def test_declared_tags_go_into_the_metadata_and_not_into_columns(client: tq.Client) -> None:
    @tqbridge(reads=("x",), writes=("y",), tags=("length", "kind"))
    def measure(data: DataProto) -> DataProto:
        return DataProto.from_dict(
            {"y": data.batch["x"], "length": torch.tensor([3, 5])},
            {"kind": np.array(["a", "b"], dtype=object)},
        )

    made = client.put({"x": torch.zeros(2)}, partition_id="p", tags=[{"seed": 1}, {"seed": 2}])
    out = measure(made)

    assert out.field_names == ["x", "y"]
    again = client.get_meta(["y"], 2, "p", task_name="t")
    assert again.custom_meta == out.custom_meta
    assert again.custom_meta == [
        {"seed": 1, "length": 3, "kind": "a"},
        {"seed": 2, "length": 5, "kind": "b"},
    ]


def test_tags_alone(client: tq.Client, meta: tq.BatchMeta) -> None:
    @tqbridge(reads=("x",), writes=(), tags=("length",))
    def measure(data: DataProto) -> DataProto:
        return DataProto.from_dict({"length": data.batch["x"].long()})

    assert [row["length"] for row in measure(meta).custom_meta] == [0, 1, 2, 3]
    assert "produced:length" not in client.get_summary("p")


def test_tags_come_back_with_keys_too(client: tq.Client) -> None:
    @tqbridge(reads=("x",), writes=(), tags=("length",))
    def measure(data: DataProto) -> DataProto:
        return DataProto.from_dict({"length": data.batch["x"].long()})

    made = client.kv_batch_put(
        ["a", "b"], "p", {"x": torch.tensor([3.0, 5.0])}, tags=[{"seed": 1}, {"seed": 2}]
    )

    assert measure(made).tags == [{"seed": 1, "length": 3}, {"seed": 2, "length": 5}]
    assert client.kv_list("p")["p"]["b"] == {"seed": 2, "length": 5}


def test_a_missing_tag_is_an_error(meta: tq.BatchMeta) -> None:
    with pytest.raises(tq.InputError, match=r"lacks the declared fields \['length'\]"):
        tqbridge(writes=(), tags=("length",))(lambda data: DataProto())(meta)
