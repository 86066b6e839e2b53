"""Limits: producers that are too fast wait, or replace their oldest samples."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

import tq_redis as tq
from tests.conftest import WaitUntil
from tests.data.units import held_blocks

LONG_S = 60.0
# Woken puts are back long before a waiter looks again by itself.
WOKEN_S = 4.0


def put(client: tq.Client, rows: int, **options: Any) -> tq.BatchMeta:
    return client.put({"x": torch.arange(float(rows))}, partition_id="p", **options)


def take(client: tq.Client, rows: int, **options: Any) -> tq.BatchMeta:
    return client.get_meta(["x"], rows, "p", task_name="t", **options)


def unconsumed(client: tq.Client, task: str = "t") -> int:
    return client.get_standing("p").tasks[task].unconsumed


def blocked(pool: ThreadPoolExecutor, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A call under way that has found no room and waits."""
    future = pool.submit(call, *args, **options)
    with pytest.raises(TimeoutError):
        future.result(timeout=0.2)
    return future


def woken(call: Future[Any]) -> Any:
    return call.result(timeout=WOKEN_S)


# Running ahead


class Trainer:
    """Trains on batches of ``BATCH`` samples; every sample carries the version that made it."""

    BATCH = 8

    def __init__(self, client: tq.Client, updates: int) -> None:
        self.client = client
        self.version = 0
        self.ages: list[int] = []
        self._updates = updates

    def train(self) -> None:
        chance = random.Random(0)
        while self.version < self._updates:
            with self.client.hold(take(self.client, self.BATCH, lease=LONG_S)) as batch:
                self.ages += [self.version - row["version"] for row in batch.custom_meta]
                time.sleep(chance.uniform(0.01, 0.02))
            self.version += 1


class Producer:
    """Puts samples of the trainer's version, five times as fast as it trains."""

    ROWS = 4

    def __init__(self, trainer: Trainer) -> None:
        self.put = 0
        self._trainer = trainer
        self._chance = random.Random(1)
        self._stop = threading.Event()

    def run(self) -> None:
        while not self._stop.is_set():
            tags = [{"version": self._trainer.version}] * self.ROWS
            time.sleep(self._chance.uniform(0.001, 0.002))
            put(self._trainer.client, self.ROWS, tags=tags)
            self.put += self.ROWS

    def stop(self) -> None:
        self._stop.set()
        self._trainer.client.limit("p", "t", None)


def run_ahead(client: tq.Client, updates: int = 30) -> tuple[Trainer, int]:
    trainer = Trainer(client, updates)
    producer = Producer(trainer)
    with ThreadPoolExecutor(1) as pool:
        producing = pool.submit(producer.run)
        trainer.train()
        producer.stop()
        producing.result(timeout=20)
    return trainer, producer.put


@pytest.mark.parametrize("when_full", ["wait", "evict"])
def test_a_producer_that_is_five_times_as_fast_is_not_far_ahead(
    client: tq.Client, when_full: Any
) -> None:
    """The bound of docs/claiming.md: (limit + what the producer has in hand - 1) // batch."""
    client.limit("p", "t", 2 * Trainer.BATCH, when_full=when_full)
    trainer, made = run_ahead(client)
    bound = (2 * Trainer.BATCH + Producer.ROWS - 1) // Trainer.BATCH
    assert len(trainer.ages) == 30 * Trainer.BATCH
    assert max(trainer.ages) <= bound == 2
    evicted = client.get_evicted("t", "p")
    assert client.get_summary("p").get("evicted:t", 0) == len(evicted)
    samples = int(client.get_summary("p")["samples"])
    assert made == samples + len(evicted)
    assert bool(evicted) == (when_full == "evict")


def test_without_a_limit_it_is(client: tq.Client) -> None:
    """Else the test above would show nothing."""
    trainer, _ = run_ahead(client)
    assert max(trainer.ages) > 4


def test_several_producers_together_make_no_more_than_the_limit(client: tq.Client) -> None:
    client.limit("p", "t", 16)
    seen: list[int] = []

    def produce(seed: int) -> int:
        chance, made = random.Random(seed), 0
        for _ in range(12):
            rows = chance.randint(1, 6)
            put(client, rows)
            made += rows
            seen.append(unconsumed(client))
        return made

    with ThreadPoolExecutor(6) as pool:
        producers = [pool.submit(produce, seed) for seed in range(6)]
        got = 0
        while not all(producer.done() for producer in producers):
            got += take(client, 1, timeout=0).size
        made = sum(producer.result() for producer in producers)
    assert max(seen) <= 16
    assert unconsumed(client) == made - got


def test_a_put_of_several_steps_is_let_as_a_whole(client: tq.Client) -> None:
    """Two of 1,500 rows are more than one script writes; there is room for one."""
    client.limit("p", "t", 2000)
    with ThreadPoolExecutor(2) as pool:
        puts = [pool.submit(put, client, 1500) for _ in range(2)]
        assert take(client, 1500).size == 1500
        ids = [each.result(timeout=10).global_indexes for each in puts]
    assert sorted(ids[0] + ids[1]) == client.get_production_status(["x"], "p")[0].tolist()
    assert unconsumed(client) == 1500


# Waiting


def test_what_wakes_a_put(client: tq.Client) -> None:
    client.limit("p", "t", 4)
    first = put(client, 4)
    with ThreadPoolExecutor(1) as pool:
        waiting = blocked(pool, put, client, 2)
        held = take(client, 2, lease=LONG_S)
        with pytest.raises(TimeoutError):  # leased ones count
            waiting.result(timeout=0.2)
        client.ack(held)
        assert woken(waiting).size == 2
        waiting = blocked(pool, put, client, 2)
        take(client, 2)
        last = woken(waiting)
        waiting = blocked(pool, put, client, 1)
        client.clear_samples(first[:1])  # it was consumed
        client.clear_samples(last[:1])
        assert woken(waiting).size == 1
        waiting = blocked(pool, put, client, 1)
        client.limit("p", "t", 5)
        assert woken(waiting).size == 1
        waiting = blocked(pool, put, client, 3)
        client.limit("p", "t", None)
        assert woken(waiting).size == 3
        client.limit("p", "t", 4)
        waiting = blocked(pool, put, client, 1)
        client.clear_partition("p")  # with it its events; the put looks again after five seconds
        assert waiting.result(timeout=10).size == 1
        assert client.get_summary("p")["samples"] == 1


def test_a_put_that_waits_does_not_ask_again_and_again(client: tq.Client, redis_url: str) -> None:
    import redis

    client.limit("p", "t", 4)
    put(client, 4)
    with (
        redis.Redis.from_url(redis_url, decode_responses=True) as admin,
        ThreadPoolExecutor(1) as pool,
    ):

        def scripts() -> int:
            stats: Any = admin.info("commandstats")
            return sum(
                stats[f"cmdstat_{n}"]["calls"]
                for n in ("eval", "evalsha")
                if f"cmdstat_{n}" in stats
            )

        waiting = blocked(pool, put, client, 4)
        before = scripts()
        time.sleep(0.5)
        assert scripts() - before <= 2  # the owner renews its own claim now and then
        take(client, 4)
        woken(waiting)


def test_the_deadline_of_a_put(client: tq.Client, namespace: str) -> None:
    client.limit("p", "t", 4)
    take(client, 1, timeout=0)
    put(client, 3)
    take(client, 1, lease=LONG_S)
    blocks = held_blocks(namespace)
    for timeout in (0.2, 0):
        with pytest.raises(
            tq.PartitionFullError, match="of 2 .* for room in partition 'p'"
        ) as told:
            put(client, 2, timeout=timeout)
        error = told.value
        assert isinstance(error, tq.DeadlineError)
        assert (error.partition, error.task, error.limit, error.unconsumed) == ("p", "t", 4, 3)
        assert "1 of them held with a lease" in str(error)
    assert held_blocks(namespace) == blocks
    assert client.get_summary("p")["samples"] == 3
    assert put(client, 1).size == 1


def test_the_error_says_why_nobody_makes_room(client: tq.Client, wait_until: WaitUntil) -> None:
    """The name of the task is wrong; or batches and puts do not fit into the limit together."""
    client.limit("p", "tt", 8)
    put(client, 8)
    with pytest.raises(tq.PartitionFullError, match="No consumer of it has asked"):
        put(client, 1, timeout=0.1)
    client.limit("p", "tt", None)
    take(client, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(take, client, 8)
        wait_until(lambda: client.get_standing("p").tasks["t"].waiters)
        client.limit("p", "t", 10)
        with pytest.raises(tq.PartitionFullError, match="puts of 6 .* with a limit of 13 or more"):
            put(client, 6, timeout=0.1)
        client.limit("p", "t", 13)
        put(client, 6)
        assert waiting.result(timeout=10).size == 8


@pytest.mark.asyncio
async def test_a_put_that_is_cancelled_leaves_nothing(client: tq.Client, namespace: str) -> None:
    client.limit("p", "t", 4)
    put(client, 4)
    before = client.get_summary("p")
    blocks = held_blocks(namespace)
    chance = random.Random(0)
    for _ in range(20):
        call = asyncio.create_task(
            client.async_put({"x": torch.zeros(2)}, partition_id="p", tags=[{"n": 1}] * 2)
        )
        await asyncio.sleep(chance.uniform(0, 0.02))
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    assert client.get_summary("p") == before
    assert held_blocks(namespace) == blocks
    await client.async_get_meta(["x"], 4, "p", task_name="t")
    assert (await client.async_put({"x": torch.zeros(4)}, partition_id="p", timeout=10)).size == 4


@pytest.mark.asyncio
async def test_one_that_is_cancelled_while_it_writes_leaves_its_room_to_others(
    client: tq.Client,
) -> None:
    client.limit("p", "t", 4)
    chance = random.Random(0)
    for _ in range(30):
        call = asyncio.create_task(client.async_put({"x": torch.zeros(4)}, partition_id="p"))
        await asyncio.sleep(chance.uniform(0, 0.004))
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        made = client.get_summary("p")["samples"]
        if made:
            client.clear_samples(await client.async_get_meta(["x"], 4, "p", task_name="t"))
    assert (await client.async_put({"x": torch.zeros(4)}, partition_id="p", timeout=10)).size == 4


def test_a_put_that_fails_leaves_its_room_to_others(client: tq.Client) -> None:
    client.limit("p", "t", 4)
    client.kv_batch_put(["a", "b"], "p", {"x": torch.zeros(2)})
    with pytest.raises(tq.SchemaConflictError):
        client.kv_batch_put(["a", "c", "d"], "p", {"x": torch.zeros(3, dtype=torch.int64)})
    assert put(client, 2, timeout=5).size == 2


def test_a_put_that_waits_hears_that_no_more_are_to_come(client: tq.Client) -> None:
    client.limit("p", "t", 4)
    put(client, 4)
    with ThreadPoolExecutor(1) as pool:
        waiting = blocked(pool, put, client, 1)
        client.end_partition("p")
        with pytest.raises(tq.PartitionEndedError):
            woken(waiting)


# Every way to make samples, and those that make none


def test_only_new_samples_wait(client: tq.Client) -> None:
    client.limit("p", "t", 3)
    client.kv_batch_put(["a", "b"], "p", {"x": torch.zeros(2)}, tags=[{"n": 1}] * 2)
    meta = client.get_meta([], 1, "p", mode="insert")
    for call in (
        lambda: client.kv_put("c", "p", {"x": torch.zeros(())}, timeout=0.1),
        lambda: client.kv_put("c", "p", tag={"n": 1}, timeout=0.1),
        lambda: client.kv_retrieve_meta(["a", "c"], "p", create=True, timeout=0.1),
        lambda: client.get_meta([], 1, "p", mode="insert", timeout=0.1),
    ):
        with pytest.raises(tq.PartitionFullError, match="A put of 1 new samples"):
            call()
    client.put({"x": torch.zeros(1), "y": torch.zeros(1)}, meta)
    client.kv_batch_put(["b", "a"], "p", {"y": torch.zeros(2)}, tags=[{"m": 1}] * 2)
    client.kv_retrieve_meta(["a", "b"], "p", create=True)
    client.merge_custom_meta(meta, [{"n": 2}])
    assert client.get_summary("p")["samples"] == 3
    take(client, 1)
    assert client.kv_put("c", "p", tag={"n": 1}).keys == ["c"]
    assert client.kv_list("p")["p"] == {"a": {"n": 1, "m": 1}, "b": {"n": 1, "m": 1}, "c": {"n": 1}}


def test_many_keys_at_once(client: tq.Client) -> None:
    """Of which some exist; more than one script writes."""
    client.limit("p", "t", 3000)
    client.kv_batch_put([f"k{n}" for n in range(500)], "p", tags=[{"n": 0}] * 500)
    client.kv_batch_put([f"k{n}" for n in range(3000)], "p", tags=[{"n": 1}] * 3000)
    client.kv_batch_put([f"k{n}" for n in range(3000)], "p", {"x": torch.zeros(3000)})
    with pytest.raises(tq.PartitionFullError):
        client.kv_batch_put(["new", "k1"], "p", tags=[{"n": 0}] * 2, timeout=0.1)
    assert unconsumed(client) == 3000


def test_upstream_tasks_go_on_when_it_is_full(client: tq.Client) -> None:
    """Else the task that has the limit would never get a sample."""
    client.limit("p", "train", 8)
    put(client, 8)
    prompts = client.get_meta(["x"], 8, "p", task_name="generate")
    client.put({"response": torch.zeros(8)}, prompts)
    with ThreadPoolExecutor(1) as pool:
        waiting = blocked(pool, put, client, 8)
        client.get_meta(["response"], 8, "p", task_name="train")
        assert woken(waiting).size == 8


# Batches that do not fit


def test_a_batch_larger_than_the_limit_is_refused_at_once(client: tq.Client) -> None:
    client.limit("p", "t", 8)
    put(client, 8)
    start = time.monotonic()
    with pytest.raises(tq.InputError, match="asked for 9 samples .* limit lets only 8"):
        take(client, 9)
    balanced = tq.SeqlenBalancedSampler(n_samples_per_prompt=1, dp_size=2)
    ranks = {"dp_rank": 0, "batch_index": 0}
    with pytest.raises(tq.InputError, match="asked for 10 samples"):
        take(client, 5, sampler=balanced, sampling_config=ranks)
    with pytest.raises(tq.InputError, match="put of 9 new samples is more than the 8"):
        put(client, 9)
    with pytest.raises(tq.InputError, match="put of 9 new samples"):
        client.kv_batch_put([f"k{n}" for n in range(9)], "p", tags=[{}] * 9)
    assert time.monotonic() - start < WOKEN_S
    assert client.get_meta(["x"], 8, "p", task_name="u").size == 8
    assert take(client, 8).size == 8


def test_a_limit_smaller_than_what_a_consumer_waits_for_is_refused(
    client: tq.Client, wait_until: WaitUntil
) -> None:
    put(client, 4)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(take, client, 8)
        wait_until(lambda: "t" in client.get_standing("p").tasks)
        wait_until(lambda: client.get_standing("p").tasks["t"].waiters)
        with pytest.raises(tq.InputError, match="cannot be limited to 7 .* waits for 8"):
            client.limit("p", "t", 7)
        client.limit("p", "t", 8)
        put(client, 4)
        assert waiting.result(timeout=10).size == 8


def test_arguments_that_cannot_be_right(client: tq.Client) -> None:
    for samples in (0, -1):
        with pytest.raises(tq.InputError, match="samples must be positive"):
            client.limit("p", "t", samples)
    unknown: Any = "drop"
    with pytest.raises(tq.InputError, match="'wait' or 'evict', got 'drop'"):
        client.limit("p", "t", 1, when_full=unknown)
    with pytest.raises(tq.InputError, match="needs task_name"):
        client.limit("p", "", 1)
    assert client.get_partition_list() == []


# Evicting


def test_evicted_samples_are_reported(
    client: tq.Client, caplog: pytest.LogCaptureFixture, namespace: str
) -> None:
    client.limit("p", "t", 8, when_full="evict")
    old = put(client, 4)
    put(client, 4)
    assert client.get_evicted("t", "p") == []
    put(client, 4)
    assert client.get_evicted("t", "p") == old.global_indexes
    assert client.get_evicted("u", "p") == []
    assert f"Samples {old.global_indexes} of partition 'p' were cleared to make room" in caplog.text
    assert client.get_summary("p")["evicted:t"] == 4
    task = client.get_standing("p").tasks["t"]
    assert (task.limit, task.unconsumed, task.evicted) == (tq.TaskLimit(8, "evict"), 8, 4)
    assert task.ready == {}
    assert len(held_blocks(namespace)) == 2  # their bytes are free
    with pytest.raises(tq.SampleNotFoundError):
        client.get_data(old)
    with pytest.raises(tq.SampleNotFoundError):
        client.put({"y": torch.zeros(4)}, old)


def test_it_waits_while_consumers_hold_too_many(client: tq.Client) -> None:
    client.limit("p", "t", 8, when_full="evict")
    put(client, 8)
    held = take(client, 6, lease=LONG_S)
    with ThreadPoolExecutor(1) as pool:
        waiting = blocked(pool, put, client, 4)
        assert client.get_evicted("t", "p") == []
        client.ack(held[:2])
        assert woken(waiting).size == 4
    client.ack(held[2:])
    assert len(client.get_evicted("t", "p")) == 2


def test_no_consumer_is_left_with_half_a_group(client: tq.Client) -> None:
    four = tq.GRPOGroupNSampler(4)
    client.limit("p", "t", 16, when_full="evict")
    for number in range(10):
        names = [f"prompt {number}"] * 4 + [f"prompt {number}b"] * 2
        client.put({"x": torch.zeros(6)}, partition_id="p", group_ids=names)
        client.put({"y": torch.zeros(1)}, put(client, 1))
    seen = client.get_meta(["x"], 8, "p", task_name="t", sampler=four)
    assert seen.size == 8
    standing = client.get_standing("p").tasks["t"]
    assert standing.unconsumed <= 8
    assert standing.evicted == 70 - 8 - standing.unconsumed


def test_consumers_and_evicting_producers_share_every_sample_out(client: tq.Client) -> None:
    """Each is consumed or evicted, once."""
    client.limit("p", "t", 12, when_full="evict")
    four = tq.GRPOGroupNSampler(4)

    def produce(name: int) -> list[int]:
        ids: list[int] = []
        for turn in range(25):
            ids += put(client, 4, group_ids=[f"{name} {turn}"] * 4).global_indexes
        return ids

    def consume() -> list[int]:
        ids: list[int] = []
        while True:
            try:
                batch = take(client, 4, sampler=four, lease=LONG_S)
            except tq.EndOfStreamError:
                return ids
            client.ack(batch)
            ids += batch.global_indexes

    with ThreadPoolExecutor(5) as pool:
        consumers = [pool.submit(consume) for _ in range(2)]
        producers = [pool.submit(produce, name) for name in range(3)]
        made = [sample for each in producers for sample in each.result(timeout=30)]
        client.end_partition("p")
        got = [sample for each in consumers for sample in each.result(timeout=30)]
    assert sorted(got + client.get_evicted("t", "p")) == sorted(made)
    assert len(made) == 300


def test_samples_that_are_set_aside_leave_room(client: tq.Client) -> None:
    """Nobody will consume them."""
    client.limit("p", "t", 2)
    bad = put(client, 2).global_indexes
    for _ in range(client.config.max_deliveries):
        client.release(take(client, 2, lease=LONG_S))
    assert client.get_set_aside("t", "p").global_indexes == bad
    assert unconsumed(client) == 0
    good = put(client, 2, timeout=WOKEN_S)
    assert take(client, 2).global_indexes == good.global_indexes


def test_a_smaller_limit_holds_from_the_next_put_on(client: tq.Client) -> None:
    client.limit("p", "t", 16, when_full="evict")
    old = put(client, 16)
    client.limit("p", "t", 4, when_full="evict")
    assert unconsumed(client) == 16
    new = put(client, 2)
    assert take(client, 4).global_indexes == old.global_indexes[-2:] + new.global_indexes


def test_a_partition_made_again_has_no_limit(client: tq.Client) -> None:
    client.limit("p", "t", 2)
    put(client, 2)
    client.clear_partition("p")
    put(client, 9)
    with pytest.raises(tq.DeadlineError):
        take(client, 10, timeout=0.1)
