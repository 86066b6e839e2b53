"""A partition of a million rows: no call holds up Redis, or costs more than in a small one."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import pytest
import redis

import tq_redis
from tests.conftest import ServerUnderTest, server_binary
from tests.control.scripts_at_work import CpuTimes, values_per_script
from tq_redis.control.plane import CELLS_PER_CALL
from tq_redis.redis_server import start_server

ROWS = 1_000_000
ROWS_OF_A_SMALL_ONE = 50_000
GROUP = 8
REPEATS = 5
# Redis's only thread may be busy for so long with one script, and another client wait so long.
SCRIPT_MS = 10.0
PING_MS = 50.0


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue on a server of its own."""

    url: str
    client: tq_redis.Client
    admin: redis.Redis

    def put(self, partition: str, first: int, count: int, *, in_groups: bool = True) -> None:
        """Rows of one field."""
        groups = [str(number // GROUP) for number in range(first, first + count)]
        self.client.put(
            {"x": np.arange(count)}, None, partition, group_ids=groups if in_groups else None
        )

    def claim(self, partition: str, count: int, *, in_groups: bool = False) -> tq_redis.BatchMeta:
        """Rows of the task that takes them in order, or of the one that takes groups."""
        sampler = tq_redis.GRPOGroupNSampler(GROUP) if in_groups else None
        task = f"in groups: {in_groups}"
        meta = self.client.get_meta(
            ["x"], count, partition, task_name=task, sampler=sampler, timeout=60
        )
        assert meta.size == count
        return meta

    def draw(self, partition: str, number: int) -> tq_redis.BatchMeta:
        """A batch of 8,192 rows that is remembered, from those that are taken in order."""
        meta = self.client.get_meta(
            ["x"],
            8192,
            partition,
            task_name="in groups: False",
            sampler=tq_redis.RankAwareSampler(),
            sampling_config={"dp_rank": 0, "batch_index": number},
            timeout=60,
        )
        assert meta.size == 8192
        return meta


@pytest.fixture
def queue(redis_server: ServerUnderTest) -> Iterator[Queue]:
    # A server that runs already has no binary here, and its CPU time may not be ours to see.
    external = redis_server.kind == "external"
    binary = None if external else server_binary(redis_server.kind)
    with start_server(binary=binary) as server, redis.Redis.from_url(server.url) as admin:
        tq_redis.init({"redis": {"url": server.url}, "data": {"backend": "memory"}})
        yield Queue(server.url, tq_redis.get_client(), admin)
        tq_redis.close()


def calls_on(queue: Queue, partition: str) -> dict[str, Callable[[], object]]:
    """What people do to a partition, ready to be done ``REPEATS`` times and once more."""
    queue.claim(partition, GROUP, in_groups=True)
    tagged = queue.claim(partition, 256)
    tagged.update_custom_meta([{"status": "done"}] * tagged.size)
    queue.draw(partition, 0)
    numbers = iter(range(1, 99))
    to_clear = iter([queue.claim(partition, 2048) for _ in range(REPEATS + 1)])
    return {
        "claim 64": lambda: queue.claim(partition, 64),
        "claim 256": lambda: queue.claim(partition, 256),
        "claim 64 in groups": lambda: queue.claim(partition, 64, in_groups=True),
        "claim 256 in groups": lambda: queue.claim(partition, 256, in_groups=True),
        "draw 8192": lambda: queue.draw(partition, next(numbers)),
        "draw 8192 again": lambda: queue.draw(partition, 0),
        "put 8": lambda: queue.put(partition, ROWS, 8),
        "put 4096": lambda: queue.put(partition, ROWS, 4096),
        "put 4096, in no group": lambda: queue.put(partition, ROWS, 4096, in_groups=False),
        "tags of 256": lambda: queue.client.set_custom_meta(tagged),
        "clear 2048": lambda: queue.client.clear_samples(next(to_clear)),
    }


def test_no_call_keeps_redis_busy(queue: Queue) -> None:
    cpu = CpuTimes(queue.admin)
    with pings(queue.url) as latencies:
        for first in range(0, ROWS, 10_000):
            cpu.of("fill", lambda first=first: queue.put("large", first, 10_000))
        cpu.of("first claim", lambda: queue.claim("large", 64))
        cpu.of("first claim in groups", lambda: queue.claim("large", 64, in_groups=True))
        large = calls_on(queue, "large")
        for kind, call in large.items():
            for _ in range(REPEATS):
                cpu.of(kind, call)
    assert {kind: ms for kind, ms in cpu.medians().items() if ms > SCRIPT_MS} == {}
    assert typical_p99(latencies) < PING_MS

    # The same work as in a small partition. A clear also depends on how many blocks it touches.
    queue.put("small", 0, ROWS_OF_A_SMALL_ONE)
    small = calls_on(queue, "small")
    for call in small.values():
        call()
    small["clear"] = lambda: queue.client.clear_partition("small")
    large["clear"] = lambda: queue.client.clear_partition("large")
    for kind, call in small.items():
        expected = values_per_script(queue.url, "small", call)
        found = values_per_script(queue.url, "large", large[kind])
        assert len(found) == len(expected), kind
        assert max(found) <= 1.1 * max(expected), kind
        assert max(found) <= 8 * CELLS_PER_CALL, kind


@contextmanager
def pings(url: str) -> Generator[list[tuple[float, float]]]:
    """Another client, in a process of its own, that sends one PING after the other; afterwards the
    list has the moment and the latency of each, in seconds."""
    latencies: list[tuple[float, float]] = []
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_ping, args=(url, theirs))
    process.start()
    try:
        ours.recv()
        yield latencies
        ours.send("stop")
        latencies += ours.recv()
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
        theirs.close()


def _ping(url: str, connection: Connection) -> None:
    latencies: list[tuple[float, float]] = []
    with redis.Redis.from_url(url) as client:
        client.ping()
        connection.send("ready")
        while not connection.poll(0.001):
            start = time.monotonic()
            client.ping()
            latencies.append((start, time.monotonic() - start))
    connection.send(latencies)


def typical_p99(latencies: list[tuple[float, float]]) -> float:
    """Milliseconds: the median of the 99th percentiles of every second, so that a moment in which
    the machine was busy with something else does not count."""
    seconds: dict[int, list[float]] = {}
    for moment, latency in latencies:
        seconds.setdefault(int(moment), []).append(1000 * latency)
    return statistics.median(float(np.percentile(found, 99)) for found in seconds.values())
