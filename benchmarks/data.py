"""Measure the data plane: ``python -m benchmarks.data``.

Prints a line that describes the machine, then one JSON line per figure: ours, transfer_queue's,
plain Ray's and that of a copy in memory, measured in turn in one run, each in processes of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.cluster import RaySettings
from benchmarks.data_work import ROW_BYTES
from benchmarks.figures import Bar, Figure, compare
from benchmarks.queues import Memory, PlainRay
from benchmarks.report import count
from benchmarks.sides import Measured, Sides

WORK = "benchmarks.data_work"
# Every large allocation is fresh memory of the kernel's: without it malloc would reuse its own.
_FRESH = {"MALLOC_MMAP_THRESHOLD_": "65536"}
_WARM = "warm memcpy"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        sizes: name of a size -> rows of 295 KB.
        rounds: of each repetition; fewer where a round is large.
    """

    repetitions: int
    rounds: int
    sizes: Mapping[str, int]
    readers: Sequence[int]
    steps: int


FULL = Effort(
    repetitions=5,
    rounds=8,
    sizes={"1 MB": 4, "75 MB": 256, "300 MB": 1024, "1 GB": 3392},
    readers=(1, 4),
    steps=50,
)
QUICK = Effort(repetitions=2, rounds=4, sizes={"75 MB": 256}, readers=(1,), steps=5)


def dense(sides: Sides, effort: Effort) -> Iterator[Figure]:
    """Nine fields of float32, of several sizes; one reader on the writer's node."""
    for size, rows in effort.sizes.items():
        measured = _transfer(sides, effort, "dense", rows, views=True)
        judged = rows == 256
        clone = Bar(f"ratio to {Memory.name}", ">=", 1)
        shape = f"{size}, dense, {rows} rows x 9 fields"
        yield _speed(
            f"put {shape}", measured, "put", [Bar("ratio", ">=", 4), clone] if judged else ()
        )
        yield _speed(
            f"get {shape}, private copy", measured, "get", [Bar("ratio", ">=", 4)] if judged else ()
        )
        yield _views(
            f"get {shape}, copy=False", measured, [Bar("ratio", ">=", 10)] if judged else ()
        )


def mixed(sides: Sides, effort: Effort) -> Iterator[Figure]:
    """Three fields dense, three jagged, three of texts."""
    measured = _transfer(sides, effort, "mixed", 256, without=(Memory.name,))
    for what in ("put", "get"):
        yield _speed(f"{what} mixed, 256 rows x 9 fields", measured, what, [Bar("ratio", ">=", 4)])


def readers(sides: Sides, effort: Effort) -> Iterator[Figure]:
    """Several readers at once, on the writer's node; all together."""
    yield from _readers(sides, effort, 1)


def nodes(sides: Sides, effort: Effort) -> Iterator[Figure]:
    """The same with the readers on a second node, which is a second Ray node on this machine."""
    yield from _readers(sides, effort, 2)


def metadata(sides: Sides, effort: Effort) -> Iterator[Figure]:
    """What a trainer holds, and whether it grows."""
    rows, fields = 1024, 9
    measured = sides.measure(
        f"{WORK}.metadata_bytes", 1, without=(PlainRay.name, Memory.name), rows=rows, fields=fields
    )
    yield compare(
        f"pickled BatchMeta of {rows} rows x {fields} fields",
        "bytes",
        *measured.series("bytes"),
        bars=[Bar("max", "<", 16 << 10)],
    )
    megabytes = 64
    growth = sides.ours.ask(
        f"{WORK}.driver_growth", rows=megabytes * 10**6 // ROW_BYTES, steps=effort.steps
    )
    yield compare(
        f"growth of the driver in a step of put {megabytes} MB, get and clear, "
        f"over {effort.steps} steps",
        "MB",
        [growth["MB"]],
        None,
        bars=[Bar("max", "<", 1)],
    )


def _readers(sides: Sides, effort: Effort, node: int) -> Iterator[Figure]:
    where = "on the writer's node" if node == 1 else "on another Ray node of this machine"
    note = "transfer_queue: storage units on each node in turn" if node == 2 else ""
    for number in effort.readers:
        measured = _transfer(
            sides, effort, "dense", 256, without=(Memory.name,), count=number, node=node, views=True
        )
        shape = f"75 MB each by {count(number, 'reader')} {where}"
        yield _speed(f"put for {shape}", measured, "put", note=note)
        yield _speed(f"get of {shape}, private copy", measured, "get", note=note)
        yield _views(f"get of {shape}, copy=False", measured)


def _transfer(
    sides: Sides,
    effort: Effort,
    kind: str,
    rows: int,
    *,
    without: Sequence[str] = (),
    count: int = 1,
    node: int = 1,
    views: bool = False,
) -> Measured:
    large = rows * count > 1024
    return sides.measure(
        f"{WORK}.transfer",
        effort.repetitions,
        without=without,
        kind=kind,
        rows=rows,
        rounds=max(1, effort.rounds // 4) if large else effort.rounds,
        readers=count,
        node=node,
        views=views,
    )


def _speed(
    name: str, measured: Measured, what: str, bars: Sequence[Bar] = (), note: str = ""
) -> Figure:
    return compare(
        name,
        "GB/s",
        *measured.series(what),
        better="higher",
        bars=bars,
        beside=_beside(measured, what),
        note=note,
    )


def _views(name: str, measured: Measured, bars: Sequence[Bar] = ()) -> Figure:
    return compare(
        name,
        "GB/s",
        measured.series("view")[0],
        measured.series("get")[1],
        better="higher",
        bars=bars,
        beside=_beside(measured, "get"),
        note="views are ours; the others' figures are those of their only way to read",
    )


def _beside(measured: Measured, what: str) -> dict[str, Any]:
    found = {PlainRay.name: measured.of(PlainRay.name, what)}
    clone = measured.of(Memory.name, what)
    if not isinstance(clone, str):
        found |= {Memory.name: clone, _WARM: measured.of(Memory.name, f"warm {what}")}
    return found


def _one_node(peer: Path | None) -> Sides:
    settings = RaySettings(object_store_bytes=4 * 10**9)
    return Sides(peer, guests=[PlainRay.name], others={Memory.name: _FRESH}, settings=settings)


def _two_nodes(peer: Path | None) -> Sides:
    settings = RaySettings(nodes=2, object_store_bytes=2 * 10**9)
    return Sides(peer, guests=[PlainRay.name], settings=settings)


STAGES: Sequence[tuple[report.Opener, Mapping[str, report.Group]]] = (
    (_one_node, {group.__name__: group for group in (dense, mixed, readers, metadata)}),
    (_two_nodes, {nodes.__name__: nodes}),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    report.main("data", "the data plane", STAGES, (FULL, QUICK), arguments)


if __name__ == "__main__":
    main()
