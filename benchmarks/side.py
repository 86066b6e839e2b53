"""One queue in a process of its own, with a Ray of its own: ``python -m benchmarks.side NAME``.

Reads requests ``{"work": "module.function", "arguments": {...}}`` from its standard input, one JSON
a line, and answers each with ``{"result": ...}`` or ``{"error": "..."}``. Ends with its input.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import sys
import tempfile
import traceback
from typing import Any, TextIO

import msgspec

from benchmarks.queues import QUEUES, Queue


def main(name: str) -> None:
    """Start the queue, serve requests, end everything."""
    import ray

    # Whatever libraries print to the standard output must not stand among the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # A short path: Ray puts Unix sockets there, whose names may have 107 bytes.
    directory = tempfile.mkdtemp(prefix="tqb-")
    ray.init(
        address="local",
        num_cpus=8,
        object_store_memory=1 << 30,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=directory,
    )
    queue = QUEUES[name]()
    try:
        queue.start()
        serve(queue, sys.stdin, answers)
        queue.end()
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def serve(queue: Queue, requests: TextIO, answers: TextIO) -> None:
    """Answer every request until there are no more."""
    for line in requests:
        try:
            answer = {"result": _run(queue, msgspec.json.decode(line))}
        except Exception:  # noqa: BLE001  # the other process reports it
            answer = {"error": traceback.format_exc()}
        answers.write(msgspec.json.encode(answer).decode() + "\n")
        answers.flush()


def _run(queue: Queue, request: dict[str, Any]) -> Any:
    module, _, function = request["work"].rpartition(".")
    return getattr(importlib.import_module(module), function)(queue, **request["arguments"])


if __name__ == "__main__":
    main(sys.argv[1])
