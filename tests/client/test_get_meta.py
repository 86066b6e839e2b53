"""Claiming: who gets which samples, who waits, and what a waiter is told."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import tq_redis as tq


def put(client: tq.Client, rows: int, partition: str = "p", **options: Any) -> tq.BatchMeta:
    return client.put({"x": torch.arange(float(rows))}, partition_id=partition, **options)


def test_each_task_gets_every_sample_once(client: tq.Client) -> None:
    meta = put(client, 8)
    for task in ("a", "b"):
        first = client.get_meta(["x"], 4, "p", task_name=task)
        second = client.get_meta(["x"], 4, "p", task_name=task)
        assert first.global_indexes + second.global_indexes == meta.global_indexes
        assert client.get_meta(["x"], 4, "p", task_name=task, timeout=0).size == 0


def test_rows_count_only_with_all_fields(client: tq.Client) -> None:
    meta = put(client, 4)
    client.put({"y": torch.zeros(2)}, meta.select_samples([1, 3]))

    ready = client.get_meta(["x", "y"], 2, "p", task_name="t")

    assert ready.global_indexes == [meta.global_indexes[1], meta.global_indexes[3]]
    assert ready.field_names == ["x", "y"]


def test_groups_stay_whole_whatever_finishes_first(client: tq.Client) -> None:
    groups = ["a", "b", "a", "b", "a", "b"]
    meta = put(client, 6, group_ids=groups)
    three = tq.GRPOGroupNSampler(3)

    def finish(*rows: int) -> None:
        client.put({"y": torch.zeros(len(rows))}, meta.select_samples(list(rows)))

    finish(1, 0, 3, 2)  # two of each group
    assert client.get_meta(["y"], 3, "p", task_name="t", sampler=three, timeout=0).size == 0
    finish(5)  # the last of b
    whole = client.get_meta(["y"], 3, "p", task_name="t", sampler=three)
    assert whole.global_indexes == [meta.global_indexes[row] for row in (1, 3, 5)]
    finish(4)
    whole = client.get_meta(["y"], 3, "p", task_name="t", sampler=three)
    assert whole.global_indexes == [meta.global_indexes[row] for row in (0, 2, 4)]


def test_a_put_wakes_the_waiter_and_nobody_else_is_held_up(client: tq.Client) -> None:
    put(client, 8)
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(client.get_meta, ["x"], 64, "p", task_name="a")
        start = time.monotonic()
        assert client.get_meta(["x"], 8, "p", task_name="b").size == 8
        assert time.monotonic() - start < 5  # not behind the waiter, who may wait for 20 s
        assert not waiter.done()
        put(client, 56)
        assert waiter.result(timeout=10).size == 64


def test_a_partition_that_does_not_exist_yet_can_be_waited_for(client: tq.Client) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(client.get_meta, ["x"], 2, "later", task_name="t")
        put(client, 2, "later")
        assert waiter.result(timeout=10).size == 2


def test_waiters_of_one_task_get_disjoint_batches(client: tq.Client) -> None:
    with ThreadPoolExecutor(4) as pool:
        waiters = [pool.submit(client.get_meta, ["x"], 4, "p", task_name="t") for _ in range(4)]
        for _ in range(8):
            put(client, 2)
        batches = [waiter.result(timeout=20).global_indexes for waiter in waiters]
    assert len({sample for batch in batches for sample in batch}) == 16


def test_a_passed_deadline_says_what_is_missing(client: tq.Client) -> None:
    put(client, 3)
    with pytest.raises(tq.DeadlineError, match=r"4 samples of 'p'.*3 are ready") as caught:
        client.get_meta(["x"], 4, "p", task_name="t", timeout=0.1)
    assert caught.value.deadline == 0.1
    with pytest.raises(tq.DeadlineError, match="'y' does not exist. Known: \\['x'\\]"):
        client.get_meta(["y"], 1, "p", task_name="t", timeout=0.1)
    with pytest.raises(tq.DeadlineError, match="'q', which does not exist"):
        client.get_meta(["x"], 1, "q", task_name="t", timeout=0.1)
    # Asking was not consuming.
    assert client.get_meta(["x"], 3, "p", task_name="t").size == 3


def test_asking_creates_nothing(client: tq.Client) -> None:
    assert client.get_meta(["x"], 1, "p", task_name="t", timeout=0).size == 0
    assert client.get_partition_list() == []


def test_a_task_may_ask_for_other_fields_later(client: tq.Client) -> None:
    meta = put(client, 4)
    client.get_meta(["x"], 2, "p", task_name="t")
    client.put({"y": torch.zeros(4)}, meta)
    rest = client.get_meta(["x", "y"], 2, "p", task_name="t")
    assert rest.global_indexes == meta.global_indexes[2:]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"batch_size": 0}, "batch_size must be positive"),
        ({"task_name": None}, "needs task_name"),
        ({"mode": "guess"}, "mode must be"),
        ({"data_fields": "x"}, "must be a list of names"),
        ({"data_fields": ["x", "x"]}, "distinct"),
        ({"sampler": tq.GRPOGroupNSampler(3)}, "not a multiple"),
        ({"sampling_config": {"dp_rnk": 2}}, "Did you mean 'dp_rank'"),
        ({"sampling_config": {"dp_rank": 2}}, "must both be integers"),
        ({"sampler": tq.RankAwareSampler()}, "needs dp_rank and batch_index"),
        ({"lease": 0}, "lease must be positive"),
    ],
)
def test_bad_arguments(client: tq.Client, arguments: dict[str, Any], says: str) -> None:
    good: dict[str, Any] = {
        "data_fields": ["x"],
        "batch_size": 4,
        "partition_id": "p",
        "task_name": "t",
    }
    with pytest.raises(tq.InputError, match=says):
        client.get_meta(**(good | arguments))


def test_insert_makes_samples_and_force_fetch_shows_all(client: tq.Client) -> None:
    made = client.get_meta([], 3, "p", mode="insert")
    assert made.size == 3
    assert not made.is_ready
    client.put({"x": torch.zeros(2)}, made.select_samples([0, 1]))

    everything = client.get_meta(["x"], 1, "p", mode="force_fetch")

    assert everything.global_indexes == made.global_indexes
    assert everything.production_status.tolist() == [1, 1, 0]
    with pytest.raises(tq.PartitionNotFoundError):
        client.get_meta(["x"], 1, "q", mode="force_fetch")


def test_status_calls(client: tq.Client) -> None:
    meta = put(client, 4)
    client.put({"y": torch.zeros(2)}, meta.select_samples([0, 1]))
    client.get_meta(["x"], 2, "p", task_name="t")

    ids, flags = client.get_production_status(["x", "y"], "p")
    assert ids.tolist() == meta.global_indexes
    assert flags.tolist() == [[1, 1], [1, 1], [1, 0], [1, 0]]
    assert client.get_consumption_status("t", "p")[1].tolist() == [1, 1, 0, 0]
    assert client.check_production_status(["x"], "p")
    assert not client.check_production_status(["x", "y"], "p")
    assert not client.check_consumption_status("t", "p")
    client.get_meta(["x"], 2, "p", task_name="t")
    assert client.check_consumption_status("t", "p")
    assert not client.check_production_status(["x"], "unknown")
    with pytest.raises(tq.FieldNotFoundError):
        client.get_production_status(["z"], "p")
    summary = client.get_summary("p")
    assert {name: summary[name] for name in ("samples", "produced:x", "produced:y")} == {
        "samples": 4,
        "produced:x": 4,
        "produced:y": 2,
    }
    assert summary["consumed:t"] == 4


def test_waiting_leaves_the_callers_other_threads_alone(client: tq.Client) -> None:
    """An interrupt in a waiting thread cancels its call and nothing else."""
    before = threading.active_count()
    with pytest.raises(tq.DeadlineError):
        client.get_meta(["x"], 1, "p", task_name="t", timeout=0.05)
    assert threading.active_count() <= before + 1
