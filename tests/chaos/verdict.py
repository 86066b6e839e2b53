"""Was every sample consumed exactly once? What consumers were told against what Redis knows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.control.state import Admin, Partition, TaskState
from tq_redis.control.ranges import from_ranges


class Journals:
    """All journals of a run.

    Attributes:
        lives: names of lives that began.
        killed: names of those that did not end by themselves.
        told: task -> sample -> (life, claim number) of every acknowledgement that was answered.
    """

    def __init__(self, folder: Path) -> None:
        self.lives: set[str] = set()
        ended: set[str] = set()
        self.told: dict[str, dict[int, list[tuple[str, int]]]] = {}
        for path in sorted(folder.iterdir()):
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                if "task" in entry:
                    told = self.told.setdefault(entry["task"], {})
                    for sample in from_ranges(entry["ids"]):
                        told.setdefault(sample, []).append((entry["life"], entry["claim"]))
                elif "end" in entry:
                    ended.add(entry["end"])
                else:
                    self.lives.add(entry["life"])
        self.killed = self.lives - ended


def check(admin: Admin, key: str, tasks: Iterable[str], samples: int, journals: Journals) -> None:
    """Fail with a sample's history unless every task consumed every sample exactly once.

    A sample is fine if Redis has it as consumed by the life and the claim that were told so, and by
    no other; or if nobody was told, and Redis has it as consumed by a life that was killed.
    """
    partition = Partition(admin, key)
    assert len(partition.ids) == samples
    for name in tasks:
        state = TaskState(admin, key, name)
        told = journals.told.get(name, {})
        for sample in partition.ids:
            record = state.records.get(sample, ["open", "0", ""])
            fault = _fault(record, told.get(int(sample), []), journals.killed)
            if fault:
                raise AssertionError(
                    f"Task {name!r}, sample {sample}: {fault}.\n"
                    f"{history(admin, key, name, int(sample), journals)}"
                )
        assert not state.claims
        assert not state.leases
    partition.check()


def _fault(record: list[str], told: list[tuple[str, int]], killed: set[str]) -> str | None:
    state, number, life = record
    if state != "consumed":
        return f"it is {state}"
    if len(told) > 1:
        return "it was acknowledged more than once"
    if told and told != [(life, int(number))]:
        return "Redis has it as consumed by another claim than was told"
    if not told and life not in killed:
        return f"{life} lives, but was not told that it consumed the sample"
    return None


def history(admin: Admin, key: str, task: str, sample: int, journals: Journals) -> str:
    """All that is known of a sample."""
    anyone: Any = admin
    told = journals.told.get(task, {}).get(sample, [])
    events = anyone.xrevrange(f"{key}:events", count=40)
    return "\n".join(
        (
            f"Redis's record: {anyone.hget(f'{key}:task:{task}', str(sample))}",
            f"deliveries: {anyone.hget(f'{key}:deliveries:{task}', str(sample))}",
            *(f"acknowledged by {life} under claim {claim}" for life, claim in told),
            f"killed: {sorted(journals.killed)}",
            "the latest events:",
            *(f"  {at} {words}" for at, words in reversed(events)),
        )
    )
