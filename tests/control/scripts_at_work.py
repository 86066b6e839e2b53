"""What scripts cost a server: its own CPU time, and the values that they touch.

Times on a busy machine say little about the code. So the values are what a test compares, and the
time is that of Redis's main thread on a CPU, not by the clock.
"""

from __future__ import annotations

import statistics
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import redis

from tests.control.state import Admin

T = TypeVar("T")


class CpuTimes:
    """Milliseconds on a CPU per script, by the kind of call that ran it.

    Args:
        admin: of a local server that nobody else uses.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin: Any = admin
        process = self._admin.info("server")["process_id"]
        # Nanoseconds that the main thread, which runs all scripts, has been on a CPU.
        self._clock = Path(f"/proc/{process}/schedstat")
        self._times: defaultdict[str, list[float]] = defaultdict(list)

    def of(self, kind: str, call: Callable[[], T]) -> T:
        """Run a call, and note what its scripts took on average."""
        scripts, start = self._scripts(), self._now()
        result = call()
        end = self._now()
        self._times[kind].append((end - start) / max(1, self._scripts() - scripts))
        return result

    def medians(self) -> dict[str, float]:
        """Of the calls of each kind."""
        return {kind: statistics.median(times) for kind, times in self._times.items()}

    def _now(self) -> float:
        return int(self._clock.read_text(encoding="ascii").split()[0]) / 1e6

    def _scripts(self) -> int:
        stats = self._admin.info("commandstats")
        found = (stats.get(f"cmdstat_{name}") for name in ("eval", "evalsha"))
        return sum(entry["calls"] for entry in found if entry)


def values_per_script(url: str, partition: str, call: Callable[[], object]) -> list[int]:
    """How many words the commands of each script have that a call runs on a partition."""
    end = uuid.uuid4().hex
    words: list[int] = []
    counts = False
    with redis.Redis.from_url(url) as admin, admin.monitor() as monitor:
        call()
        admin.echo(end)
        # Redis keeps what it has to tell until it is read.
        for event in cast(Iterator[dict[str, str]], monitor.listen()):
            command = event["command"]
            if event["client_type"] != "lua":
                # Others' scripts too: an owner renews its claim on the namespace now and then.
                counts = command.startswith("EVAL") and f"{{{partition}}}" in command
                words += [0] if counts else []
            elif counts:
                # A stored reply is one value, whose bytes may look like spaces.
                words[-1] += 1 if command.startswith("SET ") else command.count(" ") + 1
            if end in command:
                return [
                    count for count in words if count
                ]  # 0: the server had to be sent the script
    raise AssertionError("The server ended")
