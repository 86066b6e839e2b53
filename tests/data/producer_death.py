"""Producers die in the middle of a put, and while another node reads: see test_producer_death.py.

``python -m tests.data.producer_death URL NAMESPACE`` exits with 0 when every step was right.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import tq_redis as tq
from tests.raylets import two_raylets
from tq_redis import instance
from tq_redis.data import ray_door

ROWS = 8
WIDTH = 12_500_000  # float32: 50 MB a row
STORE_BYTES = 1 << 30
WITHIN = 30.0
# Of the time that a put takes.
KILLED_AFTER = (0.1, 0.5, 0.9)


class _Producer:
    def __init__(self) -> None:
        ray_door._KEEP_S = 2.0  # the room of the dead comes back while the test waits
        self.client = tq.get_client()

    def ready(self) -> None:
        """All is imported and connected, and there is something to put."""
        self.data = torch.arange(float(ROWS))[:, None].expand(-1, WIDTH).contiguous()
        self.client.put({"x": self.data[:, :10]}, partition_id="warm")
        self.client.clear_partition("warm")

    def alive(self) -> None: ...

    def put(self, partition: str) -> None:
        self.client.put({"x": self.data}, partition_id=partition)


Producer: Any = ray.remote(num_cpus=0)(_Producer)


class Steps:
    """The owner and reader is on the head, producers are on the other node."""

    def __init__(self, far: Any) -> None:
        self.client = tq.get_client()
        # Together: each takes seconds to import all.
        there = NodeAffinitySchedulingStrategy(far.node_id, soft=False)
        started = Producer.options(scheduling_strategy=there)
        self.producers = [started.remote() for _ in range(2 + len(KILLED_AFTER))]
        ray.get([producer.alive.remote() for producer in self.producers], timeout=180)

    def run(self) -> None:
        put_s = self.after_a_put()
        self.during_a_get(put_s)
        kept = [self.during_a_put(put_s * share) for share in KILLED_AFTER]
        # Of a put that was not acknowledged all rows are there, and right, or none.
        assert 0 in kept
        assert set(kept) <= {0, ROWS}, kept
        # What no row names is freed, and the room that the dead had asked for.
        end = time.monotonic() + 2 * WITHIN
        while self.used() and time.monotonic() < end:
            time.sleep(0.1)
        assert self.used() == 0, self.client.get_store_usage()

    def after_a_put(self) -> float:
        """Seconds that the put took."""
        producer = self.producer()
        ray.get(producer.put.remote("before"), timeout=WITHIN)  # touches the memory
        assert self.take("before") == ROWS
        started = time.monotonic()
        ray.get(producer.put.remote("after"), timeout=WITHIN)
        put_s = time.monotonic() - started
        self.kill(producer)
        assert self.take("after") == ROWS
        return put_s

    def during_a_get(self, put_s: float) -> None:
        producer = self.producer()
        ray.get(producer.put.remote("during"), timeout=WITHIN)
        killing: Any = ray.remote(num_cpus=0)(_kill_after)
        killed = killing.remote(producer, put_s / 2)
        assert self.take("during") == ROWS
        ray.get(killed, timeout=WITHIN)

    def during_a_put(self, delay_s: float) -> int:
        """How many rows of the put can be claimed."""
        producer = self.producer()
        putting = producer.put.remote("cut")
        time.sleep(delay_s)
        self.kill(producer)
        with contextlib.suppress(RayActorError):
            ray.get(putting, timeout=WITHIN)
        return self.take("cut")

    def producer(self) -> Any:
        producer = self.producers.pop()
        ray.get(producer.ready.remote(), timeout=WITHIN)
        return producer

    def kill(self, producer: Any) -> None:
        ray.kill(producer)
        with contextlib.suppress(RayActorError):  # raised when it is dead, which takes a moment
            while True:
                ray.get(producer.alive.remote(), timeout=WITHIN)

    def take(self, partition: str) -> int:
        """Claim all rows of a partition, compare them with what was put, and clear it."""
        meta = self.client.get_meta(["x"], ROWS, partition, task_name="train", timeout=0)
        if meta.size:
            started = time.monotonic()
            columns = self.client.get_columns(meta, copy=False, timeout=WITHIN)
            assert time.monotonic() - started < WITHIN
            means = columns["x"].mean(dim=1, dtype=torch.float64)
            assert torch.equal(means, torch.arange(float(ROWS), dtype=torch.float64))
        self.client.clear_partition(partition)
        return meta.size

    def used(self) -> int:
        return sum(usage.used for usage in self.client.get_store_usage())


def _kill_after(producer: Any, delay_s: float) -> None:
    time.sleep(delay_s)
    ray.kill(producer)


def main(url: str, namespace: str) -> None:
    instance.RENEW_S = 2.0  # and so often the owner looks for what no row names
    with two_raylets(STORE_BYTES) as (_, far):
        tq.init(
            {
                "redis": {"url": url, "namespace": namespace},
                "timeout_s": WITHIN,
                # Half of it is what a put has to name its blocks, on a busy machine too.
                "data": {"orphan_grace_s": 8.0},
            }
        )
        Steps(far).run()
        tq.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
