"""Parsers that units under test offer. The column ``at`` has the path of a file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

NAMES = ("load", "fail", "shorten", "wait", "exit", "count")
OPTIONS = [word for name in NAMES for word in ("--parser", f"{name}=tests.data.offered:{name}_")]
PATHS = {name: f"tests.data.offered:{name}_" for name in NAMES}


def load_(columns: dict[str, Any]) -> dict[str, Any]:
    """Sizes of files, and where this runs."""
    sizes = [Path(path).stat().st_size for path in columns["at"]]
    return {**columns, "at": np.array(sizes), "pid": [os.getpid()] * len(sizes)}


def fail_(columns: dict[str, Any]) -> dict[str, Any]:
    raise ValueError(f"no image at {columns['at'][0]}")


def shorten_(columns: dict[str, Any]) -> dict[str, Any]:
    return {name: column[1:] for name, column in columns.items()}


_calls = torch.zeros(1, 8)


def count_(columns: dict[str, Any]) -> dict[str, Any]:
    """The same memory each time."""
    return {"at": _calls.add_(1)}


def exit_(columns: dict[str, Any]) -> dict[str, Any]:
    raise SystemExit(3)


def wait_(columns: dict[str, Any]) -> dict[str, Any]:
    """Notes in one file that it has begun, ends when there is another one, and makes 1,000 bytes a
    row."""
    at = Path(columns["at"][0])
    with at.open("a") as file:
        file.write("began\n")
    end = time.monotonic() + 60
    while not at.with_suffix(".go").exists() and time.monotonic() < end:
        time.sleep(0.01)
    at.with_suffix(".done").touch()
    return {name: torch.ones(len(column), 1000).byte() for name, column in columns.items()}
