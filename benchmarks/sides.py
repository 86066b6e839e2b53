"""The processes that hold the two queues, and how to have them do the same work in turn."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from benchmarks.figures import Series
from benchmarks.peer import ROOT

_SETTINGS = {
    "PYTHONPATH": str(ROOT),
    "PYTHONUNBUFFERED": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AUTH_MODE": "disabled",  # else Ray writes a token into the home directory
    "RAY_USAGE_STATS_ENABLED": "0",
    "TQ_LOGGING_LEVEL": "ERROR",
}
_END_S = 60.0
REQUEST_S = 600.0


class SideError(RuntimeError):
    """A side failed, or did not answer in time; the message says how."""


class Side:
    """A queue in a process of its own.

    Args:
        name: of the queue.
        python: the interpreter that has it.
    """

    def __init__(self, name: str, python: Path | str = sys.executable) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.side", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, **_SETTINGS},
        )

    def ask(self, work: str, **arguments: Any) -> Any:
        """What ``work`` returns; called with the queue and the arguments.

        Raises:
            SideError: it failed, or took longer than ten minutes. A side that is late is ended.
        """
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        try:
            requests.write(msgspec.json.encode({"work": work, "arguments": arguments}) + b"\n")
            requests.flush()
        except BrokenPipeError as error:
            raise SideError(f"{self.name} has ended; its messages are above") from error
        if not select.select([answers], [], [], REQUEST_S)[0]:
            self._process.terminate()
            raise SideError(f"{self.name} did not answer {work} within {REQUEST_S:g} s")
        line = answers.readline()
        if not line:
            raise SideError(f"{self.name} ended during {work}; its messages are above")
        answer = msgspec.json.decode(line)
        if "error" in answer:
            raise SideError(f"{self.name} failed in {work}:\n{answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """End the process and all that it started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class Pair:
    """Ours and, unless it is left out, the peer.

    Attributes:
        ours: our side.
        peer: the other one.
        absent: why there is no other one.
    """

    def __init__(self, peer: Path | None, absent: str = "left out") -> None:
        self.ours = Side("tq_redis")
        self.absent = absent
        try:
            self.peer = None if peer is None else Side("transfer_queue", peer)
        except BaseException:
            self.ours.close()
            raise

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ours.close()
        if self.peer is not None:
            self.peer.close()

    def measure(self, work: str, repetitions: int, **arguments: Any) -> Measured:
        """Let both do the work ``repetitions`` times, one after the other.

        Args:
            work: a function that returns series by name.

        Raises:
            SideError: ours failed. Where the peer fails, its series are the reason.
        """
        measured = Measured(self.absent)
        for _ in range(repetitions):
            measured.ours.append(self.ours.ask(work, **arguments))
            if self.peer is None or measured.failure:
                continue
            try:
                measured.theirs.append(self.peer.ask(work, **arguments))
            except SideError as error:
                sys.stderr.write(f"{error}\n")
                measured.failure = str(error).strip().splitlines()[-1]
        return measured


class Measured:
    """What the repetitions of one piece of work gave: series by name."""

    def __init__(self, absent: str) -> None:
        self.ours: list[dict[str, list[float]]] = []
        self.theirs: list[dict[str, list[float]]] = []
        self.failure = ""
        self._absent = absent

    def series(self, name: str) -> tuple[Series, Series | str]:
        """Our series, and the peer's or the reason why there is none."""
        ours = [repetition[name] for repetition in self.ours]
        if self.failure or not self.theirs:
            return ours, self.failure or self._absent
        return ours, [repetition[name] for repetition in self.theirs]
