"""Training for long: nothing grows from step to step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray
import torch

import tq_redis as tq
from tq_redis.data.ray_stores import RAY_NAMESPACE

STEPS = 50
WARM = 5
WIDTH = 8192
ROWS = 2048  # 64 MiB a step
SLACK = 1.1


@pytest.fixture
def client(ray_session: None, redis_url: str, namespace: str) -> Iterator[tq.Client]:
    tq.init({"redis": {"url": redis_url, "namespace": namespace}})
    yield tq.get_client()
    tq.close()


@pytest.mark.slow
def test_fifty_steps_leave_memory_as_it_was_after_five(
    client: tq.Client, namespace: str, wait_until: Any
) -> None:
    data = {"x": torch.rand(ROWS, WIDTH // 2), "y": torch.rand(ROWS, WIDTH // 2)}
    store = store_process(namespace)
    empty = object_store_bytes()
    after_warm_up: dict[str, float] = {}
    for step in range(1, STEPS + 1):
        partition = f"train_{step}"
        client.put(data, partition_id=partition)
        meta = client.get_meta(["x", "y"], ROWS, partition, task_name="update_actor")
        got = client.get_columns(meta, copy=step % 2 == 0)
        assert torch.equal(got["y"][-1], data["y"][-1])
        del got
        client.clear_partition(partition)
        if step == WARM:
            after_warm_up = memory(store)
    wait_until(lambda: object_store_bytes() <= empty + (1 << 20), what="all blocks are freed")
    wait_until(lambda: grown(after_warm_up, memory(store)) == {}, what="memory is as it was")


def store_process(namespace: str) -> psutil.Process:
    node = ray.get_runtime_context().get_node_id()
    name = f"store:{namespace}:{node}"
    actor = ray.get_actor(name, namespace=RAY_NAMESPACE)
    pid: Any = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    return psutil.Process(pid)


def memory(store: psutil.Process) -> dict[str, float]:
    """Bytes that the driver and the store have for themselves: not shared, as objects are."""
    processes = {"driver": psutil.Process(), "store": store}
    infos = {name: process.memory_info() for name, process in processes.items()}
    return {name: info.rss - info.shared for name, info in infos.items()}


def object_store_bytes() -> int:
    from ray._private.internal_api import node_stats

    (node,) = ray.nodes()
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False)
    return stats.store_stats.object_store_bytes_used


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, tuple[float, float]]:
    return {
        name: (before[name], after[name])
        for name in before
        if after[name] > SLACK * before[name] + (1 << 20)
    }
