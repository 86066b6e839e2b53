"""A producer dies during a put, after it, or while another node reads: right data or an error."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_producers_die_at_any_moment(redis_url: str, namespace: str) -> None:
    """Two raylets on this host, in a process of their own; see producer_death.py."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.data.producer_death", redis_url, namespace],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
