"""The environment of the peer, transfer_queue 0.1.11: an interpreter of its own.

It gets the versions of Ray, torch and tensordict that the project pins for itself, so that the two
queues differ in nothing else. It cannot share the project's environment: its wheel brings top-level
packages called ``recipe`` and ``tests``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENVIRONMENT = ROOT / "benchmarks" / ".peer"
VERSION = "0.1.11"

_PROBE = "import importlib.metadata as m; print(m.version('TransferQueue'))"


def find_or_make(directory: Path = ENVIRONMENT) -> Path:
    """The interpreter of an environment that has the peer; made where there is none (a minute).

    Raises:
        FileExistsError: the directory is there, but holds no such environment.
        subprocess.CalledProcessError: pip could not install it; its output says why.
    """
    python = directory / "bin" / "python"
    if directory.exists():
        if not python.exists() or _version(python) != VERSION:
            raise FileExistsError(
                f"{directory} has no transfer_queue {VERSION}. Name another one, or remove it."
            )
        return python
    sys.stderr.write(f"Installing transfer_queue {VERSION} into {directory}\n")
    try:
        _make(directory, python)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return python


def _make(directory: Path, python: Path) -> None:
    venv.create(directory, with_pip=True)
    # As venv does by itself from Python 3.13 on.
    (directory / ".gitignore").write_text("*\n", encoding="utf-8")
    minor = sys.version_info.minor
    constraints = ROOT / "constraints" / f"py3{minor}.txt"
    install = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
    subprocess.run(
        [*install, "-c", constraints, f"TransferQueue=={VERSION}"],
        check=True,
        stdout=sys.stderr,
    )


def _version(python: Path) -> str:
    found = subprocess.run(
        [python, "-c", _PROBE], capture_output=True, text=True, check=False, timeout=60
    )
    return found.stdout.strip()
