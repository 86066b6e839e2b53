"""What a person sees who asks why a trainer hangs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import tq_redis as tq
from tests.conftest import WaitUntil
from tq_redis.samplers import Sampler


def test_who_waits_for_what(client: tq.Client, wait_until: WaitUntil) -> None:
    meta = client.put({"x": torch.zeros(6)}, partition_id="p")
    client.put({"y": torch.zeros(2)}, meta[:2])
    client.expect("p", 8)
    client.get_meta(["x"], 2, "p", task_name="actor")
    client.get_meta(["x"], 1, "p", task_name="actor", lease=60)
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(client.get_meta, ["x", "y"], 3, "p", task_name="critic"),
            pool.submit(client.get_meta, [], 7, "p", task_name="log", sampler=All()),
        ]
        wait_until(lambda: waiters(client, "critic") and waiters(client, "log"))
        found = client.get_standing("p")
        assert (found.samples, found.made, found.expected, found.ended) == (6, 6, 8, False)
        assert found.produced == {"x": 6, "y": 2}
        actor, critic = found.tasks["actor"], found.tasks["critic"]
        assert (actor.consumed, actor.claimed, actor.set_aside) == (2, 1, 0)
        assert actor.ready == {"x": 3}
        assert actor.waiters == []
        assert critic.ready == {"x, y": 2}
        assert [(each.count, each.fields) for each in critic.waiters] == [(3, ["x", "y"])]
        log = found.tasks["log"]
        assert log.ready == {"": 6}
        assert [(each.count, each.fields) for each in log.waiters] == [(7, [])]
        client.put({"x": torch.zeros(2), "y": torch.zeros(2)}, partition_id="p")
        assert [call.result(timeout=10).size for call in calls] == [3, 8]
    assert (waiters(client, "critic"), waiters(client, "log")) == ([], [])


def waiters(client: tq.Client, name: str) -> list[tq.Waiter]:
    task = client.get_standing("p").tasks.get(name)
    return task.waiters if task else []


class All(tq.BaseSampler):
    """Takes all, if there are as many as it was asked for."""

    def sample(self, ready: tq.Ready, batch_size: int, **sampling_config: object) -> list[int]:
        return ready.ids if len(ready.ids) >= batch_size else []


def test_who_gave_up_does_not_wait(client: tq.Client, wait_until: WaitUntil) -> None:
    client.put({"x": torch.zeros(1)}, partition_id="p")
    with pytest.raises(tq.DeadlineError):
        client.get_meta(["x"], 2, "p", task_name="critic", timeout=0.05)
    assert client.get_meta(["x"], 2, "p", task_name="critic", timeout=0).size == 0
    wait_until(lambda: waiters(client, "critic") == [])
    assert client.get_standing("p").tasks["critic"].ready == {"x": 1}


@pytest.mark.parametrize(
    ("sampler", "count"),
    [
        (None, 4),
        (All(), 1500),
        (tq.RankAwareSampler(), 4),
        (tq.RankAwareSampler(), 1500),
        (tq.SeqlenBalancedSampler(dp_size=2, n_samples_per_prompt=1), 2),
    ],
    ids=["sequential", "own", "rank", "rank, in pieces", "balanced"],
)
def test_who_got_samples_at_once_does_not_wait(
    client: tq.Client, sampler: Sampler | None, count: int
) -> None:
    client.put({"x": torch.zeros(1500)}, partition_id="p", tags=[{"total_lengths": 1}] * 1500)
    options: dict[str, Any] = {"sampler": sampler} if sampler is not None else {}
    draws = not isinstance(sampler, All | None)
    if draws:
        options["sampling_config"] = {"dp_rank": 0, "batch_index": 0}
    for _ in range(2 if draws else 1):  # a draw is got again
        meta = client.get_meta(["x"], count, "p", task_name="critic", timeout=30, **options)
        assert meta.size == count
        assert waiters(client, "critic") == []
    client.limit("p", "critic", max(1, count // 2))  # refused while somebody waits for more


def test_who_gets_nothing_any_more_does_not_wait(client: tq.Client, wait_until: WaitUntil) -> None:
    client.put({"x": torch.zeros(2)}, partition_id="p")
    client.end_partition("p")
    with pytest.raises(tq.CannotFillError):
        client.get_meta(["x"], 3, "p", task_name="critic", timeout=30)
    wait_until(lambda: waiters(client, "critic") == [])


def test_an_unknown_partition(client: tq.Client) -> None:
    with pytest.raises(tq.PartitionNotFoundError):
        client.get_standing("p")


def test_concurrent_merges_of_tags_lose_nothing(client: tq.Client) -> None:
    meta = client.put({"x": torch.zeros(3)}, partition_id="p", tags=[{"a": 0}, {}, {}])
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(client.merge_custom_meta, meta, [{f"t{n}": n}] * 3) for n in range(20)]
        merged = [call.result(timeout=20) for call in calls]
    assert merged[3].custom_meta == [{"a": 0, "t3": 3}, {"t3": 3}, {"t3": 3}]
    new = {f"t{n}": n for n in range(20)}
    assert client.get_meta(["x"], 3, "p", task_name="t").custom_meta == [{"a": 0} | new, new, new]
    with pytest.raises(tq.InputError, match="tags for 1 rows"):
        client.merge_custom_meta(meta, [{}])
