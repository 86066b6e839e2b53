"""The machine and the versions that a report was made with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.queues import Queue

_PACKAGES = ("ray", "torch", "tensordict", "numpy", "redis", "TransferQueue")


def machine() -> dict[str, Any]:
    """Processor, cores, memory, system, and how busy it is."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def versions(_queue: Queue) -> dict[str, str]:
    """Versions of what a side runs on."""
    found: dict[str, str] = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
