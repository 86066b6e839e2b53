"""A figure: series of measurements of both queues, their statistics, and the bar they have to meet.

One figure is one JSON line.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

# One list a repetition.
Series = Sequence[Sequence[float]]

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure has to be: ``Bar("ratio", ">=", 10)``.

    Attributes:
        of: ``ratio``, or a statistic of ours.
    """

    of: Literal["ratio", "p50", "p99", "max"]
    comparison: Literal["<", "<=", ">="]
    value: float

    def __str__(self) -> str:
        return f"{self.of} {self.comparison} {self.value:g}"

    def met(self, statistics: dict[str, Any]) -> bool | None:
        """Whether the bar is met; None: what it is about was not measured."""
        value = statistics.get(self.of)
        return None if value is None else _OPERATORS[self.comparison](value, self.value)


class Figure(msgspec.Struct, omit_defaults=True):
    """One line of the report.

    Attributes:
        figure: what was measured.
        unit: of both sides' statistics.
        ours, transfer_queue: ``p50`` (the median of the repetitions' medians), ``p99`` and ``max``
            (of all measurements), ``runs`` (how many measurements), ``repetitions``; or why there
            are none.
        ratio: how many times better ours is, the median over the repetitions, each of which
            measured both sides one after the other.
        bar: what is asked for; ``holds`` whether it is so.
        note: what a reader must know to understand the figure.
    """

    figure: str
    unit: str
    ours: dict[str, Any]
    transfer_queue: dict[str, Any] | None
    ratio: float | None
    bar: str | None
    holds: bool | None
    note: str = ""

    def line(self) -> str:
        """The figure as one line of JSON."""
        return msgspec.json.encode(self).decode()


def compare(
    name: str,
    unit: str,
    ours: Series,
    theirs: Series | str | None,
    *,
    better: Literal["lower", "higher"] = "lower",
    bars: Sequence[Bar] = (),
    note: str = "",
) -> Figure:
    """A figure of two series with the same repetitions.

    Args:
        theirs: a text says why there is no series; None: there is nothing to compare with.
    """
    statistics = summarise(ours)
    other: dict[str, Any] | None = None
    ratio = None
    if isinstance(theirs, str):
        other = {"not_measured": theirs}
    elif theirs is not None:
        other = summarise(theirs)
        ratio = _ratio(ours, theirs, better)
    verdicts = [bar.met({**statistics, "ratio": ratio}) for bar in bars]
    return Figure(
        figure=name,
        unit=unit,
        ours=statistics,
        transfer_queue=other,
        ratio=ratio,
        bar=", ".join(map(str, bars)) or None,
        holds=None if not verdicts or None in verdicts else all(verdicts),
        note=note,
    )


def summarise(series: Series) -> dict[str, Any]:
    """The statistics of a series."""
    values = np.concatenate([np.asarray(repetition, float) for repetition in series])
    return {
        "p50": _shorten(_median(series)),
        "p99": _shorten(np.percentile(values, 99)),
        "max": _shorten(values.max()),
        "runs": values.size,
        "repetitions": len(series),
    }


def growth(small: Series, large: Series) -> Series:
    """How many times larger the medians of ``large`` are, repetition by repetition."""
    pairs = zip(small, large, strict=True)
    return [[float(np.median(after) / np.median(before))] for before, after in pairs]


def _median(series: Series) -> float:
    return float(np.median([np.median(repetition) for repetition in series]))


def _ratio(ours: Series, theirs: Series, better: str) -> float:
    pairs = zip(ours, theirs, strict=True)
    times = [np.median(their) / np.median(our) for our, their in pairs]
    return _shorten(np.median(times if better == "lower" else np.reciprocal(times)))


def _shorten(value: Any) -> float:
    """Three significant digits: more would be noise."""
    return float(f"{float(value):.3g}")
