"""Measure the control plane: ``python -m benchmarks.control``.

Prints a line that describes the machine, then one JSON line per figure: ours and transfer_queue's,
measured in turn in one run. The two run in processes of their own, each with a Ray of its own;
transfer_queue's has an interpreter of its own, which is made when it is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import report
from benchmarks.figures import Bar, Figure, compare, growth
from benchmarks.report import count
from benchmarks.sides import Sides

WORK = "benchmarks.control_work"
REDIS_WORK = "benchmarks.redis_work"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    repetitions: int
    calls: int
    puts: int
    sizes: Sequence[int]
    large: int | None
    most_clients: int


FULL = Effort(
    repetitions=5,
    calls=12,
    puts=30,
    sizes=(1_000, 10_000, 50_000),
    large=1_000_000,
    most_clients=8,
)
QUICK = Effort(repetitions=2, calls=6, puts=8, sizes=(1_000, 50_000), large=None, most_clients=2)


def claim(sides: Sides, effort: Effort) -> Iterator[Figure]:
    """Claims of 64 rows from partitions of several sizes, and their clearing."""
    bars = {1_000: [Bar("ratio", ">=", 1.5)], 50_000: [Bar("ratio", ">=", 10)]}
    series: dict[int, Any] = {}
    for rows in effort.sizes:
        measured = sides.measure(f"{WORK}.life", effort.repetitions, rows=rows, claims=effort.calls)
        series[rows] = measured.series("claim")
        yield compare(f"claim 64 of {rows} rows", "ms", *series[rows], bars=bars.get(rows, ()))
        yield compare(
            f"first claim of a task, {rows} rows",
            "ms",
            *measured.series("first claim"),
            note="ours builds the task's ready index here, once",
        )
        if rows == 50_000:
            yield compare(
                f"clear of {rows} rows",
                "ms",
                *measured.series("clear"),
                bars=[Bar("ratio", ">=", 5)],
            )
    small, large = series[effort.sizes[0]], series[effort.sizes[-1]]
    peers = None if isinstance(small[1], str) or isinstance(large[1], str) else (small[1], large[1])
    yield compare(
        f"growth of a claim from {effort.sizes[0]} to {effort.sizes[-1]} rows",
        "times",
        growth(small[0], large[0]),
        growth(*peers) if peers else "left out",
        bars=[Bar("p50", "<=", 1.3)],
    )


def produce(sides: Sides, effort: Effort) -> Iterator[Figure]:
    """Rows produced per second, in large puts and in small ones."""
    shapes: tuple[tuple[int, int, int, Sequence[Bar]], ...] = (
        (1, 1024, 1, [Bar("ratio", ">=", 3)]),
        (1, 1024, 9, []),
        (effort.most_clients, 1024, 1, []),
        (2, 8, 1, [Bar("ratio", ">=", 3)]),
    )
    for clients, rows, fields, bars in shapes:
        measured = sides.measure(
            f"{WORK}.produce",
            effort.repetitions,
            clients=clients,
            puts=effort.puts * (4 if rows == 8 else 1),
            rows=rows,
            fields=fields,
        )
        shape = f"{count(clients, 'client')}, puts of {rows} rows x {count(fields, 'field')}"
        yield compare(
            f"rows produced, {shape}",
            "rows/s",
            *measured.series("rows/s"),
            better="higher",
            bars=bars,
        )
        yield compare(f"one put, {shape}", "ms", *measured.series("put"))


def wake(sides: Sides, effort: Effort) -> Iterator[Figure]:
    """From a put to the consumer that waits for it."""
    measured = sides.measure(f"{WORK}.wake", effort.repetitions, times=5 * effort.calls)
    note = "transfer_queue's consumer polls every millisecond; ours is woken by Redis"
    yield compare(
        "put -> waiting consumer has metadata", "ms", *measured.series("metadata"), note=note
    )
    yield compare(
        "put -> waiting consumer has data",
        "ms",
        *measured.series("data"),
        bars=[Bar("p50", "<", 5), Bar("p99", "<", 20)],
        note=note,
    )


def lists(sides: Sides, effort: Effort) -> Iterator[Figure]:
    """Listing keys and partitions, and changing tags."""
    keys, partitions = 100_000, 100
    measured = sides.measure(
        f"{WORK}.lists", effort.repetitions, keys=keys, partitions=partitions, calls=effort.calls
    )
    yield compare(f"first kv_list of {keys} keys with two tags", "ms", *measured.series("first"))
    yield compare(
        f"kv_list of {keys} keys, 100 of them changed",
        "ms",
        *measured.series("keys"),
        bars=[Bar("ratio", ">=", 1)],
    )
    yield compare("change of a tag of 100 keys", "ms", *measured.series("tags"))
    yield compare(f"list of {partitions + 1} partitions", "ms", *measured.series("partitions"))


def memory(sides: Sides, effort: Effort) -> Iterator[Figure]:
    """What a cell costs in Redis."""
    fields = 9
    repetitions = [
        sides.ours.ask(f"{REDIS_WORK}.bytes_per_cell", rows=20_480, fields=fields)
        for _ in range(effort.repetitions)
    ]
    for state in ("produced", "consumed"):
        yield compare(
            f"Redis memory per row and field, {fields} fields, {state}",
            "bytes",
            [repetition[state] for repetition in repetitions],
            None,
            bars=[Bar("max", "<", 150)],
        )


def million(sides: Sides, effort: Effort) -> Iterator[Figure]:
    """A partition of a million rows, and the longest script meanwhile; not in a quick run."""
    if effort.large is None:
        return
    rows = effort.large
    sides.ours.ask(f"{REDIS_WORK}.watch_scripts")
    measured = sides.measure(f"{WORK}.large_life", 1, rows=rows, calls=effort.calls)
    scripts = sides.ours.ask(f"{REDIS_WORK}.slow_scripts")
    for what in ("claim", "claim 256", "put 8", "clear 1024", "clear", "first claim", "fill"):
        yield compare(f"{what}, partition of {rows} rows", "ms", *measured.series(what))
    longest = max(scripts, key=lambda name: scripts[name][0])
    yield compare(
        f"longest script, partition of {rows} rows",
        "ms",
        [scripts[longest]],
        None,
        bars=[Bar("max", "<=", 10)],
        note=f"{longest}, of its runs of 0.5 ms or more. The longest of each verb: "
        + ", ".join(f"{name} {times[0]:.3g}" for name, times in sorted(scripts.items())),
    )


GROUPS = {group.__name__: group for group in (claim, produce, wake, lists, memory, million)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    report.main("control", "the control plane", [(Sides, GROUPS)], (FULL, QUICK), arguments)


if __name__ == "__main__":
    main()
