"""The work of the data-plane figures. The same code runs on all contenders, in either interpreter.

Speeds are GB (10^9 bytes of columns) a second, as the caller sees them. Every function leaves its
contender as it found it.
"""

from __future__ import annotations

import pickle
import time
import uuid
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from benchmarks.crew import crew
from benchmarks.queues import Carrier, Memory, Queue

Kind = Literal["dense", "mixed"]
Speeds = dict[str, list[float]]

# Steps of a training are seconds apart. Ray frees what was cleared once a second, and memory that
# was never used before takes several times as long to be written.
REST_S = 1.2

WIDTH = 8192
ROW_BYTES = 9 * WIDTH * 4
_STACK: Any = NonTensorStack


def make(kind: Kind, rows: int) -> TensorDict:
    """``rows`` rows of nine fields.

    ``dense``: float32 (rows, 8192) each. ``mixed``: three such fields, three jagged ones of int64
    with 1 to 8192 numbers a row, three of texts with 1 to 8192 characters.
    """
    if kind == "dense":
        return TensorDict({f"dense{n}": _dense(n, rows) for n in range(9)}, batch_size=(rows,))
    columns: dict[str, Any] = {}
    for number in range(3):
        lengths = np.random.default_rng(number).integers(1, WIDTH, rows, endpoint=True).tolist()
        columns[f"dense{number}"] = _dense(number, rows)
        columns[f"jagged{number}"] = torch.nested.as_nested_tensor(
            [torch.arange(length) for length in lengths], layout=torch.jagged
        )
        columns[f"text{number}"] = _STACK(*[chr(97 + n % 26) * n for n in lengths])
    return TensorDict(columns, batch_size=(rows,))


def transfer(
    contender: Carrier, kind: Kind, rows: int, rounds: int, readers: int, node: int, views: bool
) -> Speeds:
    """Put a batch for each reader, let all readers read theirs at once, clear; ``rounds`` times.

    A first round is not counted, and a pause follows each. Readers are processes of their own. They
    read every byte, and what they read is compared with what was put.

    Args:
        node: where the readers are; the writer is on node 1.
        views: read once more, from a put of its own, without a copy; if the contender can.

    Returns:
        ``put``, ``get`` and, with ``views``, ``view``. Speeds of several readers are those of all
        together, from when the first one begins until the last one ends.
    """
    data = make(kind, rows)
    if isinstance(contender, Memory):
        return _copies(contender, data, rounds)
    speeds: Speeds = {"put": [], "get": [], "view": []}
    members = crew(contender, readers, node)
    ways = ("get", "view") if views and contender.has_views else ("get",)
    for number in range(rounds + 1):
        for way in ways:
            put, got = _round(contender, members, data, readers, way)
            time.sleep(REST_S)
            if number:
                speeds["put"].append(put)
                speeds[way].append(got)
    return speeds


def read(contender: Carrier, meta: Any, way: str) -> tuple[float, float, list[int]]:
    """A reader's part of :func:`transfer`: when it began and ended, and what it read."""
    start = time.monotonic()
    found = digest(contender.view(meta) if way == "view" else contender.read(meta))
    return start, time.monotonic(), found


def digest(rows: TensorDict) -> list[int]:
    """Bytes of all columns, and their sum as words of eight bytes; every byte is read."""
    nbytes = total = 0
    for name in rows.keys():  # noqa: SIM118  # iteration goes over rows
        column: Any = rows.get(name)
        if isinstance(column, torch.Tensor):
            plain = column.values() if column.is_nested else column
            words = plain.numpy().reshape(-1).view(np.uint64)
        else:
            text = "".join(column.tolist()).encode()
            words = np.frombuffer(text, np.uint8)
        nbytes += words.nbytes
        total += int(words.sum(dtype=np.uint64))
    return [nbytes, total % (1 << 64)]


def metadata_bytes(queue: Queue, rows: int, fields: int) -> dict[str, list[float]]:
    """The metadata of ``rows`` rows as a trainer holds it, pickled."""
    columns = {f"f{number}": torch.arange(rows) for number in range(fields)}
    partition = _new()
    queue.put(TensorDict(columns, batch_size=(rows,)), partition)
    meta = queue.claim(partition, list(columns), rows, "count")
    nbytes = len(pickle.dumps(meta))
    queue.clear_partition(partition)
    return {"bytes": [nbytes]}


def driver_growth(queue: Queue, rows: int, steps: int, warm_up: int = 10) -> dict[str, list[float]]:
    """MB a step by which this process grows while it puts, reads and clears a partition a step.

    Counts private memory; shared memory is the object store's.
    """
    before = 0.0
    for step in range(warm_up + steps):
        if step == warm_up:
            before = _private_mb()
        partition = _new()
        queue.read(queue.put(make("dense", rows), partition))
        queue.clear_partition(partition)
    return {"MB": [(_private_mb() - before) / steps]}


def _round(
    contender: Carrier, members: Any, data: TensorDict, readers: int, way: str
) -> tuple[float, float]:
    expected = digest(data)
    partition = _new()
    start = time.monotonic()
    metas = [contender.put(data, partition) for _ in range(readers)]
    put = time.monotonic() - start
    work = [(meta, way) for meta in metas]
    seen = members.apart("benchmarks.data_work.read", work)
    contender.clear_partition(partition)
    for _, _, found in seen:
        if found != expected:
            raise AssertionError(f"put {expected} (bytes, sum), read {found}")
    got = max(end for _, end, _ in seen) - min(start for start, _, _ in seen)
    gigabytes = readers * expected[0] / 1e9
    return gigabytes / put, gigabytes / got


def _copies(memory: Memory, data: TensorDict, rounds: int) -> Speeds:
    """Copies in one thread, as a queue's reader has one: into fresh memory, and into memory that
    was used before. A first round is not counted."""
    torch.set_num_threads(1)
    gigabytes = digest(data)[0] / 1e9
    speeds: Speeds = {"put": [], "get": [], "warm put": [], "warm get": []}
    again = memory.put(data, "")
    for number in range(rounds + 1):
        start = time.monotonic()
        copy = memory.put(data, "")
        copied = time.monotonic()
        digest(copy)
        read = time.monotonic()
        del copy
        from_here = time.monotonic()
        for name, column in data.items():
            again.get(name).copy_(column)
        warm = time.monotonic()
        digest(again)
        end = time.monotonic()
        seconds = {
            "put": copied - start,
            "get": read - start,
            "warm put": warm - from_here,
            "warm get": end - from_here,
        }
        for what, taken in seconds.items() if number else ():
            speeds[what].append(gigabytes / taken)
    return speeds


def _dense(seed: int, rows: int) -> torch.Tensor:
    row = torch.rand(WIDTH, generator=torch.Generator().manual_seed(seed))
    return row + torch.arange(rows)[:, None]


def _private_mb() -> float:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024 / 1e6
    raise LookupError("/proc/self/status has no RssAnon")


def _new() -> str:
    return f"p_{uuid.uuid4().hex[:12]}"
