"""One contender in a process of its own, with a Ray of its own:
``python -m benchmarks.side NAME SETTINGS``.

Reads requests ``{"work": "module.function", "contender": NAME, "arguments": {...}}`` from its
standard input, one JSON a line, and answers each with ``{"result": ...}`` or ``{"error": "..."}``.
Ends with its input. Contenders that need no start can be guests of another one's process.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from contextlib import nullcontext
from typing import Any, TextIO

import msgspec

from benchmarks.cluster import RaySettings, running
from benchmarks.queues import CONTENDERS, Carrier


def main(name: str, settings: str) -> None:
    """Start the contender, serve requests, end everything."""
    # Whatever libraries print to the standard output must not stand among the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    contender = CONTENDERS[name]()
    contenders = {name: contender}
    size = msgspec.json.decode(settings, type=RaySettings)
    with running(size) if contender.needs_ray else nullcontext():
        contender.start()
        serve(contenders, sys.stdin, answers)
        contender.end()


def serve(contenders: dict[str, Carrier], requests: TextIO, answers: TextIO) -> None:
    """Answer every request until there are no more."""
    for line in requests:
        try:
            answer = {"result": _run(contenders, msgspec.json.decode(line))}
        except Exception:  # noqa: BLE001  # the other process reports it
            answer = {"error": traceback.format_exc()}
        answers.write(msgspec.json.encode(answer).decode() + "\n")
        answers.flush()


def _run(contenders: dict[str, Carrier], request: dict[str, Any]) -> Any:
    name = request["contender"]
    if name not in contenders:
        contenders[name] = CONTENDERS[name]()
    module, _, function = request["work"].rpartition(".")
    return getattr(importlib.import_module(module), function)(
        contenders[name], **request["arguments"]
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
