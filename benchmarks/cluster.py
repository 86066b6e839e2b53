"""The Ray that a contender runs in: one node, or two on this machine."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import ray as untyped_ray
from ray.cluster_utils import Cluster

ray: Any = untyped_ray  # its own types are partial

_CPUS = 4
# Ray begins to spill at 0.8.
_USED_BEFORE = 0.7
_BLOCK_BYTES = 64 << 20


class RaySettings(msgspec.Struct, frozen=True):
    """How large.

    Attributes:
        nodes: node 1 is that of the driver; every node has the resource ``place_<number>``.
        object_store_bytes: of each node; memory is taken when it is used.
    """

    nodes: int = 1
    object_store_bytes: int = 1 << 30


@contextmanager
def running(settings: RaySettings) -> Generator[None]:
    """A Ray of our own, with this process as its driver."""
    # A short path: Ray puts Unix sockets there, whose names may have 107 bytes.
    directory = tempfile.mkdtemp(prefix="tqb-")
    cluster: Any = None
    driver = {"log_to_driver": False, "logging_level": logging.ERROR}
    head = {**_node(settings, 1), "include_dashboard": False}
    # A cluster of several nodes writes its address where Ray keeps files by default, nowhere else.
    with patch.dict(os.environ, RAY_TMPDIR=directory):
        try:
            if settings.nodes == 1:
                ray.init(address="local", **head, **driver)
            else:
                logging.getLogger("ray").setLevel(logging.ERROR)
                cluster = Cluster()
                for number in range(1, settings.nodes + 1):
                    cluster.add_node(**(head if number == 1 else _node(settings, number)))
                ray.init(address=cluster.address, **driver)
                _require_first_node()
            _use_memory(settings)
            yield
        finally:
            ray.shutdown()
            if cluster is not None:
                cluster.shutdown()
            shutil.rmtree(directory, ignore_errors=True)


def _require_first_node() -> None:
    """Ray looks for a node of this machine, and there are several."""
    here = ray.get_runtime_context().get_node_id()
    (node,) = (node for node in ray.nodes() if node["NodeID"] == here)
    if place(1) not in node["Resources"]:
        raise RuntimeError(f"the driver joined another node than the first: {node['Resources']}")


def _use_memory(settings: RaySettings) -> None:
    """Write once to the memory of every object store, as the first steps of a training do.

    Memory that was never written takes three to five times as long to be written.
    """
    blocks = int(_USED_BEFORE * settings.object_store_bytes) // _BLOCK_BYTES
    _fill(blocks)
    for number in range(2, settings.nodes + 1):
        ray.get(ray.remote(_fill).options(num_cpus=0, resources={place(number): 1}).remote(blocks))


def _fill(blocks: int) -> None:
    block = np.ones(_BLOCK_BYTES, np.uint8)
    kept = [ray.put(block) for _ in range(blocks)]
    del kept


def _node(settings: RaySettings, number: int) -> dict[str, Any]:
    return {
        "num_cpus": _CPUS,
        "object_store_memory": settings.object_store_bytes,
        "resources": {place(number): 1_000},
    }


def place(node: int) -> str:
    """The resource that only this node has."""
    return f"place_{node}"
