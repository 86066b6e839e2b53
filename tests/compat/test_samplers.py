"""Samplers: called by hand, and as the queue's."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.compat.conftest import Start
from tests.compat.peer import IS_PEER, differs, tq


def put(rows: int, lengths: list[int] | None = None) -> list[int]:
    client = tq.get_client()
    meta = client.put(TensorDict({"x": torch.arange(rows)}, batch_size=rows), partition_id="p")
    meta.reorder(sorted(range(rows), key=meta.global_indexes.__getitem__))
    if lengths:
        meta.update_custom_meta([{"total_lengths": length} for length in lengths])
        client.set_custom_meta(meta)
    return meta.global_indexes


def get(size: int, task: str = "t", **names: int) -> list[int]:
    config = {**names, "task_name": task, "partition_id": "p"}
    return tq.get_client().get_meta(["x"], size, "p", "fetch", task, config).global_indexes


# By hand


def test_the_oldest_come_first() -> None:
    assert tq.SequentialSampler().sample([3, 5, 9], 2) == ([3, 5], [3, 5])
    assert tq.SequentialSampler()([3], 2) == ([3], [3])


@pytest.mark.parametrize(
    ("ready", "chosen"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3]),
        ([3, 2, 0, 1], [0, 1, 2, 3]),
        ([0, 2, 3, 5, 6], [2, 3, 5, 6]),
        ([0, 1, 3], []),
        ([], []),
    ],
)
def test_groups_are_neighbours(ready: list[int], chosen: list[int]) -> None:
    assert tq.GRPOGroupNSampler(2).sample(ready, 4) == (chosen, chosen)


def test_groups_need_whole_batches() -> None:
    with pytest.raises(ValueError, match="multiple"):
        tq.GRPOGroupNSampler(3).sample([0, 1, 2, 3], 4)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="positive"):
            tq.GRPOGroupNSampler(n_samples_per_prompt=wrong)


def test_a_named_batch_is_remembered() -> None:
    sampler = tq.GRPOGroupNSampler(2)
    names = {"task_name": "t", "partition_id": "p", "dp_rank": 0, "batch_index": 0}
    assert sampler.sample([0, 1], 2, **names)[0] == [0, 1]
    assert sampler.sample([4, 5], 2, **names)[0] == [0, 1]
    assert sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 0})
    assert not sampler.has_cached_result("p", "t", {"dp_rank": 0, "batch_index": 1})
    assert not sampler.has_cached_result("p", "t")
    again = tq.GRPOGroupNSampler(2)
    again.load_checkpoint(sampler.save_checkpoint())
    assert again.sample([4, 5], 2, **names)[0] == [0, 1]
    sampler.clear_cache("p")
    assert sampler.sample([4, 5], 2, **names)[0] == [4, 5]


def test_ranks_of_one_group_get_the_same() -> None:
    sampler = tq.RankAwareSampler()
    names = {"task_name": "t", "partition_id": "p", "batch_index": 0}
    assert sampler.sample([1, 2, 3], 2, dp_rank=0, **names)[0] == [1, 2]
    assert sampler.sample([3], 2, dp_rank=0, **names)[0] == [1, 2]
    assert sampler.sample([3], 2, dp_rank=1, **names) == ([], [])
    with pytest.raises(ValueError, match="dp_rank"):
        sampler.sample([1], 1, dp_rank=-1, **names)
    with pytest.raises(TypeError):
        sampler.sample([1], 1)


class Lengths:
    """What a sampler is told of a partition."""

    def get_custom_meta(self, indexes: list[int]) -> dict[int, dict[str, int]]:
        return {index: {"total_lengths": [1, 8, 2, 7, 6, 3][index]} for index in indexes}


def test_shares_have_about_equal_lengths() -> None:
    sampler = tq.SeqlenBalancedSampler(n_samples_per_prompt=1, dp_size=3)
    names = {"task_name": "t", "partition_id": "p", "batch_index": 0, "partition": Lengths()}
    shares = [sampler.sample(list(range(6)), 2, dp_rank=rank, **names)[0] for rank in range(3)]
    assert sorted(map(sorted, shares)) == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="dp_size"):
        tq.SeqlenBalancedSampler(dp_size=0)


def test_items_are_dealt_out_evenly() -> None:
    from importlib import import_module

    module = import_module(f"{tq.__name__}.sampler.seqlen_balanced_sampler")
    deal = module.get_seqlen_balanced_partitions
    equal = deal([9, 1, 8, 2], 2, equal_size=True)
    assert sorted(map(sorted, equal)) == [[0, 1], [2, 3]]
    free = deal([9, 3, 3, 3], 2, equal_size=False)
    assert sorted(map(sorted, free)) == [[0], [1, 2, 3]]


# As the queue's


def test_a_sampler_is_given_by_name_class_or_object(start: Start) -> None:
    for sampler in ("SequentialSampler", tq.SequentialSampler, tq.SequentialSampler()):
        start(sampler=sampler)
        ids = put(2)
        assert get(1) == ids[:1]
        tq.close()


def test_an_unknown_sampler_is_refused(start: Start) -> None:
    with pytest.raises(ValueError, match="Could not find sampler Sequental"):
        start(sampler="Sequental")


def test_the_queue_gives_whole_groups(start: Start) -> None:
    start(sampler=tq.GRPOGroupNSampler(n_samples_per_prompt=2), polling_mode=True)
    ids = put(6)
    tq.get_client().clear_samples(tq.BatchMeta(ids[2:3], ["p"]))
    assert get(4) == [*ids[:2], *ids[3:5]]
    assert get(2) == []
    assert get(2, "u", dp_rank=0, batch_index=0) == ids[:2]
    assert get(2, "u", dp_rank=1, batch_index=0) == ids[3:5]
    assert get(2, "u", dp_rank=0, batch_index=0) == ids[:2]
    with pytest.raises(RuntimeError):
        get(3, "v")


def test_the_queue_gives_ranks_of_a_group_the_same(start: Start) -> None:
    start(sampler=tq.RankAwareSampler, polling_mode=True)
    ids = put(4)
    assert get(2, dp_rank=0, batch_index=0) == ids[:2]
    assert get(2, dp_rank=1, batch_index=0) == ids[2:]
    assert get(2, dp_rank=0, batch_index=0) == ids[:2]
    assert get(2, dp_rank=0, batch_index=1) == []
    with pytest.raises(RuntimeError):
        get(2, "without a rank")


def test_the_queue_deals_out_lengths(start: Start) -> None:
    start(sampler=tq.SeqlenBalancedSampler(1, 2), polling_mode=True)
    ids = put(4, [9, 1, 8, 2])
    shares = [get(2, dp_rank=rank, batch_index=0) for rank in range(2)]
    assert sorted(map(sorted, shares)) == [ids[:2], ids[2:]]
    assert [get(2, dp_rank=rank, batch_index=0) for rank in range(2)] == shares
    assert get(2, dp_rank=0, batch_index=1) == []


def test_a_rule_that_finds_too_little_is_an_empty_batch_or_an_error(start: Start) -> None:
    """Enough rows are ready, but no group."""
    for polling in (True, False):
        start(sampler=tq.GRPOGroupNSampler(2), polling_mode=polling)
        ids = put(3)
        tq.get_client().clear_samples(tq.BatchMeta(ids[1:2], ["p"]))
        if polling:
            assert get(2) == []
        else:
            with pytest.raises(RuntimeError):
                get(2)
        assert tq.get_client().get_consumption_status("t", "p")[1].tolist() == [0, 0]
        tq.close()


def test_a_partition_that_is_cleared_is_forgotten(start: Start) -> None:
    start(sampler=tq.RankAwareSampler(), polling_mode=True)
    put(2)
    get(2, dp_rank=0, batch_index=0)
    tq.get_client().clear_partition("p")
    assert get(2, dp_rank=0, batch_index=0) == []
    ids = put(2)
    assert sorted(get(2, dp_rank=0, batch_index=0)) == sorted(ids)


def test_samples_without_a_length_count_as_one(start: Start) -> None:
    start(sampler=tq.SeqlenBalancedSampler(2, 2), polling_mode=True)
    ids = put(4)
    shares = [get(2, dp_rank=rank, batch_index=0) for rank in range(2)]
    assert sorted(shares) == [ids[:2], ids[2:]]


class NewestFirst(tq.BaseSampler):
    """Takes the newest, and consumes all older ones with them; remembers named batches."""

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Any:
        states = self._states.setdefault(kwargs["partition_id"], {})
        known = states.setdefault(kwargs["task_name"], {}).setdefault(kwargs.get("dp_rank"), {})
        index = kwargs.get("batch_index")
        if index not in known or index is None:
            known[index] = sorted(ready_indexes)[-batch_size:]
            return known[index], list(ready_indexes)
        return known[index], known[index]


@pytest.mark.skipif(IS_PEER, reason="its controller cannot import this module")
def test_a_sampler_of_ones_own_chooses_and_remembers(start: Start) -> None:
    start(sampler=NewestFirst, polling_mode=True)
    ids = put(4)
    assert get(2, dp_rank=0, batch_index=0) == ids[2:]
    assert get(2, dp_rank=0, batch_index=0) == ids[2:]
    assert get(1, dp_rank=0, batch_index=1) == []  # the older ones are consumed too
    tq.get_client().clear_partition("p")
    ids = put(2)
    assert get(2, dp_rank=0, batch_index=0) == ids


@differs("a call of two threads is one after the other")
def test_a_sampler_of_ones_own_can_wait(start: Start) -> None:
    from concurrent.futures import ThreadPoolExecutor

    start(sampler=NewestFirst())
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(get, 2)
        ids = put(2)
        assert waiting.result(timeout=5) == ids


@pytest.mark.skipif(IS_PEER, reason="its controller cannot import this module")
def test_a_sampler_may_take_longer_than_a_call_to_redis_may(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of one in Ray takes seconds to start."""
    monkeypatch.setattr("tq_redis.compat.transfer_queue.own_sampler._ANSWER_S", 0.5)

    class Slow(tq.BaseSampler):
        def sample(self, ready_indexes: list[int], batch_size: int, **names: Any) -> Any:
            time.sleep(0.6)
            return ready_indexes[:batch_size], ready_indexes[:batch_size]

    start(sampler=Slow, polling_mode=True)
    ids = put(2)
    assert get(2) == ids


@pytest.mark.skipif(IS_PEER, reason="its controller is always in Ray")
def test_a_sampler_of_ones_own_lives_in_ray(
    ray_session: None, redis_url: str, namespace: str
) -> None:
    class Last(tq.BaseSampler):
        def sample(self, ready_indexes: Any, batch_size: int, **names: Any) -> Any:
            chosen = ready_indexes[-batch_size:]
            weights = names["partition"].get_custom_meta(chosen)
            return chosen, [index for index in chosen if weights[index].get("once", True)]

    conf = {"redis": {"url": redis_url, "namespace": namespace}}
    tq.init({"controller": {"sampler": Last, "polling_mode": True}, "tq_redis": conf})
    try:
        ids = put(3)
        assert get(2) == ids[1:]
        assert get(2) == []
        assert get(1) == ids[:1]
        tq.get_client().set_custom_meta(
            tq.BatchMeta(ids, ["p"] * 3, custom_meta=[{}, {}, {"once": False}])
        )
        assert [get(1, "again") for _ in range(2)] == [ids[2:]] * 2
    finally:
        tq.close()
