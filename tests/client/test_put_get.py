"""What is put comes back, under the samples it was put under."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

import tq_redis as tq
from tq_redis.deadline import Deadline


def jagged(*lengths: int) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)


def test_columns_come_back_as_they_were_put(client: tq.Client) -> None:
    rewards = torch.arange(8.0)
    objects = ["a", "a", None, {"k": [1]}, "", b"\x00", 2.5, "汉字"]
    meta = client.put(
        {"rewards": rewards, "ids": jagged(3, 1, 4, 1, 5, 9, 2, 6), "note": objects},
        partition_id="p",
    )

    columns = client.get_columns(meta)

    assert torch.equal(columns["rewards"], rewards)
    assert columns["ids"].is_nested
    assert [len(row) for row in columns["ids"].unbind()] == [3, 1, 4, 1, 5, 9, 2, 6]
    assert columns["note"] == objects


def test_rows_of_three_puts_in_any_order(client: tq.Client) -> None:
    parts = [
        client.put({"x": torch.full((3, 2), float(n)), "t": [str(n)] * 3}, partition_id="p")
        for n in range(3)
    ]
    mixed = tq.BatchMeta.concat(parts).select_samples([7, 0, 3, 0])

    columns = client.get_columns(mixed)

    assert columns["x"][:, 0].tolist() == [2.0, 0.0, 1.0, 0.0]
    assert columns["t"] == ["2", "0", "1", "0"]


def test_rows_of_two_partitions_in_one_batch(client: tq.Client) -> None:
    one = client.put({"x": torch.zeros(2)}, partition_id="one")
    two = client.put({"x": torch.ones(2)}, partition_id="two")
    both = tq.BatchMeta.concat([one, two]).select_samples([2, 0, 3, 1])

    assert client.get_columns(both)["x"].tolist() == [1.0, 0.0, 1.0, 0.0]


def test_results_are_private_and_writable(client: tq.Client) -> None:
    source = torch.ones(2, 3)
    meta = client.put({"x": source}, partition_id="p")
    source.zero_()

    client.get_columns(meta)["x"].add_(5)

    assert torch.equal(client.get_columns(meta)["x"], torch.ones(2, 3))


def test_tensordict_in_and_out(client: tq.Client) -> None:
    batch = TensorDict({"x": torch.ones(2, 3), "s": ["a", "b"]}, batch_size=[2])

    data = client.get_data(client.put(batch, partition_id="p"))

    assert data.batch_size == torch.Size([2])
    assert torch.equal(data["x"], torch.ones(2, 3))
    assert data.get("s").tolist() == ["a", "b"]


def test_numpy_columns(client: tq.Client) -> None:
    meta = client.put(
        {"n": np.arange(3, dtype=np.int16), "o": np.array(["a", None, 1], dtype=object)},
        partition_id="p",
    )
    columns = client.get_columns(meta)
    assert columns["n"].dtype == torch.int16
    assert columns["o"] == ["a", None, 1]


def test_put_adds_fields_to_the_samples_of_the_metadata(client: tq.Client) -> None:
    meta = client.put({"x": torch.arange(4.0)}, partition_id="p")
    part = meta.select_samples([3, 1])

    wider = client.put({"y": torch.tensor([30.0, 10.0])}, part)

    assert wider.field_names == ["x", "y"]
    assert client.get_columns(wider)["y"].tolist() == [30.0, 10.0]
    with pytest.raises(tq.NotReadyError, match=r"'y'.*not produced yet in rows \[") as caught:
        client.get_columns(meta, ["y"])
    assert caught.value.rows == (meta.global_indexes[0], meta.global_indexes[2])


def test_a_large_put_goes_in_steps_and_comes_back_whole(client: tq.Client) -> None:
    rows, fields = 3000, 4  # 12,000 cells
    columns = {f"f{n}": torch.arange(rows) + n for n in range(fields)}
    columns["ids"] = torch.nested.as_nested_tensor(
        [torch.full((n % 3 + 1,), n) for n in range(rows)], layout=torch.jagged
    )
    meta = client.put(columns, partition_id="p")

    got = client.get_columns(meta)

    assert meta.size == rows
    for n in range(fields):
        assert torch.equal(got[f"f{n}"], columns[f"f{n}"])
    assert torch.equal(got["ids"].values(), columns["ids"].values())


def test_overwrite_replaces_and_frees(client: tq.Client) -> None:
    meta = client.put({"x": torch.zeros(4, 100)}, partition_id="p")
    before = client.get_summary("p")["bytes"]

    client.put({"x": torch.ones(4, 100)}, meta)

    assert torch.equal(client.get_columns(meta)["x"], torch.ones(4, 100))
    assert client.get_summary("p")["bytes"] == before


def test_another_dtype_is_refused_unless_asked_for(client: tq.Client) -> None:
    meta = client.put({"x": torch.zeros(2)}, partition_id="p")
    half = {"x": torch.ones(2, dtype=torch.bfloat16)}

    with pytest.raises(tq.SchemaConflictError, match="float32.*bfloat16") as caught:
        client.put(half, meta)
    assert caught.value.fields == ("x",)
    assert client.get_columns(meta)["x"].tolist() == [0.0, 0.0]

    client.put(half, meta, overwrite=True)
    assert client.get_columns(meta)["x"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({}, "no fields"),
        ({"x": torch.zeros(0)}, "no rows"),
        ({"x": torch.zeros(2), "y": [1]}, "'x': 2, 'y': 1"),
        ({"x": torch.tensor(1.0)}, "no batch dimension"),
        ({"x": "text"}, "tensor, an array or a list"),
        ({"": torch.zeros(1)}, "non-empty strings"),
        ({3: torch.zeros(1)}, "non-empty strings"),
    ],
)
def test_bad_columns_are_refused_before_anything_is_written(
    client: tq.Client, data: dict[str, Any], says: str
) -> None:
    with pytest.raises(tq.InputError, match=says):
        client.put(data, partition_id="p")
    assert client.get_partition_list() == []


def test_equal_values_that_tensordict_keeps_once_are_one_per_row(client: tq.Client) -> None:
    batch = TensorDict({"x": torch.zeros(3)}, batch_size=[3])
    batch.set("source", NonTensorData("math", batch_size=[3]))
    meta = client.put(batch, partition_id="p")
    assert client.get_columns(meta, ["source"])["source"] == ["math"] * 3


def test_put_says_what_it_needs(client: tq.Client) -> None:
    meta = client.put({"x": torch.zeros(2)}, partition_id="p")
    with pytest.raises(tq.InputError, match="metadata .* or partition_id"):
        client.put({"x": torch.zeros(2)})
    with pytest.raises(tq.InputError, match="3 rows for the 2 samples"):
        client.put({"y": torch.zeros(3)}, meta)
    with pytest.raises(tq.InputError, match="1 group_ids for 2 rows"):
        client.put({"x": torch.zeros(2)}, partition_id="p", group_ids=["g"])
    with pytest.raises(tq.InputError, match="not negative|negative"):
        client.put({"x": torch.zeros(2)}, partition_id="p", timeout=-1)


def test_data_parser_sees_and_changes_the_columns(client: tq.Client) -> None:
    def load(columns: dict[str, Any]) -> dict[str, Any]:
        return {"image": [path.upper() for path in columns["image"]]}

    meta = client.put({"image": ["a.png", "b.png"]}, partition_id="p", data_parser=load)
    assert client.get_columns(meta)["image"] == ["A.PNG", "B.PNG"]
    with pytest.raises(tq.InputError, match="must keep the number of rows"):
        client.put({"x": [1, 2]}, partition_id="p", data_parser=lambda columns: {"x": [1]})
    with pytest.raises(tq.InputError, match="must return the fields"):
        client.put({"x": [1]}, partition_id="p", data_parser=lambda columns: {"y": [1]})


def test_unknown_field_and_partition_name_the_nearest(client: tq.Client) -> None:
    meta = client.put({"responses": torch.zeros(2)}, partition_id="train_1")
    with pytest.raises(tq.FieldNotFoundError, match="Did you mean 'responses'"):
        client.get_columns(meta, ["respones"])
    with pytest.raises(tq.PartitionNotFoundError, match="Did you mean 'train_1'"):
        client.get_summary("train1")


def test_an_empty_batch_has_no_columns(client: tq.Client) -> None:
    assert client.get_columns(tq.BatchMeta.empty()) == {}
    assert client.get_data(tq.BatchMeta.empty()).batch_size == torch.Size([0])


def test_lost_bytes_are_named_by_row_and_field(client: tq.Client) -> None:
    lost = client.put({"x": torch.zeros(2)}, partition_id="p")
    kept = client.put({"x": torch.ones(2)}, partition_id="p")
    core = client._core
    handles = client._portal.run(_handles(core, lost))
    client._portal.run(core.data.delete(handles, core._deadline(None)))

    with pytest.raises(tq.DataLostError, match=r"fields \['x'\] are gone for rows") as caught:
        client.get_columns(tq.BatchMeta.concat([lost, kept]))

    assert caught.value.rows == tuple(lost.global_indexes)
    assert client.get_columns(kept)["x"].tolist() == [1.0, 1.0]


async def _handles(core: Any, meta: tq.BatchMeta) -> list[str]:
    where = await core.control.locate("p", meta.global_indexes, ["x"], core._deadline(None))
    return [run[0] for run in where["x"]]


def test_tags_are_put_with_the_columns(client: tq.Client) -> None:
    meta = client.put({"x": torch.zeros(2)}, partition_id="p", tags=[{"a": 1}, {}])
    assert meta.custom_meta == [{"a": 1}, {}]
    more = client.put({"y": torch.zeros(2)}, meta, tags=[{"b": 2}, {"a": 3}])
    assert more.custom_meta == [{"a": 1, "b": 2}, {"a": 3}]
    found = client.get_meta(["x", "y"], 2, "p", task_name="t")
    assert found.custom_meta == more.custom_meta
    with pytest.raises(tq.InputError, match="tags for 1 rows, the columns have 2"):
        client.put({"x": torch.zeros(2)}, partition_id="p", tags=[{}])


def stored_blocks(client: tq.Client) -> list[str]:
    """Handles that the memory backend holds in this namespace."""
    call = client._core.data.unconfirmed(-1.0, Deadline(10))
    return [handle for held in client._portal.run(call).values() for handle in held]


def test_a_put_of_many_rows_is_one_block(client: tq.Client) -> None:
    """Redis handles the rows in steps; the bytes are written once."""
    x = torch.arange(5000)
    meta = client.put({"x": x, "s": [str(i) for i in range(5000)]}, partition_id="p")
    assert meta.global_indexes == list(range(meta.global_indexes[0], meta.global_indexes[0] + 5000))
    found = client.get_columns(meta)
    assert torch.equal(found["x"], x)
    assert found["s"] == [str(i) for i in range(5000)]
    more = client.put({"y": x + 1}, meta[::-1])
    assert torch.equal(client.get_columns(more)["y"], x + 1)
    assert len(stored_blocks(client)) == 2
    client.clear_samples(meta[:4999])
    assert len(stored_blocks(client)) == 2
    assert client.get_columns(meta[4999:])["x"].tolist() == [4999]
    client.clear_samples(meta[4999:])
    assert stored_blocks(client) == []


def test_a_consumer_that_clears_faster_than_a_put_goes_on(
    client: tq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two steps of the put, all rows of the first are claimed and cleared."""
    control = client._core.control
    produce, steps = control.produce, 0

    async def produce_and_clear(partition: str, write: Any, deadline: Any) -> Any:
        nonlocal steps
        result = await produce(partition, write, deadline)
        steps += 1
        if steps == 1:
            freed = await control.clear_samples(partition, result.ids, deadline)
            await client._core.data.delete(freed, deadline)
        return result

    monkeypatch.setattr(control, "produce", produce_and_clear)
    x = torch.arange(3000)
    meta = client.put({"x": x}, partition_id="p")
    left = client.get_summary("p")["samples"]
    assert isinstance(left, int)
    assert 0 < left < 3000
    assert torch.equal(client.get_columns(meta[3000 - left :])["x"], x[3000 - left :])
    with pytest.raises(tq.SampleNotFoundError):
        client.get_columns(meta[:1])


def test_a_sample_that_is_named_twice_is_refused_however_far_apart(client: tq.Client) -> None:
    meta = client.put({"x": torch.zeros(3000)}, partition_id="p")
    twice = tq.BatchMeta([*meta.global_indexes, meta.global_indexes[0]], "p")
    before = stored_blocks(client)
    with pytest.raises(tq.InputError, match="distinct, got .1. more than once"):
        client.put({"y": torch.zeros(3001)}, twice)
    assert client.get_summary("p").get("produced:y") is None
    assert stored_blocks(client) == before


def test_many_rows_without_columns(client: tq.Client) -> None:
    """As many steps as they need; no script has them all."""
    made = client.get_meta([], 5000, "p", mode="insert")
    assert len(set(made.global_indexes)) == 5000
    tagged = client.merge_custom_meta(made, [{"n": n} for n in range(5000)])
    found = client.get_meta([], 5000, "p", mode="force_fetch")
    assert found.custom_meta == tagged.custom_meta
    keys = [f"k{n}" for n in range(3000)]
    assert (
        client.kv_batch_put(keys, "q", tags=[{"n": n} for n in range(3000)]).tags[-1]["n"] == 2999
    )
