"""Draw a run: ``python -m recipe.ppo.plot <output folder>``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as pyplot

from recipe.ppo.records import Metrics, Records

VAL_ACCURACY = "val-core/reasoning_gym/spell_backward/acc/mean@1"
TEST_ACCURACY = "test-core/reasoning_gym/spell_backward/acc/mean@1"


def draw(history: Sequence[Metrics], path: Path) -> None:
    """Reward and accuracy by step, as a PNG.

    Args:
        history: records of :class:`recipe.ppo.records.Records`.
        path: the PNG file to write.
    """
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    curves = {
        "reward (training words, sampled)": ("critic/score/mean", "-"),
        "accuracy (training words, sampled)": ("reward/acc/mean", "-"),
        "accuracy (tuning words, greedy)": (VAL_ACCURACY, "o-"),
        "accuracy (test words, greedy)": (TEST_ACCURACY, "D"),
    }
    for label, (metric, style) in curves.items():
        points = [(record["step"], record[metric]) for record in history if metric in record]
        if points:
            axes.plot(*_axes(points), style, label=label, markersize=5)
    axes.set(xlabel="step", ylabel="share", ylim=(0, 1), title="spell_backward")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _axes(points: Sequence[tuple[float, float]]) -> tuple[Any, Any]:
    steps, values = zip(*points, strict=True)
    return steps, values


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    draw(Records(folder / "metrics.jsonl").read(), folder / "accuracy.png")
