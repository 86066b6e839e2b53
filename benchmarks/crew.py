"""Further clients of a queue, each a Ray actor: processes as a trainer has them."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import ray

from benchmarks.queues import QUEUES, Queue

# From the call to the moment when all members begin.
_LEAD_S = 0.2


class Member:
    """A client of the queue in a process of its own."""

    def __init__(self, name: str) -> None:
        self._queue = QUEUES[name]()
        self._queue.attach()

    def ready(self) -> None:
        """Returns when the member is attached."""

    def run(self, work: str, at: float, arguments: tuple[Any, ...]) -> Any:
        """What the function ``work`` gives, begun at a moment of ``time.monotonic``, the clock that
        all processes of a machine share."""
        module, _, function = work.rpartition(".")
        call = getattr(importlib.import_module(module), function)
        time.sleep(max(0.0, at - time.monotonic()))
        return call(self._queue, *arguments)


class Crew:
    """Clients that work at the same time."""

    def __init__(self, members: list[Any]) -> None:
        self._members = members

    def together(self, work: str, *arguments: Any) -> list[Any]:
        """What each member's ``work(queue, *arguments)`` returns."""
        at = time.monotonic() + _LEAD_S
        return ray.get([member.run.remote(work, at, arguments) for member in self._members])

    def begin(self, work: str, *arguments: Any) -> Callable[[], Any]:
        """Let the first member work; the result waits for it."""
        pending = self._members[0].run.remote(work, 0.0, arguments)
        return lambda: ray.get(pending)


_members: list[Any] = []


def crew(queue: Queue, size: int) -> Crew:
    """``size`` clients of the queue; they stay, and are shared by all that asks for some."""
    kind = ray.remote(num_cpus=0)(Member)
    while len(_members) < size:
        _members.append(kind.remote(queue.name))
    ray.get([member.ready.remote() for member in _members[:size]])
    return Crew(_members[:size])
