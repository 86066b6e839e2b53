"""The lines of a report as a table in Markdown: ``python -m benchmarks.table FILE``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from benchmarks.figures import Figure

_HEAD = (
    "figure",
    "unit",
    "tq_redis p50 (p99)",
    "transfer_queue p50 (p99)",
    "ratio",
    "bar",
    "holds",
)
_HOLDS = {True: "yes", False: "**no**", None: ""}


def table(lines: Iterable[str]) -> Iterator[str]:
    """Rows of a Markdown table, head first, of the lines that are figures."""
    figures = [
        msgspec.json.decode(line, type=Figure) for line in lines if line.startswith('{"figure"')
    ]
    others = list(dict.fromkeys(name for figure in figures for name in figure.beside))
    head = [*_HEAD, *(f"{name} p50 (ratio)" for name in others)]
    yield _row(head)
    yield _row(["---"] * len(head))
    for figure in figures:
        yield _row(
            [
                figure.figure,
                figure.unit,
                _statistics(figure.ours),
                _statistics(figure.transfer_queue or {}),
                "" if figure.ratio is None else f"{figure.ratio:g}",
                figure.bar or "",
                _HOLDS[figure.holds],
                *(_beside(figure.beside.get(name, {})) for name in others),
            ]
        )


def _statistics(found: dict[str, float]) -> str:
    if "p50" not in found:
        return ""
    if found["runs"] == 1:
        return _number(found["p50"])
    return f"{_number(found['p50'])} ({_number(found['p99'])})"


def _beside(found: dict[str, float]) -> str:
    return f"{_number(found['p50'])} ({found['ratio']:g})" if "p50" in found else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    for row in table(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()):
        sys.stdout.write(f"{row}\n")
