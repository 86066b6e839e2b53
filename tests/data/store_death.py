"""The store of a node dies, and then the node: run by test_store_death.py.

``python -m tests.data.store_death URL NAMESPACE`` exits with 0 when every step was right.
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
from tq_redis.data.ray_stores import RAY_NAMESPACE

WIDTH = 1 << 15  # 128 KiB a row: blocks that lie in the object store
ROWS = 4
WITHIN = 1.5  # less than Ray needs to notice that a node is dead


def prompts() -> torch.Tensor:
    return torch.arange(2.0 * ROWS)[:, None].expand(-1, WIDTH)


def generate() -> list[int]:
    """A worker of the producing task: ``y`` is ten times ``x``."""
    client = tq.get_client()
    meta = client.get_meta(["x"], ROWS, "p", task_name="gen", timeout=60)
    client.put({"y": 10 * client.get_columns(meta)["x"]}, meta)
    return meta.global_indexes


class Steps:
    """A queue with two nodes; this process, the owner and reader, runs on the head."""

    def __init__(self, cluster: Any, far: Any, namespace: str) -> None:
        self.cluster = cluster
        self.far = far
        self.namespace = namespace
        self.home: str = ray.get_runtime_context().get_node_id()
        self.client = tq.get_client()

    def run(self) -> None:
        self.made = self.client.put({"x": prompts()}, partition_id="p")
        near, away = self.work_on(self.home), self.work_on(self.far.node_id)
        self.batch = self.client.get_meta(["x", "y"], 2 * ROWS, "p", task_name="train", timeout=60)
        self.right()

        # The store dies, its node lives: a new one is made there.
        self.kill_store(self.far.node_id)
        self.loses(away)
        assert self.client.get_columns(self.rows(near), ["y"])["y"].shape == (ROWS, WIDTH)
        assert self.work_on(self.far.node_id) == away
        self.right()

        # The node dies.
        self.cluster.remove_node(self.far, allow_graceful=False)
        self.loses(away)
        assert self.client.get_columns(self.rows(near), ["y"])["y"].shape == (ROWS, WIDTH)
        assert self.work_on(self.home) == away
        self.right()

        # The own store dies, with what no task can make again.
        self.kill_store(self.home)
        error = self.lost()
        assert error.rows == tuple(self.batch.global_indexes)
        assert "no task can write all of rows" in str(error)
        self.client.put({"x": prompts()}, self.made)
        assert sorted(self.work_on(self.home) + self.work_on(self.home)) == near + away
        self.right()

    def work_on(self, node: str) -> list[int]:
        """The samples that a worker on that node has made."""
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        work: Any = ray.remote(num_cpus=1)(generate)
        return ray.get(work.options(scheduling_strategy=there).remote(), timeout=90)

    def rows(self, ids: list[int]) -> tq.BatchMeta:
        positions = [self.batch.global_indexes.index(sample) for sample in ids]
        return self.batch.select_samples(positions)

    def kill_store(self, node: str) -> None:
        store = ray.get_actor(f"store:{self.namespace}:{node}", namespace=RAY_NAMESPACE)
        ray.kill(store)
        with contextlib.suppress(RayActorError):  # raised when it is dead, which takes a moment
            while True:
                ray.get(store.describe.remote(), timeout=30)

    def right(self) -> None:
        """The reader gets what its metadata says, right."""
        columns = self.client.get_columns(self.batch, timeout=60)
        assert torch.equal(columns["x"], prompts())
        assert torch.equal(columns["y"], 10 * prompts())

    def loses(self, ids: list[int]) -> None:
        """The reader is told that ``y`` of these rows is gone, and who makes it again."""
        error = self.lost()
        assert (error.partition, error.fields, error.rows) == ("p", ("y",), tuple(ids)), error
        assert f"task 'gen' can claim rows {ids} again" in str(error), error
        summary = self.client.get_summary("p")
        counters = ("produced:x", "produced:y", "consumed:gen")
        assert [summary[name] for name in counters] == [2 * ROWS, ROWS, ROWS], summary

    def lost(self) -> tq.DataLostError:
        """How a read of the batch fails. Before Ray has noticed a node's death it is the deadline,
        which resets nothing."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            started = time.monotonic()
            try:
                self.client.get_columns(self.batch, timeout=WITHIN)
            except tq.DataLostError as error:
                assert time.monotonic() - started < WITHIN + 1
                return error
            except tq.DeadlineError:
                assert time.monotonic() - started < WITHIN + 1
                assert self.client.get_summary("p")["produced:y"] == 2 * ROWS
        raise AssertionError("The loss was never noticed")


def main(url: str, namespace: str) -> None:
    with two_raylets(100 << 20) as (cluster, far):
        tq.init({"redis": {"url": url, "namespace": namespace}, "timeout_s": 60})
        Steps(cluster, far, namespace).run()
        tq.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
