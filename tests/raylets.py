"""Two Ray nodes on this host, for programs that tests run in processes of their own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import ray
from ray.cluster_utils import Cluster

# A node that was killed is noticed after about three seconds, and not after fifteen.
_HEALTH_CHECKS = {"health_check_period_ms": 500, "health_check_failure_threshold": 6}


@contextmanager
def two_raylets(object_store_bytes: int, **far_more: Any) -> Generator[tuple[Any, Any]]:
    """The cluster and its second node; this process has joined the first one.

    Args:
        far_more: options of the second node alone, such as ``resources``.
    """
    directory = tempfile.mkdtemp(prefix="tq-ray-")
    options: dict[str, Any] = {"num_cpus": 1, "object_store_memory": object_store_bytes}
    head = {**options, "include_dashboard": False, "_system_config": _HEALTH_CHECKS}
    cluster: Any = Cluster()
    # The address of a cluster is written where Ray keeps files by default, and nowhere else.
    with patch.dict(os.environ, RAY_TMPDIR=directory):
        try:
            cluster.add_node(**head)
            far = cluster.add_node(**options, **far_more)
            ray.init(address=cluster.address, log_to_driver=False)
            yield cluster, far
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(directory, ignore_errors=True)
