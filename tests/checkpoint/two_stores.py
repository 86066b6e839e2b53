"""A queue with a store on each of two nodes is saved: run by test_elsewhere.py.

``python -m tests.checkpoint.two_stores URL NAMESPACE FOLDER``
"""

from __future__ import annotations

import sys
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import tq_redis
from tests.raylets import two_raylets


def put(partition: str, value: float) -> None:
    tq_redis.get_client().put({"x": torch.full((64, 1 << 14), value)}, partition_id=partition)


def main(url: str, namespace: str, folder: str) -> None:
    with two_raylets(100 << 20) as (_, far):
        tq_redis.init({"redis": {"url": url, "namespace": namespace}, "timeout_s": 60})
        put("near", 1.0)
        there = NodeAffinitySchedulingStrategy(far.node_id, soft=False)
        far_put: Any = ray.remote(num_cpus=1)(put)
        ray.get(far_put.options(scheduling_strategy=there).remote("far", 2.0))
        tq_redis.save_checkpoint(folder, metadata={"stores": 2})
        tq_redis.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
