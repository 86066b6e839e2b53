"""get_meta: modes, and what a task is told when there is too little."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.compat.conftest import Start
from tests.compat.peer import differs, tq


def put(rows: int, partition: str = "p", **columns: Any) -> Any:
    data = columns or {"x": torch.arange(rows)}
    return tq.get_client().put(TensorDict(data, batch_size=rows), partition_id=partition)


def test_each_task_has_each_sample_once(client: Any) -> None:
    ids = sorted(put(4).global_indexes)
    seen = [client.get_meta(["x"], 2, "p", task_name="t").global_indexes for _ in range(2)]
    assert seen == [ids[:2], ids[2:]]
    other = client.get_meta(["x"], 4, "p", mode="fetch", task_name="u")
    assert (other.global_indexes, other.is_ready) == (ids, True)
    assert other.field_names == ["x"]
    assert sorted(client.get_data(other)["x"].tolist()) == [0, 1, 2, 3]


def test_only_rows_with_all_fields_are_given(client: Any) -> None:
    meta = put(3)
    client.put(TensorDict({"y": torch.ones(1)}, batch_size=1), metadata=meta[1])
    assert client.get_meta(["x", "y"], 1, "p", task_name="t").global_indexes == [
        meta.global_indexes[1]
    ]


def test_all_rows_can_be_looked_at(client: Any) -> None:
    meta = put(3)
    client.get_meta(["x"], 2, "p", task_name="t")
    client.put(TensorDict({"y": torch.ones(1)}, batch_size=1), metadata=meta[1])
    found = client.get_meta(["x"], 1, "p", mode="force_fetch")
    assert (sorted(found.global_indexes), found.is_ready) == (sorted(meta.global_indexes), True)
    partly = client.get_meta(["x", "y"], 1, "p", mode="force_fetch")
    flags = zip(partly.global_indexes, partly.production_status.tolist(), strict=True)
    assert [row for row, flag in flags if flag] == [meta.global_indexes[1]]
    unknown = client.get_meta(["unknown"], 1, "p", mode="force_fetch")
    assert unknown.production_status.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 0, "task_name": "t"},
        {"task_name": None},
        {"mode": "else", "task_name": "t"},
        {"mode": "force_fetch", "partition_id": "nowhere"},
    ],
)
def test_a_bad_request_is_refused(client: Any, arguments: dict[str, Any]) -> None:
    put(1)
    request = {"data_fields": ["x"], "batch_size": 1, "partition_id": "p"}
    with pytest.raises(RuntimeError):
        client.get_meta(**request | arguments)


def test_too_few_samples_are_an_error_after_some_seconds(client: Any) -> None:
    put(2)
    with pytest.raises(RuntimeError):
        client.get_meta(["x"], 3, "p", task_name="t")
    assert client.get_consumption_status("t", "p")[1].tolist() == [0, 0]


def test_a_claim_takes_ready_rows_in_ascending_order(client: Any) -> None:
    meta = put(4)
    for row in (3, 0, 2):
        client.put(TensorDict({"y": torch.ones(1)}, batch_size=1), metadata=meta[row])
    ready = sorted(meta.global_indexes[row] for row in (0, 2, 3))
    assert client.get_meta(["y"], 3, "p", task_name="t").global_indexes == ready


def test_who_polls_gets_an_empty_batch(start: Start) -> None:
    start(polling_mode=True)
    client = tq.get_client()
    put(2)
    for fields, size, partition in ((["x"], 3, "p"), (["y"], 1, "p"), (["x"], 1, "nowhere")):
        assert client.get_meta(fields, size, partition, task_name="t").size == 0
    assert client.get_meta(["x"], 2, "p", task_name="t").size == 2
    assert client.get_meta(["x"], 1, "p", task_name="t").size == 0


@differs("the tags of the rows are not given")
def test_a_claim_has_the_tags_of_its_rows(client: Any) -> None:
    tq.kv_put("k", "p", {"x": torch.ones(1)}, {"n": 1})
    assert client.get_meta(["x"], 1, "p", task_name="t").custom_meta == [{"n": 1}]
