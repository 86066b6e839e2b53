"""Further clients of a contender, each a Ray actor: processes as a trainer has them."""

from __future__ import annotations

import importlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import ray

from benchmarks.cluster import place
from benchmarks.queues import CONTENDERS, Carrier

# From the call to the moment when all members begin.
_LEAD_S = 0.2


class Member:
    """A client of the contender in a process of its own."""

    def __init__(self, name: str) -> None:
        self._contender = CONTENDERS[name]()
        self._contender.attach()

    def ready(self) -> None:
        """Returns when the member is attached."""

    def run(self, work: str, at: float, arguments: tuple[Any, ...]) -> Any:
        """What the function ``work`` gives, begun at a moment of ``time.monotonic``, the clock that
        all processes of a machine share."""
        module, _, function = work.rpartition(".")
        call = getattr(importlib.import_module(module), function)
        time.sleep(max(0.0, at - time.monotonic()))
        return call(self._contender, *arguments)


class Crew:
    """Clients that work at the same time."""

    def __init__(self, members: list[Any]) -> None:
        self._members = members

    def together(self, work: str, *arguments: Any) -> list[Any]:
        """What each member's ``work(contender, *arguments)`` returns."""
        return self.apart(work, [arguments] * len(self._members))

    def apart(self, work: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The same, with arguments of its own for each."""
        at = time.monotonic() + _LEAD_S
        pairs = zip(self._members, arguments, strict=True)
        return ray.get([member.run.remote(work, at, its) for member, its in pairs])

    def begin(self, work: str, *arguments: Any) -> Callable[[], Any]:
        """Let the first member work; the result waits for it."""
        pending = self._members[0].run.remote(work, 0.0, arguments)
        return lambda: ray.get(pending)


_members: dict[tuple[str, int], list[Any]] = defaultdict(list)


def crew(contender: Carrier, size: int, node: int = 1) -> Crew:
    """``size`` clients on a node; they stay, and are shared by all that asks for some."""
    kind = ray.remote(num_cpus=0, resources={place(node): 1})(Member)
    members = _members[contender.name, node]
    while len(members) < size:
        members.append(kind.remote(contender.name))
    ray.get([member.ready.remote() for member in members[:size]])
    return Crew(members[:size])
