"""A figure: series of measurements of both queues, their statistics, and the bar they have to meet.

One figure is one JSON line.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
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
        of: ``ratio``, a statistic of ours, or ``ratio to ...`` one of those beside.
    """

    of: str
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
        beside: the same work in other ways: their statistics, with the ``ratio`` to each.
        note: what a reader must know to understand the figure.
    """

    figure: str
    unit: str
    ours: dict[str, Any]
    transfer_queue: dict[str, Any] | None
    ratio: float | None
    bar: str | None
    holds: bool | None
    beside: dict[str, dict[str, Any]] = {}
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
    beside: Mapping[str, Series | str] | None = None,
    note: str = "",
) -> Figure:
    """A figure of series with the same repetitions.

    Args:
        theirs: a text says why there is no series; None: there is nothing to compare with.
        beside: further series, or texts.
    """
    statistics = summarise(ours)
    other, ratio = (None, None) if theirs is None else _compared(ours, theirs, better)
    others: dict[str, dict[str, Any]] = {}
    ratios = {"ratio": ratio}
    for contender, series in (beside or {}).items():
        found, its_ratio = _compared(ours, series, better)
        ratios[f"ratio to {contender}"] = its_ratio
        others[contender] = found if its_ratio is None else {**found, "ratio": its_ratio}
    verdicts = [bar.met({**statistics, **ratios}) for bar in bars]
    return Figure(
        figure=name,
        unit=unit,
        ours=statistics,
        transfer_queue=other,
        ratio=ratio,
        bar=", ".join(map(str, bars)) or None,
        holds=None if not verdicts or None in verdicts else all(verdicts),
        beside=others,
        note=note,
    )


def _compared(
    ours: Series, theirs: Series | str, better: str
) -> tuple[dict[str, Any], float | None]:
    if isinstance(theirs, str):
        return {"not_measured": theirs}, None
    return summarise(theirs), _ratio(ours, theirs, better)


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
