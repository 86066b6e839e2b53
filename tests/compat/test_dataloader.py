"""Streaming datasets and their loader."""

from __future__ import annotations

import importlib
import os
import threading
from itertools import islice
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.compat.conftest import Start
from tests.compat.peer import IS_PEER, PACKAGE, differs, stack, tq
from tests.test_storage_units import UnitProcess

functions: Any = importlib.import_module(
    ("transfer_queue" if IS_PEER else f"{PACKAGE}.compat.transfer_queue")
    + ".dataloader.streaming_dataset"
)

_nested: Any = torch.nested


@pytest.fixture
def conf(start: Start) -> Any:
    """Of a queue as such code sets it: ranks share batches, and get_meta answers at once."""
    return start(sampler="RankAwareSampler", polling_mode=True)


def stream(conf: Any, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "config": conf,
        "batch_size": 4,
        "micro_batch_size": 2,
        "data_fields": ["x"],
        "partition_id": "p",
        "task_name": "t",
        "dp_rank": 0,
        "should_check_consumption_status": True,
    }
    return tq.StreamingDataset(**(settings | options))


def put(rows: int, *, partition: str = "p", first: int = 0) -> None:
    data = TensorDict({"x": torch.arange(first, first + rows)}, batch_size=rows)
    tq.get_client().put(data, partition_id=partition)


def values(pieces: Any) -> list[list[int]]:
    return [data["x"].tolist() for data, _ in pieces]


def test_it_ends_when_all_is_consumed(conf: Any) -> None:
    put(8)
    pieces = list(tq.StreamingDataLoader(stream(conf)))
    assert values(pieces) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [meta.size for _, meta in pieces] == [2, 2, 2, 2]


def test_a_stream_without_end_waits_for_more(conf: Any) -> None:
    put(4)
    pieces = iter(stream(conf, should_check_consumption_status=False))
    assert values(islice(pieces, 2)) == [[0, 1], [2, 3]]
    producer = threading.Timer(0.3, put, [4], {"first": 4})
    producer.start()
    assert values(islice(pieces, 2)) == [[4, 5], [6, 7]]
    producer.join()


def test_ranks(conf: Any) -> None:
    put(8)
    first, twin, other = (
        iter(stream(conf, dp_rank=rank, should_check_consumption_status=False))
        for rank in (0, 0, 1)
    )
    assert values(islice(first, 2)) == values(islice(twin, 2)) == [[0, 1], [2, 3]]
    assert values(islice(other, 2)) == [[4, 5], [6, 7]]


@differs("a rank whose batches its twin has had ends without them")
def test_a_twin_that_is_late_gets_the_batches_too(conf: Any) -> None:
    put(8)
    first, twin = (values(stream(conf)) for _ in range(2))
    assert first == twin == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_reset_replays_and_step_goes_on(conf: Any) -> None:
    put(4)
    put(4, partition="q", first=10)
    loader = tq.StreamingDataLoader(stream(conf))
    seen = values(loader)
    loader.reset()
    assert values(loader) == seen
    assert len(loader.get_buffer()) == 1
    loader.step("q")
    assert loader.get_buffer() == []
    assert values(loader) == [[10, 11], [12, 13]]


def test_functions_of_the_users_own(conf: Any) -> None:
    """One that finds nothing at first is asked again."""
    put(4)
    answers = iter([None, None])

    def fetch(**arguments: Any) -> Any:
        if next(answers, "no more") is None:
            return None, None
        return functions.default_fetch_batch_fn(**arguments)

    def process(data: Any, meta: Any, micro_batch_size: int) -> Any:
        yield data, micro_batch_size

    dataset = stream(conf, fetch_batch_fn=fetch, process_batch_fn=process)
    ((data, size),) = islice(dataset, 1)
    assert (data["x"].tolist(), size) == ([0, 1, 2, 3], 2)


def test_too_few_samples_are_none(conf: Any) -> None:
    put(3)
    data, meta = functions.default_fetch_batch_fn(
        tq_client=tq.get_client(),
        data_fields=["x"],
        batch_size=4,
        partition_id="p",
        task_name="t",
        sampling_config={"dp_rank": 0, "task_name": "t"},
        batch_index=0,
    )
    assert (data, meta.size) == (None, 0)


@pytest.mark.parametrize(
    "options", [{"micro_batch_size": 0}, {"data_fields": []}, {"dp_rank": -1}], ids=str
)
def test_bad_arguments(conf: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        stream(conf, **options)


@differs("workers of a rank all fetch the same batches")
def test_worker_processes(redis_url: str, namespace: str) -> None:
    redis = {"url": redis_url, "namespace": namespace}
    environment = {"TQ_REDIS_URL": redis_url, "TQ_REDIS_NAMESPACE": namespace}
    unit = UnitProcess({**os.environ, **environment})
    conf = tq.init(
        {
            "controller": {"sampler": "RankAwareSampler", "polling_mode": True},
            "tq_redis": {"redis": redis, "data": {"backend": "zmq"}},
        }
    )
    try:
        put(16)
        loader = tq.StreamingDataLoader(stream(conf), num_workers=2, persistent_workers=True)
        assert sorted(row for piece in values(loader) for row in piece) == list(range(16))
    finally:
        tq.close()
        unit.end()


# Cutting a batch up


def batch(rows: int) -> tuple[TensorDict, Any]:
    columns: dict[str, Any] = {
        "jagged": _nested.as_nested_tensor(
            [torch.full((1 + row % 3,), row) for row in range(rows)], layout=torch.jagged
        ),
        "strided": _nested.as_nested_tensor(
            [torch.full((1 + row % 2, 1 + row % 3), row) for row in range(rows)],
            layout=torch.strided,
        ),
        "text": stack(*[f"text {row}" for row in range(rows)]),
        "x": torch.arange(rows),
    }
    data = TensorDict(columns, batch_size=rows)
    return data, tq.BatchMeta(list(range(rows)), ["p"] * rows)


def test_micro_batches_of_all_kinds_of_columns() -> None:
    pieces = functions.chunk_batch_fn(*batch(5), 2)
    assert values(pieces) == [[0, 1], [2, 3], [4]]
    for data, _ in pieces:
        rows = data["x"].tolist()
        assert data["jagged"].layout is torch.jagged
        assert [row[0].item() for row in data["jagged"].unbind()] == rows
        assert [row[0, 0].item() for row in data["strided"].unbind()] == rows
        assert list(data["text"]) == [f"text {row}" for row in rows]


@differs("metadata is cut into equal parts, columns are not")
def test_metadata_stays_with_its_rows() -> None:
    pieces = functions.chunk_batch_fn(*batch(10), 4)
    assert [meta.global_indexes for _, meta in pieces] == values(pieces)


def test_what_cannot_be_cut() -> None:
    data, meta = batch(4)
    for size in (0, -1, 1.5, 5):
        with pytest.raises(ValueError, match="micro_batch_size"):
            functions.chunk_batch_fn(data, meta, size)
    with pytest.raises(TypeError, match="TensorDict"):
        functions.chunk_batch_fn({"x": torch.arange(4)}, meta)
    with pytest.raises(ValueError, match=r".*"):
        functions.chunk_batch_fn(TensorDict({"x": torch.arange(4)}, batch_size=()), meta)
