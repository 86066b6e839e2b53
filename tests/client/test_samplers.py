"""Samplers, through get_meta. What holds for all of them, then what is each one's own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import tq_redis as tq

ROWS, BATCH = 24, 4


class Newest(tq.BaseSampler):
    """A sampler as a user would write it: the newest samples, if there are enough."""

    def sample(self, ready: tq.Ready, batch_size: int, **sampling_config: Any) -> Sequence[int]:
        if len(ready.ids) < batch_size:
            return ()
        return ready.ids[::-1][:batch_size]


class SomeBatches:
    """Gives every call of one sampler the settings that it needs: ever new batches of rank 0."""

    def __init__(self, sampler: Any, *, rank_aware: bool = False) -> None:
        self.sampler = sampler
        self._rank_aware = rank_aware
        self._index = 0

    def options(self) -> dict[str, Any]:
        config = {"dp_rank": 0, "batch_index": self._index} if self._rank_aware else {}
        self._index += 1
        return {"sampler": self.sampler, "sampling_config": config}


@pytest.fixture(
    params=["none", "sequential", "grpo", "rank", "balanced", "grouped balanced", "own", "own rank"]
)
def batches(request: pytest.FixtureRequest) -> SomeBatches:
    samplers = {
        "none": SomeBatches(None),
        "sequential": SomeBatches(tq.SequentialSampler()),
        "grpo": SomeBatches(tq.GRPOGroupNSampler(2)),
        "rank": SomeBatches(tq.RankAwareSampler(), rank_aware=True),
        "balanced": SomeBatches(tq.SeqlenBalancedSampler(), rank_aware=True),
        "grouped balanced": SomeBatches(tq.SeqlenBalancedSampler(2), rank_aware=True),
        "own": SomeBatches(Newest()),
        "own rank": SomeBatches(Newest(), rank_aware=True),
    }
    return samplers[request.param]


def put(
    client: tq.Client, rows: int = ROWS, *, size: int = 2, partition: str = "p"
) -> tq.BatchMeta:
    """Samples in groups of ``size`` whose rows do not lie together, with lengths."""
    return client.put(
        {"x": torch.arange(rows)},
        partition_id=partition,
        group_ids=[f"g{row % (rows // size)}" for row in range(rows)],
        tags=[{"total_lengths": 1 + row * 7 % 11} for row in range(rows)],
    )


def take(client: tq.Client, batches: SomeBatches, **options: Any) -> tq.BatchMeta:
    return client.get_meta(["x"], BATCH, "p", task_name="t", **batches.options(), **options)


def test_every_sample_once_and_none_too_much(client: tq.Client, batches: SomeBatches) -> None:
    meta = put(client)
    got = [take(client, batches) for _ in range(ROWS // BATCH)]
    assert all(batch.size == BATCH for batch in got)
    assert sorted(i for batch in got for i in batch.global_indexes) == meta.global_indexes
    assert take(client, batches, timeout=0).size == 0
    assert client.check_consumption_status("t", "p")


def test_values_belong_to_their_samples(client: tq.Client, batches: SomeBatches) -> None:
    meta = put(client)
    batch = take(client, batches)
    first = meta.global_indexes[0]
    assert client.get_data(batch)["x"].tolist() == [i - first for i in batch.global_indexes]
    assert [row["total_lengths"] for row in batch.custom_meta] == [
        1 + (i - first) * 7 % 11 for i in batch.global_indexes
    ]


def test_too_few_wait_for_more(client: tq.Client, batches: SomeBatches) -> None:
    put(client, 2)
    assert take(client, batches, timeout=0).size == 0
    with pytest.raises(tq.DeadlineError, match="2 are ready"):
        take(client, batches, timeout=0.05)
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(take, client, batches)
        put(client, 2)
        assert sorted(waiter.result(timeout=10).global_indexes) == [1, 2, 3, 4]


def test_leases(client: tq.Client, batches: SomeBatches) -> None:
    put(client, BATCH)
    batch = take(client, batches, lease=60)
    client.release(batch[:2])
    client.ack(batch[2:])
    again = client.get_meta(["x"], 2, "p", task_name="t", lease=60)
    assert sorted(again.global_indexes) == sorted(batch.global_indexes[:2])


def test_consumers_that_compete_get_disjoint_batches(
    client: tq.Client, batches: SomeBatches
) -> None:
    meta = put(client)
    options = [batches.options() for _ in range(ROWS // BATCH)]
    with ThreadPoolExecutor(6) as pool:
        calls = [
            pool.submit(client.get_meta, ["x"], BATCH, "p", task_name="t", **each)
            for each in options
        ]
        got = [call.result(timeout=20) for call in calls]
    assert sorted(i for batch in got for i in batch.global_indexes) == meta.global_indexes


def test_the_end_is_told(client: tq.Client, batches: SomeBatches) -> None:
    put(client, BATCH)
    client.end_partition("p")
    take(client, batches)
    with pytest.raises(tq.EndOfStreamError):
        take(client, batches)


# Groups


@pytest.mark.parametrize("sampler", [tq.GRPOGroupNSampler(3), tq.SeqlenBalancedSampler(3)])
def test_groups_are_whole_whatever_finished_first(client: tq.Client, sampler: Any) -> None:
    meta = put(client, 12, size=3)
    order = [11, 0, 7, 3, 4, 8, 1, 5, 10, 2, 6, 9]
    config = {"dp_rank": 0, "batch_index": 0}
    client.clear_samples(meta.select_samples([3]))  # of group g3; it can never be whole
    for row in order:
        if row != 3:
            client.put({"y": torch.zeros(1)}, meta.select_samples([row]))
    whole = client.get_meta(
        ["y"], 9, "p", task_name="t", sampler=sampler, sampling_config=config, timeout=0
    )
    groups = [(i - meta.global_indexes[0]) % 4 for i in whole.global_indexes]
    assert groups == [group for group in (0, 1, 2) for _ in range(3)]


# Ranks


RANKS = [tq.RankAwareSampler(), tq.GRPOGroupNSampler(2), tq.SeqlenBalancedSampler(2, 3), Newest()]


@pytest.mark.parametrize("sampler", RANKS, ids=lambda sampler: type(sampler).__name__)
def test_ranks_of_one_group_get_the_same_samples(client: tq.Client, sampler: Any) -> None:
    """Three data-parallel ranks of two processes each, asking in any order, all at once."""
    meta = put(client)

    def ask(dp_rank: int, batch_index: int) -> list[int]:
        config = {"dp_rank": dp_rank, "batch_index": batch_index}
        return client.get_meta(
            ["x"], 4, "p", task_name="t", sampler=sampler, sampling_config=config
        ).global_indexes

    wanted = [(rank, index) for index in (1, 0) for rank in (2, 0, 1, 2, 1, 0)]
    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda pair: ask(*pair), wanted))
    by_name: dict[tuple[int, int], list[int]] = {}
    for name, ids in zip(wanted, got, strict=True):
        assert by_name.setdefault(name, ids) == ids
    assert sorted(i for ids in by_name.values() for i in ids) == meta.global_indexes


def test_a_batch_whose_lease_ran_out_is_drawn_anew(client: tq.Client) -> None:
    put(client, 8)
    options: dict[str, Any] = {
        "sampler": tq.RankAwareSampler(),
        "sampling_config": {"dp_rank": 0, "batch_index": 0},
        "lease": 0.1,
    }
    first = client.get_meta(["x"], 4, "p", task_name="t", **options)
    # Somebody asks after the lease: the samples are taken back, and others may get them.
    others = client.get_meta(["x"], 8, "p", task_name="t")
    assert set(first.global_indexes) <= set(others.global_indexes)
    assert client.get_meta(["x"], 4, "p", task_name="t", timeout=0, **options).size == 0


def test_cleared_samples_of_a_batch_are_named(client: tq.Client) -> None:
    meta = put(client, 4)
    options: dict[str, Any] = {"sampling_config": {"dp_rank": 0, "batch_index": 0}}
    client.get_meta(["x"], 4, "p", task_name="t", **options)
    client.clear_samples(meta[1:2])
    with pytest.raises(tq.SampleNotFoundError) as caught:
        client.get_meta(["x"], 4, "p", task_name="t", **options)
    assert caught.value.rows == (2,)


def test_shares_are_balanced_and_held_until_their_rank_asks(client: tq.Client) -> None:
    put(client, 24)
    sampler = tq.SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=3)

    def ask(rank: int, **options: Any) -> tq.BatchMeta:
        config = {"dp_rank": rank, "batch_index": 0}
        return client.get_meta(
            ["x"], 8, "p", task_name="t", sampler=sampler, sampling_config=config, **options
        )

    first = ask(2)
    summary = client.get_summary("p")
    assert (summary["consumed:t"], summary["claimed:t"]) == (8, 16)
    assert client.get_meta(["x"], 1, "p", task_name="t", timeout=0).size == 0
    second = ask(0, lease=60)
    client.release(second[:1])
    assert client.get_meta(["x"], 1, "p", task_name="t").global_indexes == second.global_indexes[:1]
    sums = [
        sum(row["total_lengths"] for row in batch.custom_meta) for batch in (first, second, ask(1))
    ]
    assert max(sums) - min(sums) <= 2


def test_a_share_whose_rank_does_not_ask_in_time_is_for_others(client: tq.Client) -> None:
    """By the lease of the rank that drew. It is no delivery; who comes late draws anew."""
    meta = put(client, 24)
    sampler = tq.SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=3)

    def ask(rank: int, lease: float, **options: Any) -> tq.BatchMeta:
        config = {"dp_rank": rank, "batch_index": 0}
        return client.get_meta(
            ["x"], 8, "p", "fetch", "t", config, sampler=sampler, lease=lease, **options
        )

    first = ask(0, lease=0.3)
    client.renew(first, 60)
    # Waits for the leases of two shares to run out.
    others = client.get_meta(["x"], 8, "p", task_name="t", lease=60)
    assert set(others.global_indexes).isdisjoint(first.global_indexes)
    assert ask(0, lease=60).global_indexes == first.global_indexes
    assert ask(2, lease=60, timeout=0).size == 0  # two ranks have none, and eight are left
    client.release(others)
    last = [ask(rank, lease=60) for rank in (2, 1)]
    got = [sample for batch in (first, *last) for sample in batch.global_indexes]
    assert sorted(got) == meta.global_indexes
    assert client.get_set_aside("t", "p").size == 0


def test_the_last_share_that_nobody_asked_for_can_be_drawn_alone(client: tq.Client) -> None:
    put(client, 6)
    client.end_partition("p")
    options: dict[str, Any] = {"sampler": tq.SeqlenBalancedSampler(dp_size=3), "lease": 0.2}

    def ask(rank: int) -> tq.BatchMeta:
        config = {"dp_rank": rank, "batch_index": 0}
        return client.get_meta(["x"], 2, "p", "fetch", "t", config, **options)

    kept = [ask(0), ask(1)]
    for batch in kept:
        client.ack(batch)
    time.sleep(0.3)
    late = ask(2)
    client.ack(late)
    assert sorted(i for batch in (*kept, late) for i in batch.global_indexes) == [1, 2, 3, 4, 5, 6]
    assert client.check_consumption_status("t", "p")


def test_a_sample_without_a_length_is_named(client: tq.Client) -> None:
    client.put({"x": torch.zeros(4)}, partition_id="p")
    with pytest.raises(tq.InputError, match="'total_lengths' = None") as caught:
        client.get_meta(
            ["x"],
            4,
            "p",
            task_name="t",
            sampler=tq.SeqlenBalancedSampler(),
            sampling_config={"dp_rank": 0, "batch_index": 0},
        )
    assert caught.value.rows == (1,)
    assert client.get_meta(["x"], 4, "p", task_name="t").size == 4


# A user's own


class Fixed(tq.BaseSampler):
    def __init__(self, chosen: Sequence[int]) -> None:
        self.chosen = chosen

    def sample(self, ready: tq.Ready, batch_size: int, **sampling_config: Any) -> Sequence[int]:
        return self.chosen


@pytest.mark.parametrize(
    ("chosen", "says"), [([2, 99], r"Fixed chose \[99\]"), ([2, 2], "Fixed chose a sample twice")]
)
def test_a_choice_that_is_none_is_refused(client: tq.Client, chosen: list[int], says: str) -> None:
    put(client, 4)
    with pytest.raises(tq.InputError, match=says):
        client.get_meta(["x"], 2, "p", task_name="t", sampler=Fixed(chosen))
    assert client.get_meta(["x"], 4, "p", task_name="t").size == 4


def test_what_a_sampler_sees(client: tq.Client) -> None:
    meta = put(client, 6)
    seen: list[tuple[tq.Ready, int, dict[str, Any]]] = []

    class Looking(tq.BaseSampler):
        def sample(self, ready: tq.Ready, batch_size: int, **sampling_config: Any) -> list[int]:
            seen.append((ready, batch_size, sampling_config))
            return ready.ids[3:]

    batch = client.get_meta(["x"], 2, "p", "fetch", "t", {"temperature": 0.5}, sampler=Looking())
    assert batch.global_indexes == meta.global_indexes[3:]  # a choice may have another size
    ((ready, batch_size, config),) = seen
    assert (batch_size, config) == (2, {"temperature": 0.5})
    assert ready.ids == meta.global_indexes
    assert ready.groups == ["g0", "g1", "g2"] * 2
    assert ready.tags == meta.custom_meta


def test_more_samples_than_one_script_takes(client: tq.Client) -> None:
    """In pieces, and all or none."""
    meta = client.put({"x": torch.arange(5000)}, partition_id="p")
    assert client.get_meta(["x"], 5001, "p", task_name="t", timeout=0).size == 0
    batch = client.get_meta(["x"], 4999, "p", task_name="t", sampler=Newest(), lease=60)
    assert batch.global_indexes == meta.global_indexes[:0:-1]
    assert client.get_meta(["x"], 1, "p", task_name="t").global_indexes == meta.global_indexes[:1]
    client.ack(batch)
    assert client.check_consumption_status("t", "p")
    assert client.get_meta(["x"], 5000, "p", task_name="u").global_indexes == meta.global_indexes
    assert client.get_summary("p")["claimed:u"] == 0


@pytest.mark.parametrize(
    "sampler", [tq.RankAwareSampler(), tq.SeqlenBalancedSampler(dp_size=3), Newest()]
)
def test_named_batches_of_more_samples_than_one_script_takes(
    client: tq.Client, sampler: Any
) -> None:
    """Every rank twice, all at once; each gets its own, and the same again."""
    tags = [{"total_lengths": row % 97} for row in range(9000)]
    meta = client.put({"x": torch.arange(9000)}, partition_id="p", tags=tags)

    def ask(rank: int) -> tq.BatchMeta:
        config = {"dp_rank": rank, "batch_index": 0}
        return client.get_meta(["x"], 3000, "p", "fetch", "t", config, sampler=sampler, lease=60)

    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(ask, [0, 1, 2, 2, 1, 0]))
    for rank in range(3):
        assert got[rank].global_indexes == got[5 - rank].global_indexes
        assert got[rank].custom_meta == [tags[sample - 1] for sample in got[rank].global_indexes]
        client.ack(got[rank])
    assert sorted(i for batch in got[:3] for i in batch.global_indexes) == meta.global_indexes
    assert client.check_consumption_status("t", "p")
