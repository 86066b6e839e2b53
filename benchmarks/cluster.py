"""The Ray that a contender runs in: one node, or two on this machine."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import msgspec
import ray as untyped_ray
from ray.cluster_utils import Cluster

ray: Any = untyped_ray  # its own types are partial

_CPUS = 4


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
    try:
        if settings.nodes == 1:
            ray.init(address="local", _temp_dir=directory, **head, **driver)
        else:
            logging.getLogger("ray").setLevel(logging.ERROR)
            cluster = Cluster()
            cluster.add_node(temp_dir=directory, **head)
            for number in range(2, settings.nodes + 1):
                cluster.add_node(**_node(settings, number))
            ray.init(address=cluster.address, **driver)
            _require_first_node()
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


def _node(settings: RaySettings, number: int) -> dict[str, Any]:
    return {
        "num_cpus": _CPUS,
        "object_store_memory": settings.object_store_bytes,
        "resources": {place(number): 1_000},
    }


def place(node: int) -> str:
    """The resource that only this node has."""
    return f"place_{node}"
