"""A store dies with its blocks: the queue names what was lost, and it is made again."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_store_and_then_its_node_die(redis_url: str, namespace: str) -> None:
    """Two raylets on this host, in a process of their own; see store_death.py."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.data.store_death", redis_url, namespace],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
