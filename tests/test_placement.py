"""On which nodes of a Ray cluster storage units run."""

from __future__ import annotations

import subprocess
import sys

import pytest
import redis

import tq_redis as tq
from tq_redis.session import is_initialized


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_units_over_two_nodes() -> None:
    """Two raylets on this host, in a process of their own; see placed_units.py."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.placed_units"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("ray_session")
def test_a_start_that_fails_leaves_the_namespace_to_others(redis_url: str, namespace: str) -> None:
    placement = {"resources": {"nowhere": 1}}
    with pytest.raises(tq.ConfigError, match=r"Only 0 of 1 storage units .*'nowhere': 1\.0"):
        tq.init(
            {
                "redis": {"url": redis_url, "namespace": namespace},
                "data": {"backend": "zmq", "units": 1, "placement": placement},
            }
        )
    assert not is_initialized()
    with redis.Redis.from_url(redis_url) as admin:
        assert admin.keys(f"tq:{namespace}:*") == []
