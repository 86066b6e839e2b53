"""Streams of micro-batches: in this process, and with a loader's worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest
import torch

import tq_redis as tq
from tests.conftest import WaitUntil
from tests.test_storage_units import UnitProcess

ROWS = 32
TIMEOUT_S = 20


def put(client: tq.Client, rows: int = ROWS, *, partition: str = "p", first: int = 0) -> None:
    client.put({"x": torch.arange(first, first + rows)}, partition_id=partition)


def stream(**options: Any) -> tq.StreamingDataset:
    settings: dict[str, Any] = {
        "config": None,
        "batch_size": 8,
        "micro_batch_size": 4,
        "data_fields": ["x"],
        "partition_id": "p",
        "task_name": "t",
        "timeout": TIMEOUT_S,
    }
    return tq.StreamingDataset(**(settings | options))


def values(pieces: Any) -> list[list[int]]:
    return [data["x"].tolist() for data, _ in pieces]


def flat(pieces: Any) -> list[int]:
    return [value for piece in values(pieces) for value in piece]


def waits(client: tq.Client) -> bool:
    """Whether a consumer of the partition waits for samples."""
    return any(task.waiters for task in client.get_standing("p").tasks.values())


# The end


def test_a_consumer_that_starts_first_gets_all_rows_and_then_the_end(
    client: tq.Client, wait_until: WaitUntil
) -> None:
    """What is there is consumed long before all is there."""
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(flat, stream())
        for first in range(0, ROWS, 8):
            put(client, 8, first=first)
            wait_until(lambda: client.check_consumption_status("t", "p"))
            assert not got.done()
        client.end_partition("p")
        assert got.result(timeout=TIMEOUT_S) == list(range(ROWS))


def test_all_that_was_expected_is_the_end(client: tq.Client) -> None:
    client.expect("p", 12)
    put(client, 12)
    assert values(stream()) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_the_last_rows_are_a_smaller_batch(client: tq.Client) -> None:
    put(client, 21)
    client.end_partition("p")
    pieces = list(stream())
    assert [len(piece) for piece in values(pieces)] == [4, 4, 4, 4, 4, 1]
    assert flat(pieces) == list(range(21))


def test_a_stream_that_must_not_end_says_so(client: tq.Client) -> None:
    put(client, 8)
    client.end_partition("p")
    with pytest.raises(tq.EndOfStreamError, match=r"'t'.*'p'"):
        list(stream(should_check_consumption_status=False))


def test_rows_that_form_no_group_are_not_dropped_in_silence(client: tq.Client) -> None:
    groups = ["a", "a", "b", "b", "c"]
    client.put({"x": torch.arange(5)}, partition_id="p", group_ids=groups)
    client.end_partition("p")
    pieces = iter(stream(sampler=tq.GRPOGroupNSampler(2)))
    assert values([next(pieces)]) == [[0, 1, 2, 3]]
    with pytest.raises(tq.CannotFillError, match="groups of 2"):
        next(pieces)


# Waiting


def test_a_waiting_loader_wakes_at_once(client: tq.Client, wait_until: WaitUntil) -> None:
    put(client, 8)
    pieces = iter(tq.StreamingDataLoader(stream(micro_batch_size=8)))
    next(pieces)
    delays: list[float] = []
    for _ in range(5):
        with ThreadPoolExecutor(1) as pool:
            woken = pool.submit(lambda: (next(pieces), time.monotonic()))
            wait_until(lambda: waits(client))
            put(client, 8)
            done = time.monotonic()
            delays.append(woken.result(timeout=TIMEOUT_S)[1] - done)
    assert sorted(delays)[2] < 0.2


def test_a_wait_in_vain_names_partition_task_and_deadline(client: tq.Client) -> None:
    put(client, 3)
    with pytest.raises(
        tq.DeadlineError, match=r"'t' waited 0.2 s for 8 .*'p'.* 3 are ready"
    ) as error:
        next(iter(stream(timeout=0.2)))
    assert (error.value.partition, error.value.deadline) == ("p", 0.2)
    assert "end_partition" in error.value.__notes__[0]


# Ranks


def test_ranks_of_one_group_get_the_same_batches_and_others_different_ones(
    client: tq.Client,
) -> None:
    put(client)
    client.end_partition("p")
    ranks = [stream(dp_rank=rank, sampler=tq.RankAwareSampler()) for rank in (0, 0, 1)]
    with ThreadPoolExecutor(3) as pool:
        first, twin, other = pool.map(flat, ranks)
    assert first == twin
    assert sorted(first + other) == list(range(ROWS))


def test_batches_are_dealt_out_by_length(client: tq.Client) -> None:
    """The last ones are of one sample a rank."""
    lengths = [9, 1, 8, 2, 7, 3, 5, 5, 4, 6]
    tags = [{"total_lengths": length} for length in lengths]
    client.put({"x": torch.tensor(lengths)}, partition_id="p", tags=tags)
    client.end_partition("p")
    options = {"sampler": tq.SeqlenBalancedSampler(dp_size=2), "batch_size": 2}
    ranks = [stream(dp_rank=rank, **options) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(flat, ranks)
    assert (len(one), len(two)) == (5, 5)
    assert sorted(one + two) == sorted(lengths)


def test_the_end_waits_for_a_share_that_another_rank_has_not_taken(
    client: tq.Client, wait_until: WaitUntil
) -> None:
    client.put({"x": torch.arange(2)}, partition_id="p", tags=[{"total_lengths": 1}] * 2)
    client.end_partition("p")
    options = {"sampler": tq.SeqlenBalancedSampler(dp_size=2), "batch_size": 1}
    early, late = (stream(dp_rank=rank, **options) for rank in range(2))
    with ThreadPoolExecutor(1) as pool:
        one = pool.submit(flat, early)
        wait_until(lambda: waits(client))
        two = flat(late)
        assert sorted(one.result(timeout=TIMEOUT_S) + two) == [0, 1]


# Micro-batches


def test_micro_batches_of_all_kinds_of_columns(client: tq.Client) -> None:
    nested: Any = torch.nested
    rows = [torch.arange(n) for n in (1, 3, 2, 4, 1)]
    grids = [torch.full((n, 1 + n % 2), float(n)) for n in range(1, 6)]
    columns: dict[str, Any] = {
        "jagged": nested.as_nested_tensor(rows, layout=torch.jagged),
        "strided": nested.as_nested_tensor(grids, layout=torch.strided),
        "text": ["a", None, {"k": 1}, "", "e"],
        "x": torch.arange(10).view(5, 2),
    }
    meta = client.put(columns, partition_id="p")
    pieces = list(islice(stream(data_fields=list(columns), batch_size=5, micro_batch_size=2), 3))
    for place, (data, part) in enumerate(pieces):
        own = range(2 * place, min(2 * place + 2, 5))
        assert part.global_indexes == [meta.global_indexes[row] for row in own]
        assert data.batch_size == (len(own),)
        assert data["jagged"].layout is torch.jagged
        assert all(map(torch.equal, data["jagged"].unbind(), [rows[row] for row in own]))
        assert all(map(torch.equal, data["strided"].unbind(), [grids[row] for row in own]))
        assert list(data["text"]) == [columns["text"][row] for row in own]
        assert torch.equal(data["x"], columns["x"][list(own)])


def test_functions_of_the_users_own(client: tq.Client) -> None:
    put(client, 8)

    def fetch(tq_client: tq.Client, batch_index: int, **arguments: Any) -> Any:
        meta = tq_client.get_meta(
            arguments["data_fields"], 2, arguments["partition_id"], task_name="own"
        )
        return tq_client.get_data(meta)["x"] + 100 * batch_index, meta

    def process(data: torch.Tensor, meta: tq.BatchMeta, micro_batch_size: int) -> Any:
        return [(data.tolist(), micro_batch_size)]

    got = list(islice(stream(fetch_batch_fn=fetch, process_batch_fn=process), 2))
    assert got == [([0, 1], 4), ([102, 103], 4)]


# Going back, and on


def test_reset_replays_what_was_fetched_and_goes_on_from_there(client: tq.Client) -> None:
    put(client)
    client.end_partition("p")
    dataset = stream()
    loader = tq.StreamingDataLoader(dataset)
    seen = values(islice(loader, 3))
    loader.reset()
    assert len(loader.get_buffer()) == 2
    again = values(loader)
    assert again[:3] == seen
    assert [value for piece in again for value in piece] == list(range(ROWS))


def test_an_iteration_that_was_broken_off_goes_on(client: tq.Client) -> None:
    put(client)
    client.end_partition("p")
    dataset = stream()
    assert flat(islice(dataset, 3)) + flat(dataset) == list(range(ROWS))


def test_step_goes_to_another_partition(client: tq.Client) -> None:
    for number in range(2):
        put(client, 8, partition=f"train_{number}", first=100 * number)
        client.end_partition(f"train_{number}")
    loader = tq.StreamingDataLoader(stream(partition_id="train_0"))
    assert flat(loader) == list(range(8))
    loader.step("train_1")
    assert loader.get_buffer() == []
    assert flat(loader) == list(range(100, 108))


def test_step_ends_an_iteration_that_runs(client: tq.Client) -> None:
    put(client, 8)
    dataset = stream()
    for _ in dataset:
        dataset.step("other")
    assert (dataset.buffer, dataset.batch_index) == ([], 0)


# Leases


def test_a_batch_is_acknowledged_when_the_consumer_comes_back(client: tq.Client) -> None:
    put(client, 16)
    client.end_partition("p")
    pieces = iter(stream(lease=60))
    consumed: list[int] = []
    for _ in range(4):
        next(pieces)
        consumed.append(int(client.get_consumption_status("t", "p")[1].sum()))
    assert consumed == [0, 0, 8, 8]
    assert list(pieces) == []
    assert client.check_consumption_status("t", "p")


def test_a_consumer_that_is_too_slow_is_told(client: tq.Client, wait_until: WaitUntil) -> None:
    put(client, 8)
    pieces = iter(stream(lease=0.2, micro_batch_size=8))
    next(pieces)
    wait_until(lambda: client.get_meta(["x"], 8, "p", task_name="t", timeout=0).size)
    with pytest.raises(tq.LeaseLostError, match="'t'"):
        next(pieces)


def test_twins_of_a_rank_share_a_lease(client: tq.Client) -> None:
    put(client, 16)
    client.end_partition("p")
    ranks = [iter(stream(dp_rank=0, lease=60)) for _ in range(2)]
    seen = [[flat([next(rank)]) for rank in ranks] for _ in range(4)]
    assert all(first == twin for first, twin in seen)
    assert [list(rank) for rank in ranks] == [[], []]


# Worker processes


@pytest.fixture(scope="module")
def unit_namespace(redis_url: str) -> Iterator[str]:
    """Of queues whose columns are in a storage unit."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    unit = UnitProcess({**os.environ, "TQ_REDIS_URL": redis_url, "TQ_REDIS_NAMESPACE": name})
    yield name
    unit.end()


@pytest.fixture
def queue(redis_url: str, unit_namespace: str) -> Iterator[tq.Client]:
    """No environment says to worker processes where it is."""
    tq.init(
        {
            "redis": {"url": redis_url, "namespace": unit_namespace},
            "data": {"backend": "zmq"},
            "timeout_s": TIMEOUT_S,
        }
    )
    yield tq.get_client()
    tq.close()


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("spawn", 1)])
def test_worker_processes_share_a_stream(queue: tq.Client, method: str, workers: int) -> None:
    nested: Any = torch.nested
    rows = [torch.arange(1 + row % 3) for row in range(ROWS)]
    columns = {
        "x": torch.arange(ROWS),
        "jagged": nested.as_nested_tensor(rows, layout=torch.jagged),
        "text": [f"text {row}" for row in range(ROWS)],
    }
    queue.put(columns, partition_id="p")
    queue.end_partition("p")
    dataset = stream(data_fields=list(columns), lease=60)
    loader = tq.StreamingDataLoader(dataset, workers, multiprocessing_context=method)
    seen: list[int] = []
    for data, meta in loader:
        seen += data["x"].tolist()
        assert list(data["text"]) == [f"text {row}" for row in data["x"].tolist()]
        assert all(map(torch.equal, data["jagged"].unbind(), [rows[i] for i in data["x"]]))
        assert meta.size == data.batch_size[0]
    assert sorted(seen) == list(range(ROWS))
    assert queue.check_consumption_status("t", "p")


def test_workers_do_not_acknowledge_what_they_fetch_ahead(queue: tq.Client) -> None:
    put(queue, 16)
    queue.end_partition("p")
    pieces = iter(tq.StreamingDataLoader(stream(lease=60), 1, prefetch_factor=8))
    consumed: list[int] = []
    for _ in range(4):
        next(pieces)
        consumed.append(int(queue.get_consumption_status("t", "p")[1].sum()))
    assert consumed == [0, 4, 8, 12]
    assert list(pieces) == []


def test_workers_of_a_rank_take_its_batches_in_turns(queue: tq.Client) -> None:
    put(queue)
    queue.end_partition("p")
    loaders = [tq.StreamingDataLoader(stream(dp_rank=0, micro_batch_size=8), 2) for _ in range(2)]
    first, twin = (values(loader) for loader in loaders)
    assert first == twin
    assert sorted(value for piece in first for value in piece) == list(range(ROWS))
    loaders[0].reset()
    assert values(loaders[0]) == first


def test_workers_do_not_repeat_what_their_parent_had(queue: tq.Client) -> None:
    put(queue)
    queue.end_partition("p")
    dataset = stream()
    here = flat(islice(dataset, 3))
    there = flat(tq.StreamingDataLoader(dataset, 2))
    assert sorted(here + there + flat(dataset)) == list(range(ROWS))


@pytest.mark.usefixtures("ray_session")
def test_workers_of_a_trainer_in_ray(namespace: str) -> None:
    """They know neither Ray nor, from their environment, the embedded server."""
    tq.init({"redis": {"namespace": namespace}, "data": {"routes": {"x": "zmq"}, "units": 1}})
    try:
        client = tq.get_client()
        client.put({"x": torch.arange(8), "y": torch.arange(8)}, partition_id="p")
        client.end_partition("p")
        with pytest.raises(tq.ConfigError, match="'y'.*'ray'"):
            tq.StreamingDataLoader(stream(data_fields=["x", "y"]), num_workers=1)
        assert flat(tq.StreamingDataLoader(stream(lease=60), num_workers=1)) == list(range(8))
        assert client.check_consumption_status("t", "p")
    finally:
        tq.close()


def test_a_worker_that_waits_in_vain_says_so(queue: tq.Client) -> None:
    put(queue, 3)
    others = set(multiprocessing.active_children())
    loader = tq.StreamingDataLoader(stream(timeout=0.3), 1)
    with pytest.raises(tq.DeadlineError, match=r"'t' waited 0.3 s for 8 samples of 'p'"):
        list(loader)
    assert set(multiprocessing.active_children()) <= others


KILLED = """
import signal
dataset = tq.StreamingDataset(
    {"redis": {"url": URL, "namespace": NAMESPACE}}, 8, 4, ["x"], "p", "t", lease=1.0, timeout=20
)
for place, (data, meta) in enumerate(dataset):
    print(data["x"].tolist(), flush=True)
    if place == 2:
        signal.pause()
"""


def test_a_consumer_that_is_killed_gives_its_rows_back(
    queue: tq.Client, redis_url: str, unit_namespace: str
) -> None:
    put(queue, 24)
    queue.end_partition("p")
    names = f"URL, NAMESPACE = {redis_url!r}, {unit_namespace!r}\n"
    consumer = subprocess.Popen(
        [sys.executable, "-c", "import tq_redis as tq\n" + names + KILLED],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert consumer.stdout is not None
    assert [consumer.stdout.readline() for _ in range(3)][2] == "[8, 9, 10, 11]\n"
    consumer.send_signal(signal.SIGKILL)
    consumer.communicate()
    assert sorted(flat(stream())) == list(range(8, 24))  # the first batch was acknowledged


# What is refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"data_fields": []}, "data_fields"),
        ({"data_fields": "x"}, "'x'"),
        ({"partition_id": ""}, "partition_id"),
        ({"task_name": ""}, "task_name"),
        ({"dp_rank": -1}, "dp_rank"),
        ({"lease": 0}, "lease"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_bad_arguments(client: tq.Client, options: dict[str, Any], says: str) -> None:
    with pytest.raises(tq.InputError, match=says):
        stream(**options)


def test_another_queue_than_that_of_this_process(client: tq.Client) -> None:
    with pytest.raises(tq.ConfigError, match=r"client of namespace .*'other'"):
        stream(config={"redis": {"namespace": "other"}})


def test_columns_that_workers_cannot_read(client: tq.Client) -> None:
    with pytest.raises(tq.ConfigError, match=r"'x'.*'memory'.*data.routes"):
        tq.StreamingDataLoader(stream(), num_workers=1)


def test_reset_of_workers_without_a_rank(queue: tq.Client) -> None:
    with pytest.raises(tq.InputError, match="dp_rank"):
        tq.StreamingDataLoader(stream(), num_workers=1).reset()
