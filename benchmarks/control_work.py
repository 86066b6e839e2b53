"""The work of the control-plane figures. The same code runs on both queues, in either interpreter.

Every function leaves the queue as it found it. Times are milliseconds as the caller sees them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.crew import crew
from benchmarks.queues import Queue

CLAIM = 64
ROWS_PER_PUT = 2048
KEYS_PER_PUT = 1000

Times = dict[str, list[float]]


def rows_of(count: int, fields: int = 1) -> TensorDict:
    """Rows with as little data as can be: one number a field."""
    columns = {f"f{number}": torch.arange(count) for number in range(fields)}
    return TensorDict(columns, batch_size=(count,))


def milliseconds(call: Callable[..., Any], *arguments: Any) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call(*arguments)
    return 1000 * (time.perf_counter() - start)


def fill(queue: Queue, partition: str, count: int, fields: int = 1) -> None:
    """Put ``count`` rows."""
    for first in range(0, count, ROWS_PER_PUT):
        queue.put(rows_of(min(ROWS_PER_PUT, count - first), fields), partition)


def life(queue: Queue, rows: int, claims: int) -> Times:
    """A partition from its first put to its end, with one field and one task.

    transfer_queue: ``get_meta`` in fetch mode looks at the status of every row of the partition, in
    the controller; ``clear_partition`` asks the controller for the rows, tells the storage units to
    drop them, and then the controller.
    """
    partition = _new()
    fill(queue, partition, rows)
    first = milliseconds(_first_claim, queue, partition)
    times = [milliseconds(_claim, queue, partition, CLAIM) for _ in range(claims)]
    clear = milliseconds(queue.clear_partition, partition)
    return {"first claim": [first], "claim": times, "clear": [clear]}


def large_life(queue: Queue, rows: int, calls: int) -> Times:
    """The same with everything else that happens to a partition while it is large."""
    partition = _new()
    times: Times = {"fill": [milliseconds(fill, queue, partition, rows)]}
    times["first claim"] = [milliseconds(_first_claim, queue, partition)]
    times["claim"] = [milliseconds(_claim, queue, partition, CLAIM) for _ in range(calls)]
    times["claim 256"] = [milliseconds(_claim, queue, partition, 256) for _ in range(calls)]
    times["put 8"] = [milliseconds(queue.put, rows_of(8), partition) for _ in range(calls)]
    meta = queue.claim(partition, ["f0"], 1024, "claim")
    times["clear 1024"] = [milliseconds(queue.clear_samples, meta)]
    times["clear"] = [milliseconds(queue.clear_partition, partition)]
    return times


def produce(queue: Queue, clients: int, puts: int, rows: int, fields: int) -> Times:
    """``clients`` processes put at the same time, ``puts`` times ``rows`` rows each.

    transfer_queue: ``put`` asks the controller for indexes, sends the columns to the storage units,
    row by row, and tells the controller.
    """
    partition = _new()
    spans = crew(queue, clients).together(
        "benchmarks.control_work.put_rows", partition, puts, rows, fields
    )
    queue.clear_partition(partition)
    wall = max(span[-1] for span in spans) - min(span[0] for span in spans)
    return {
        "rows/s": [clients * puts * rows / wall],
        "put": [1000 * (end - start) for span in spans for start, end in pairwise(span)],
    }


def put_rows(queue: Queue, partition: str, puts: int, rows: int, fields: int) -> list[float]:
    """One client's part of :func:`produce`: when it began, and when each put ended."""
    data = rows_of(rows, fields)
    moments = [time.monotonic()]
    for _ in range(puts):
        queue.put(data, partition)
        moments.append(time.monotonic())
    return moments


def wake(queue: Queue, times: int, pause_s: float = 0.03) -> Times:
    """From the start of a put of eight rows to a consumer in another process that waits for them:
    when it has the metadata, and when it has the columns.

    transfer_queue: the consumer asks again every millisecond (``queues.POLL_S``).
    """
    partition = _new()
    data = rows_of(8)
    queue.put(data, partition)
    arrivals = crew(queue, 1).begin("benchmarks.control_work.consume", partition, times + 1)
    starts: list[float] = []
    for _ in range(times):
        time.sleep(pause_s)  # the consumer waits again
        starts.append(time.monotonic())
        queue.put(data, partition)
    arrived = arrivals()[1:]
    queue.clear_partition(partition)
    return {
        "metadata": [1000 * (seen[0] - start) for start, seen in zip(starts, arrived, strict=True)],
        "data": [1000 * (seen[1] - start) for start, seen in zip(starts, arrived, strict=True)],
    }


def consume(queue: Queue, partition: str, times: int) -> list[tuple[float, float]]:
    """The consumer of :func:`wake`: when it had the metadata and the columns of each batch."""
    moments: list[tuple[float, float]] = []
    for _ in range(times):
        meta = queue.wait_for(partition, ["f0"], 8, "consume")
        seen = time.monotonic()
        queue.read(meta)
        moments.append((seen, time.monotonic()))
    return moments


def lists(queue: Queue, keys: int, partitions: int, calls: int) -> Times:
    """``kv_list`` of ``keys`` keys with two tags, the first one and those after a change of a tag
    of 100 of them, and the list of all partitions, of which there are ``partitions`` more."""
    partition = _new()
    names = [f"key_{number}" for number in range(keys)]
    for first in range(0, keys, KEYS_PER_PUT):
        part = names[first : first + KEYS_PER_PUT]
        tags = [{"status": "done", "length": number} for number in range(len(part))]
        queue.put_keys(part, partition, rows_of(len(part)), tags)
    others = [_new() for _ in range(partitions)]
    for other in others:
        queue.put(rows_of(1), other)
    times: Times = {"first": [milliseconds(queue.keys, partition)], "tags": [], "keys": []}
    _require(set(queue.partitions()) >= {partition, *others}, "every partition is listed")
    for number in range(calls):
        change = [{"status": number}] * 100
        times["tags"].append(milliseconds(queue.put_keys, names[:100], partition, None, change))
        times["keys"].append(milliseconds(queue.keys, partition))
    listed = queue.keys(partition)
    _require(len(listed) == keys, "kv_list has every key")
    _require(listed[names[0]]["status"] == calls - 1, "kv_list has the last tags")
    times["partitions"] = [milliseconds(queue.partitions) for _ in range(calls)]
    for name in [partition, *others]:
        queue.clear_partition(name)
    return times


def _first_claim(queue: Queue, partition: str) -> None:
    # As a consumer that waits: ours gives up a claim at once after five seconds of indexing.
    queue.wait_for(partition, ["f0"], CLAIM, "claim")


def _claim(queue: Queue, partition: str, count: int) -> None:
    meta = queue.claim(partition, ["f0"], count, "claim")
    _require(meta.size == count, f"a claim of {count} gives {meta.size} rows")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def _new() -> str:
    return f"p_{uuid.uuid4().hex[:12]}"
