"""Runs tutorials, run by test_tutorials.py in a process of its own: with the package transfer_queue
that is installed, or with the drop-in.

::

python tutorials_at_work.py [--drop-in] PAGE...

Prints as JSON what the program of each page printed, block by block. One cluster serves all pages,
and one queue of transfer_queue, which takes seconds to start, those with default settings.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any


def run(page: Path) -> list[str]:
    """Run a page's program as a script would be, and return what each of its blocks printed."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed: list[str] = []
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    for number, block in enumerate(blocks, 1):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(block, f"{page.name}, block {number}", "exec"), names)
        printed.append(output.getvalue())
    return printed


def share_queue(tq: Any) -> None:
    """Let ``close`` only empty a queue with default settings, and ``init`` use it again."""
    start, stop = tq.init, tq.close
    shared = False

    def init(conf: Any = None) -> Any:
        nonlocal shared
        if shared and conf:
            stop()
        shared = not conf
        return start(conf)

    def close() -> None:
        if not shared:
            stop()
            return
        for partition in tq.get_client().get_partition_list():
            tq.get_client().clear_partition(partition)

    tq.init, tq.close = init, close


def main(arguments: list[str]) -> None:
    """Stop at the first page whose program fails; what the others printed is told all the same."""
    drop_in = arguments[0] == "--drop-in"
    if drop_in:
        from tq_redis.compat import install

        install()
        arguments = arguments[1:]
    import ray

    # A short path: Ray puts Unix sockets there, whose names may have 107 bytes.
    directory = tempfile.mkdtemp(prefix="tq-ray-")
    start: Any = ray.init  # its own types are partial
    start(
        address="local",
        num_cpus=4,
        object_store_memory=200 << 20,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=directory,
    )
    if not drop_in:
        import transfer_queue  # pyright: ignore[reportMissingImports]

        share_queue(transfer_queue)
    printed: dict[str, list[str]] = {}
    try:
        for name in arguments:
            printed[name] = run(Path(name))
    finally:
        sys.stdout.write(json.dumps(printed) + "\n")
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
