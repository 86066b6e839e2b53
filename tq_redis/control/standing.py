"""How a partition stands: counts per field and task, and who waits. Read only, for people."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from tq_redis.control.keys import decode
from tq_redis.control.limits import WhenFull
from tq_redis.control.plane import ControlPlane
from tq_redis.deadline import Deadline


class Waiter(msgspec.Struct, frozen=True):
    """A consumer that waits in ``get_meta``.

    Attributes:
        consumer: who it is.
        count: how many samples it waits for.
        fields: with these fields.
        waited_s: since how many seconds.
    """

    consumer: str
    count: int
    fields: list[str]
    waited_s: float


class TaskLimit(msgspec.Struct, frozen=True):
    """How many samples a task may leave unconsumed.

    Attributes:
        samples: so many.
        when_full: what a put does that brings more: ``wait``, or ``evict`` the oldest.
    """

    samples: int
    when_full: WhenFull


class TaskStanding(msgspec.Struct, frozen=True):
    """How far one task is.

    Attributes:
        consumed: samples that it has consumed.
        claimed: samples that consumers hold with a lease.
        set_aside: samples that were delivered too often and never acknowledged.
        ready: how many samples can be claimed now, per set of fields (joined by ``, ``) that a
            consumer has asked for.
        waiters: who waits, longest first.
        limit: how many samples it may leave unconsumed; None: as many as it likes.
        unconsumed: how many it has left, those included that it holds with a lease.
        evicted: samples that were cleared so far because it was at its limit.
    """

    consumed: int
    claimed: int
    set_aside: int
    ready: dict[str, int]
    waiters: list[Waiter]
    limit: TaskLimit | None
    unconsumed: int
    evicted: int


class Standing(msgspec.Struct, frozen=True):
    """How a partition stands.

    Attributes:
        samples: samples in it now.
        made: samples that were ever made in it.
        expected: how many will be made in all; None where nobody said.
        ended: no more will be made.
        nbytes: bytes in stores.
        produced: field -> samples that have it.
        tasks: task -> how far it is.
    """

    samples: int
    made: int
    expected: int | None
    ended: bool
    nbytes: int
    produced: dict[str, int]
    tasks: dict[str, TaskStanding]


class _Index(msgspec.Struct):
    task: str
    fields: list[str] | dict[str, str]  # Lua writes an empty list as {}


class _WaiterRecord(msgspec.Struct):
    task: str
    consumer: str
    count: int
    fields: str
    since: int
    ends: int


async def standing_of(control: ControlPlane, partition: str, deadline: Deadline) -> Standing:
    """How a partition stands.

    Raises:
        PartitionNotFoundError
    """
    summary = await control.summary(partition, deadline)
    indexes, waiters = await control.read(
        partition,
        ("HGETALL", control.keys.indexes(partition)),
        ("HGETALL", control.keys.waiters(partition)),
        deadline=deadline,
    )
    names = list(indexes)
    sizes = await control.read(
        partition,
        *(("ZCARD", control.keys.ready(partition, name.decode())) for name in names),
        deadline=deadline,
    )
    limits = _limits(summary)
    evicting = [task for task, limit in limits.items() if limit.when_full == "evict"]
    ready: dict[str, dict[str, int]] = {}
    for name, size in zip(names, sizes, strict=True):
        index = msgspec.json.decode(indexes[name], type=_Index)
        task, fields = decode(index.task), ", ".join(map(decode, index.fields))
        if fields or task not in evicting:  # else it lists what can be evicted
            ready.setdefault(task, {})[fields] = size
    waiting = _waiting(waiters, time.time() * 1000)
    counts = {name: value for name, value in summary.items() if isinstance(value, int)}
    tasks = sorted(ready.keys() | waiting.keys() | limits.keys())
    return Standing(
        samples=counts["samples"],
        made=counts.get("made", 0),
        expected=counts.get("expected"),
        ended="ended" in counts,
        nbytes=counts["bytes"],
        produced={
            name.removeprefix("produced:"): value
            for name, value in counts.items()
            if name.startswith("produced:")
        },
        tasks={
            task: TaskStanding(
                counts.get(f"consumed:{task}", 0),
                counts.get(f"claimed:{task}", 0),
                counts.get(f"set_aside:{task}", 0),
                ready.get(task, {}),
                waiting.get(task, []),
                limits.get(task),
                counts["samples"]
                - counts.get(f"consumed:{task}", 0)
                - counts.get(f"set_aside:{task}", 0),
                counts.get(f"evicted:{task}", 0),
            )
            for task in tasks
        },
    )


def _limits(summary: Mapping[str, int | str]) -> dict[str, TaskLimit]:
    text = summary.get("limits")
    found = msgspec.json.decode(text, type=dict[str, TaskLimit]) if isinstance(text, str) else {}
    return {decode(task): limit for task, limit in found.items()}


def _waiting(found: Mapping[bytes, bytes], now: float) -> dict[str, list[Waiter]]:
    """By task. A consumer that died while it waited is listed no longer than it would have."""
    records = [msgspec.json.decode(text, type=_WaiterRecord) for text in found.values()]
    waiting: dict[str, list[Waiter]] = {}
    for record in sorted(records, key=lambda record: record.since):
        if record.ends >= now:
            waiter = Waiter(
                decode(record.consumer),
                record.count,
                [decode(name) for name in record.fields.split("|") if name],
                max(0.0, now - record.since) / 1000,
            )
            waiting.setdefault(decode(record.task), []).append(waiter)
    return waiting
