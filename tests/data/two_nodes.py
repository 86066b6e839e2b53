"""A producer and its store on one node, the reader on another: run by test_ray_store.py.

``python -m tests.data.two_nodes`` exits with 0 when every step was right.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tests.data.runs import all_rows
from tests.data.units import closing, open_plane
from tests.raylets import two_raylets
from tq_redis.config import Config, RedisConfig
from tq_redis.data.base import Column, WrittenBlock
from tq_redis.deadline import Deadline
from tq_redis.errors import DataLostError, DeadlineError

CONFIG = Config(redis=RedisConfig(namespace="two-nodes"))


def columns() -> dict[str, Column]:
    return {
        f"x{number}": torch.arange(number, number + (1 << 20), dtype=torch.float32).view(64, -1)
        for number in range(9)
    }


class _Producer:
    def put(self) -> list[WrittenBlock]:
        async def put() -> list[WrittenBlock]:
            async with closing(open_plane(CONFIG)) as plane:
                return await plane.put("p", columns(), Deadline(30))

        return asyncio.run(put())


Producer: Any = ray.remote(num_cpus=0)(_Producer)


async def read(blocks: list[WrittenBlock]) -> None:
    async with closing(open_plane(CONFIG)) as plane:
        got = await plane.get(all_rows(blocks), Deadline(30))
    for field, column in columns().items():
        assert torch.equal(got[field], column)  # type: ignore[arg-type]


async def steps(cluster: Any, far: Any) -> None:
    def producer() -> Any:
        there = NodeAffinitySchedulingStrategy(far.node_id, soft=False)
        return Producer.options(scheduling_strategy=there).remote()

    # A reader on another node.
    alive = producer()
    blocks = await alive.put.remote()
    assert all(block.handle.startswith(f"ray/{far.node_id}") for block in blocks)
    await read(blocks)
    async with closing(open_plane(CONFIG)) as plane:
        await plane.delete([block.handle for block in blocks], Deadline(30))

    # The producer has died.
    dead = producer()
    blocks = await dead.put.remote()
    ray.kill(dead)
    await read(blocks)
    await read(blocks)

    # The producer dies while the reader pulls.
    dies = producer()
    blocks = await dies.put.remote()
    reading = asyncio.create_task(read(blocks))
    await asyncio.sleep(0.02)  # the pull has begun or not: it must be right both ways
    ray.kill(dies)
    await reading

    # The store's node dies.
    cluster.remove_node(far, allow_graceful=False)
    await fails(blocks, within=1.5)


async def fails(blocks: list[WrittenBlock], within: float) -> None:
    """Before Ray has noticed the node's death it is the deadline, afterwards the lost data."""
    kinds: list[type[Exception]] = []
    end = time.monotonic() + 40
    while DataLostError not in kinds and time.monotonic() < end:
        started = time.monotonic()
        try:
            async with closing(open_plane(CONFIG)) as plane:
                await plane.get(all_rows(blocks), Deadline(within))
        except (DataLostError, DeadlineError) as error:
            kinds.append(type(error))
        assert time.monotonic() - started < within + 1
    assert kinds[-1] is DataLostError, kinds


def main() -> None:
    with two_raylets(200 << 20) as (cluster, far):
        asyncio.run(steps(cluster, far))


if __name__ == "__main__":
    main()
