"""64 clients, 100,000 samples, three tasks: ``kill -9`` and cancelled calls lose nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_sample_is_consumed_exactly_once() -> None:
    """In a process of its own, which forks the clients' processes before it has any thread."""
    command = [sys.executable, "-m", "tests.chaos.soak", "--seed", "7"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100000 samples x 3 tasks" in done.stdout
