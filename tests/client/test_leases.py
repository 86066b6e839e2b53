"""Samples claimed for a time: acknowledged, given back, lost, and set aside."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import tq_redis as tq
from tests.conftest import WaitUntil

LONG_S = 60.0
SHORT_S = 0.2


def put(client: tq.Client, rows: int, **options: Any) -> tq.BatchMeta:
    return client.put({"x": torch.arange(float(rows))}, partition_id="p", **options)


def take(client: tq.Client, rows: int, lease: float = LONG_S, **options: Any) -> tq.BatchMeta:
    return client.get_meta(["x"], rows, "p", task_name="t", lease=lease, **options)


def consumed(client: tq.Client) -> list[int]:
    ids, flags = client.get_consumption_status("t", "p")
    return ids[flags.bool()].tolist()


def test_acknowledged_samples_are_consumed(client: tq.Client) -> None:
    put(client, 4)
    batch = take(client, 4)
    assert consumed(client) == []
    assert take(client, 1, timeout=0).size == 0
    client.ack(batch)
    assert consumed(client) == batch.global_indexes
    assert client.check_consumption_status("t", "p")


def test_a_batch_is_acknowledged_in_parts_and_more_than_once(client: tq.Client) -> None:
    """Each rank acknowledges the part that it got; padding is not its work."""
    put(client, 5)
    parts = take(client, 5).padded(4).chunk(4)
    for part in parts[:3]:
        client.ack(part)
    assert consumed(client) == parts[0].global_indexes + parts[1].global_indexes + [5]
    client.ack(parts[0])
    assert consumed(client) == [1, 2, 3, 4, 5]


def test_metas_of_several_claims_are_acknowledged_together(client: tq.Client) -> None:
    put(client, 6)
    both = tq.BatchMeta.concat([take(client, 4), take(client, 2)])
    client.ack(both)
    assert consumed(client) == both.global_indexes


def test_released_samples_come_back_first(client: tq.Client) -> None:
    put(client, 6)
    batch = take(client, 4)
    client.release(batch[1:3])
    assert take(client, 3).global_indexes == [2, 3, 5]
    client.release(batch[1:3])  # others hold them: nothing happens
    client.ack(batch[:1])
    with pytest.raises(tq.LeaseLostError) as caught:
        client.ack(batch)
    assert caught.value.rows == (2, 3)
    assert consumed(client) == [1, 4]


def test_a_lease_runs_out_and_wakes_the_waiter(client: tq.Client) -> None:
    put(client, 2)
    first = take(client, 2, lease=SHORT_S)
    second = take(client, 2)  # waits
    assert second.global_indexes == first.global_indexes
    with pytest.raises(tq.LeaseLostError, match="task 't'") as caught:
        client.ack(first)
    assert caught.value.rows == (1, 2)
    assert consumed(client) == []
    client.ack(second)


def test_late_is_not_lost_while_nobody_else_asked(client: tq.Client) -> None:
    put(client, 2)
    batch = take(client, 2, lease=SHORT_S)
    time.sleep(2 * SHORT_S)
    client.ack(batch)
    assert consumed(client) == [1, 2]


def test_renewing(client: tq.Client, wait_until: WaitUntil) -> None:
    put(client, 2)
    batch = take(client, 2, lease=SHORT_S)
    assert client.renew(batch) == SHORT_S
    assert client.renew(batch, LONG_S) == LONG_S
    time.sleep(2 * SHORT_S)
    assert take(client, 1, timeout=0).size == 0
    client.renew(batch, SHORT_S)
    wait_until(lambda: take(client, 2, timeout=0).size == 2)
    with pytest.raises(tq.LeaseLostError):
        client.renew(batch)


def test_work_in_the_body_of_hold(client: tq.Client) -> None:
    put(client, 2)
    with client.hold(take(client, 2, lease=SHORT_S)) as batch:
        time.sleep(3 * SHORT_S)
        assert take(client, 1, timeout=0).size == 0
    assert consumed(client) == batch.global_indexes


def test_an_error_in_the_body_of_hold_gives_the_samples_back(client: tq.Client) -> None:
    put(client, 2)
    with pytest.raises(ZeroDivisionError), client.hold(take(client, 2)):
        raise ZeroDivisionError
    assert take(client, 2, timeout=0).size == 2


@pytest.mark.asyncio
async def test_hold_in_a_coroutine(client: tq.Client) -> None:
    put(client, 2)
    async with client.async_hold(take(client, 1)):
        pass
    with pytest.raises(ZeroDivisionError):
        async with client.async_hold(take(client, 1)):
            raise ZeroDivisionError
    assert consumed(client) == [1]
    assert take(client, 1, timeout=0).global_indexes == [2]


def test_samples_cleared_meanwhile_need_no_acknowledgement(client: tq.Client) -> None:
    put(client, 4)
    with client.hold(take(client, 2)) as batch:
        client.clear_samples(batch)
    with client.hold(take(client, 2)):
        client.clear_partition("p")


@pytest.mark.parametrize("call", ["ack", "release", "renew"])
def test_what_was_not_leased_is_refused(client: tq.Client, call: str) -> None:
    put(client, 4)
    mixed = tq.BatchMeta.concat([take(client, 2), client.get_meta(["x"], 2, "p", task_name="t")])
    with pytest.raises(tq.InputError, match="not claimed with a lease") as caught:
        getattr(client, call)(mixed)
    assert caught.value.rows == (3, 4)


@pytest.fixture
def patient(redis_url: str, namespace: str) -> Iterator[tq.Client]:
    """A queue that gives a sample out twice at most."""
    tq.init(
        {
            "redis": {"url": redis_url, "namespace": namespace},
            "data": {"backend": "memory"},
            "timeout_s": 20,
            "max_deliveries": 2,
        }
    )
    yield tq.get_client()
    tq.close()


def test_a_sample_that_nobody_can_work_on_is_set_aside(
    patient: tq.Client, caplog: pytest.LogCaptureFixture
) -> None:
    meta = put(patient, 4)
    bad = meta.global_indexes[:1]
    batch = take(patient, 4)
    patient.ack(batch[1:])
    patient.release(batch[:1])
    patient.release(take(patient, 1))
    assert take(patient, 1, timeout=0).size == 0
    aside = patient.get_set_aside("t", "p")
    assert (aside.global_indexes, aside.field_names) == (bad, ["x"])
    assert "Samples [1] of partition 'p' are set aside for task 't'" in caplog.text
    assert patient.get_summary("p")["set_aside:t"] == 1
    with pytest.raises(tq.DeadlineError, match="1 set aside"):
        take(patient, 1, timeout=0.1)
    # Another task is not concerned, and a reset gives it another chance.
    assert patient.get_meta(["x"], 4, "p", task_name="u").size == 4
    assert patient.reset_consumption("p", "t") == 4
    assert take(patient, 4).global_indexes == meta.global_indexes
    assert patient.get_set_aside("t", "p").size == 0


def test_leases_that_run_out_count_as_deliveries(patient: tq.Client) -> None:
    put(patient, 1)
    for _ in range(2):
        take(patient, 1, lease=SHORT_S)
    with pytest.raises(tq.DeadlineError, match="1 set aside"):
        take(patient, 1, timeout=4 * SHORT_S)


# Resetting


def test_reset_of_one_task_or_all(client: tq.Client) -> None:
    meta = put(client, 4)
    for task in ("t", "u"):
        client.get_meta(["x"], 3, "p", task_name=task)
    held = take(client, 1)
    assert client.reset_consumption("p", "t") == 4
    assert take(client, 4).global_indexes == meta.global_indexes
    with pytest.raises(tq.LeaseLostError):
        client.ack(held)
    assert client.get_meta(["x"], 2, "p", task_name="u", timeout=0).size == 0
    assert client.reset_consumption("p") == 7
    assert client.get_meta(["x"], 4, "p", task_name="u").size == 4
    with pytest.raises(tq.PartitionNotFoundError):
        client.reset_consumption("q", "t")


def test_a_reset_wakes_waiters(client: tq.Client) -> None:
    put(client, 2)
    client.get_meta(["x"], 2, "p", task_name="t")
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(take, client, 2)
        client.reset_consumption("p", "t")
        assert waiter.result(timeout=10).size == 2


# What is to come


def test_a_consumer_may_start_before_the_producer_and_learns_the_end(client: tq.Client) -> None:
    """All 32 rows, then the end; an empty queue is not taken for a consumed one."""

    def consume() -> list[int]:
        got: list[int] = []
        while True:
            try:
                got += client.get_meta(["x"], 4, "p", task_name="t").global_indexes
            except tq.EndOfStreamError:
                return got

    with ThreadPoolExecutor(2) as pool:
        consumers = [pool.submit(consume) for _ in range(2)]
        assert not client.check_consumption_status("t", "p")
        client.expect("p", 32)
        assert not client.check_consumption_status("t", "p")
        made = [put(client, 8).global_indexes for _ in range(4)]
        got = [consumer.result(timeout=15) for consumer in consumers]
    assert sorted(got[0] + got[1]) == [sample for ids in made for sample in ids]
    assert client.check_consumption_status("t", "p")


def test_the_end_may_be_said_afterwards(client: tq.Client) -> None:
    put(client, 4)
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(client.get_meta, ["x"], 6, "p", task_name="t")
        client.end_partition("p")
        client.end_partition("p")
        with pytest.raises(tq.CannotFillError, match="only 4 can still come") as caught:
            waiter.result(timeout=10)
    assert caught.value.left == 4
    held = take(client, 4)
    with pytest.raises(tq.CannotFillError, match="only 4 can still come"):
        client.get_meta(["x"], 5, "p", task_name="t", timeout=0)
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(client.get_meta, ["x"], 4, "p", task_name="t")
        client.ack(held)
        with pytest.raises(tq.EndOfStreamError, match="has consumed all samples"):
            waiter.result(timeout=10)


def test_an_empty_stream(client: tq.Client) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(client.get_meta, ["x"], 4, "p", task_name="t")
        client.end_partition("p")
        with pytest.raises(tq.EndOfStreamError):
            waiter.result(timeout=10)
    assert client.get_partition_list() == ["p"]


def test_a_group_that_lost_a_row_leaves_no_waiter(client: tq.Client) -> None:
    """Of a group of four one row failed. Dropping the row is a choice; so is taking three."""
    meta = put(client, 8, group_ids=["a"] * 4 + ["b"] * 4)
    four = tq.GRPOGroupNSampler(4)
    with ThreadPoolExecutor(1) as pool:
        client.expect("p", 8)
        client.put({"y": torch.zeros(7)}, meta[:7])

        def both() -> tq.BatchMeta:
            return client.get_meta(["y"], 8, "p", task_name="t", sampler=four)

        waiter = pool.submit(both)
        client.clear_samples(meta[7:])
        with pytest.raises(tq.CannotFillError) as caught:
            waiter.result(timeout=10)
    assert caught.value.left == 7
    whole = client.get_meta(["y"], 4, "p", task_name="t", sampler=four)
    assert whole.global_indexes == meta.global_indexes[:4]
    with pytest.raises(tq.CannotFillError, match="in whole groups of 4") as caught:
        client.get_meta(["y"], 4, "p", task_name="t", sampler=four)
    assert caught.value.left == 3
    assert client.get_meta(["y"], 3, "p", task_name="t").global_indexes == meta.global_indexes[4:7]


def test_rows_of_two_broken_groups_do_not_make_a_whole_one(client: tq.Client) -> None:
    put(client, 4, group_ids=["a", "a", "b", "b"])
    client.end_partition("p")
    with pytest.raises(tq.CannotFillError) as caught:
        client.get_meta(["x"], 4, "p", task_name="t", sampler=tq.GRPOGroupNSampler(4))
    assert caught.value.left == 0


def test_the_last_group_is_consumed_while_it_is_looked_for(
    client: tq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its holder: then this is the end, and not a batch that cannot be filled."""
    four = tq.GRPOGroupNSampler(4)
    put(client, 4, group_ids=["a"] * 4)
    client.end_partition("p")
    held = client.get_meta(["x"], 4, "p", task_name="t", sampler=four, lease=60)
    control = client._core.control
    describe = control.describe

    async def late(*args: Any, **options: Any) -> Any:
        await client._core.ack(held)
        return await describe(*args, **options)

    monkeypatch.setattr(control, "describe", late)
    with pytest.raises(tq.EndOfStreamError):
        client.get_meta(["x"], 4, "p", task_name="t", sampler=four, timeout=10)


def test_more_samples_than_declared_are_refused(client: tq.Client) -> None:
    client.expect("p", 4)
    put(client, 3)
    with pytest.raises(tq.PartitionEndedError, match=r"expects 4 .* 3 are made; 2 more"):
        put(client, 2)
    client.expect("p", 5)
    put(client, 2)
    with pytest.raises(tq.PartitionEndedError, match="5 are made"):
        client.expect("p", 4)
    client.end_partition("p")
    with pytest.raises(tq.PartitionEndedError, match="has ended with 5 samples"):
        put(client, 1)
    with pytest.raises(tq.PartitionEndedError, match="has ended"):
        client.expect("p", 9)
    assert client.get_summary("p")["samples"] == 5
    with pytest.raises(tq.InputError, match="must not be negative"):
        client.expect("p", -1)


def test_cleared_samples_do_not_come_any_more(client: tq.Client) -> None:
    client.expect("p", 6)
    meta = put(client, 4)
    client.clear_samples(meta[:2])
    with pytest.raises(tq.CannotFillError) as caught:
        client.get_meta(["x"], 5, "p", task_name="t")
    assert caught.value.left == 4


def test_a_partition_made_again_has_no_end(client: tq.Client) -> None:
    put(client, 1)
    client.end_partition("p")
    client.clear_partition("p")
    put(client, 1)
    with pytest.raises(tq.DeadlineError):
        client.get_meta(["x"], 2, "p", task_name="t", timeout=0.1)
