"""The processes that hold the contenders, and how to have them do the same work in turn."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from benchmarks.cluster import RaySettings
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
PEER = "transfer_queue"


class SideError(RuntimeError):
    """A side failed, or did not answer in time; the message says how."""


class Side:
    """A contender in a process of its own.

    Args:
        name: of the contender.
        python: the interpreter that has it.
        settings: of its Ray.
        environment: variables of the process, besides those of this one.

    Attributes:
        versions: of what it runs on, once it has said so.
    """

    def __init__(
        self,
        name: str,
        python: Path | str = sys.executable,
        settings: RaySettings | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.versions: dict[str, str] = {}
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.side", name, msgspec.json.encode(settings or RaySettings())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, **_SETTINGS, **(environment or {})},
        )

    def ask(self, work: str, /, *, guest: str = "", **arguments: Any) -> Any:
        """What ``work`` returns; called with the contender, or its guest, and the arguments.

        Raises:
            SideError: it failed, or took longer than ten minutes. A side that is late is ended.
        """
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        try:
            request = {"work": work, "contender": guest or self.name, "arguments": arguments}
            requests.write(msgspec.json.encode(request) + b"\n")
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


class Sides:
    """Ours, the peer unless it is left out, and others.

    Args:
        peer: the peer's interpreter; None: it is left out.
        guests: names of contenders that work in our process.
        others: names of further contenders, with what their environment has besides.
        settings: of each one's Ray.

    Attributes:
        ours: our side.
        peer: the other queue.
    """

    def __init__(
        self,
        peer: Path | None,
        *,
        guests: Sequence[str] = (),
        others: Mapping[str, Mapping[str, str]] | None = None,
        settings: RaySettings | None = None,
    ) -> None:
        self._sides: dict[str, Side] = {}
        try:
            self.ours = self._add(Side("tq_redis", settings=settings))
            self.peer = None if peer is None else self._add(Side(PEER, peer, settings))
            self._sides |= dict.fromkeys(guests, self.ours)
            for name, environment in (others or {}).items():
                self._add(Side(name, settings=settings, environment=environment))
        except BaseException:
            self.close()
            raise

    def _add(self, side: Side) -> Side:
        self._sides[side.name] = side
        # One after the other: several that start at once can be too slow for Ray.
        side.versions = side.ask("benchmarks.machine.versions")
        return side

    def __enter__(self) -> Sides:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all."""
        for side in set(self._sides.values()):
            side.close()

    def measure(
        self, work: str, repetitions: int, *, without: Sequence[str] = (), **arguments: Any
    ) -> Measured:
        """Let all do the work ``repetitions`` times, one after the other.

        Args:
            work: a function that returns series by name.
            without: contenders that do not take part.

        Raises:
            SideError: ours failed. Where another one fails, its series are the reason.
        """
        measured = Measured()
        for _ in range(repetitions):
            for name, side in self._sides.items():
                if name in without or name in measured.failures:
                    continue
                try:
                    measured.add(name, side.ask(work, guest=name, **arguments))
                except SideError as error:
                    if name == self.ours.name:
                        raise
                    sys.stderr.write(f"{error}\n")
                    measured.failures[name] = str(error).strip().splitlines()[-1]
        return measured


class Measured:
    """What the repetitions of one piece of work gave: series by name.

    Attributes:
        failures: contender -> why it has no series.
    """

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}
        self._found: dict[str, list[dict[str, list[float]]]] = {}

    def add(self, contender: str, found: dict[str, list[float]]) -> None:
        """One repetition of one contender."""
        self._found.setdefault(contender, []).append(found)

    def series(self, name: str) -> tuple[Series, Series | str]:
        """Our series, and the peer's or the reason why there is none."""
        ours = self.of("tq_redis", name)
        assert not isinstance(ours, str)
        return ours, self.of(PEER, name)

    def of(self, contender: str, name: str) -> Series | str:
        """A contender's series, or the reason why there is none."""
        if contender in self.failures or contender not in self._found:
            return self.failures.get(contender, "left out")
        return [repetition[name] for repetition in self._found[contender]]
