"""Trainings with the queue and without it, number by number."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from recipe.ppo.records import Metrics, Records
from recipe.ppo.reports import METRICS
from recipe.v1.difference import Run, differences

PLAIN, QUEUE = "plain", "queue"

# Of a metric or a weight, in float32: what the order of a sum may change.
TOLERANCE = 1e-5

_SHOWN = {
    "score": "critic/score/mean",
    "advantage, largest": "critic/advantages/max",
    "loss": "actor/loss",
    "gradient norm": "actor/grad_norm",
    "value loss": "critic/vf_loss",
}
_STEP_TIME = "timing_s/step"
# Seconds and bytes differ from run to run.
_IGNORED = ("driver/", "critic/perf/")


@dataclass(frozen=True, slots=True)
class Training:
    """One of a pair.

    Attributes:
        run: its metrics.
        checkpoint: the folder of its last one.
        traffic: step -> bytes of tensors, and bytes of all, that passed through the driver.
    """

    run: Run
    checkpoint: Path
    traffic: Mapping[str, tuple[int, int]]


@dataclass(slots=True)
class Pair:
    """Trainings of one configuration, plain and with the queue, in turn."""

    name: str
    trainings: dict[str, list[Training]] = field(
        default_factory=lambda: {PLAIN: list[Training](), QUEUE: list[Training]()}
    )

    def add(self, kind: str, checkpoint: Path, traffic: Mapping[str, tuple[int, int]]) -> None:
        """A training that is over.

        Args:
            kind: ``plain`` or ``queue``.
            checkpoint: of its last step, in ``<output folder>/checkpoints``.
            traffic: as :class:`Training` has it.
        """
        records = Records(checkpoint.parents[1] / METRICS).read()
        steps = {int(record.pop("step")): record for record in records}
        kept = {
            step: {name: value for name, value in metrics.items() if not name.startswith(_IGNORED)}
            for step, metrics in steps.items()
        }
        self.trainings[kind].append(Training(Run(kind, kept), checkpoint, traffic))

    def steps(self, kind: str) -> list[Metrics]:
        """The records of the first training of a kind."""
        return [{"step": step, **record} for step, record in self._first(kind).run.steps.items()]

    def _first(self, kind: str) -> Training:
        return self.trainings[kind][0]

    @property
    def gaps(self) -> dict[str, float]:
        """metric -> the largest difference in any step of the first two trainings."""
        return differences(*[self._first(kind).run for kind in (PLAIN, QUEUE)])

    @property
    def weight_gap(self) -> float:
        """The largest difference of any weight after the last step."""
        return weight_gap(*[self._first(kind).checkpoint for kind in (PLAIN, QUEUE)])

    def step_time(self, kind: str) -> float:
        """Seconds: the median over all steps but the first of each training."""
        times = [time for training in self.trainings[kind] for time in training.run.step_times]
        return statistics.median(times)

    def traffic(self, kind: str) -> tuple[float, float]:
        """Bytes of tensors and of all, of the median training step."""
        steps = [
            size
            for training in self.trainings[kind]
            for name, size in training.traffic.items()
            if name.startswith("train_")
        ]
        return statistics.median(t for t, _ in steps), statistics.median(a for _, a in steps)


def weight_gap(one: Path, other: Path) -> float:
    """The largest difference of any weight in two checkpoints of verl's FSDP engine."""
    gap = 0.0
    for path in sorted(one.glob("*/model_world_size_*_rank_*.pt")):
        ours, theirs = _weights(path), _weights(other / path.relative_to(one))
        if ours.keys() != theirs.keys():
            return float("inf")
        gap = max(gap, *[(ours[n] - theirs[n]).abs().max().item() for n in ours if len(ours[n])])
    return gap


def _weights(path: Path) -> dict[str, torch.Tensor]:
    state: dict[str, Any] = torch.load(path, weights_only=False)
    return {
        name: getattr(weight, "_local_tensor", weight).float() for name, weight in state.items()
    }


def report(pairs: Sequence[Pair]) -> tuple[str, bool]:
    """Tables in Markdown, and whether all numbers are equal to rounding."""
    texts = [_text(pair) for pair in pairs]
    equal = all(
        gap <= TOLERANCE for pair in pairs for gap in (*pair.gaps.values(), pair.weight_gap)
    )
    return "\n\n".join(texts), equal


def _text(pair: Pair) -> str:
    gaps = pair.gaps
    unequal = {name: gap for name, gap in sorted(gaps.items()) if gap != 0}
    plain, queue = pair.step_time(PLAIN), pair.step_time(QUEUE)
    steps = len(pair.trainings[PLAIN][0].run.trained)
    lines = [
        f"### {pair.name}",
        "",
        (
            f"{steps} steps, {len(gaps)} metrics; {len(unequal)} of them differ. "
            f"Final weights differ by {pair.weight_gap:.3g} at most."
        ),
        "",
        *[f"- `{name}` by up to {gap:.3g}" for name, gap in unequal.items()],
        *([""] if unequal else []),
        *_table(pair),
        "",
        f"Median step: {plain:.3f} s plain, {queue:.3f} s through the queue "
        f"({queue / plain:.3f} x). Through the driver in a step: "
        + "; ".join(
            f"{kind}: {tensors:,.0f} bytes of tensors, {everything:,.0f} of all"
            for kind, (tensors, everything) in ((k, pair.traffic(k)) for k in (PLAIN, QUEUE))
        )
        + ".",
    ]
    return "\n".join(lines)


def _table(pair: Pair) -> list[str]:
    plain, queue = (pair.trainings[kind][0].run.steps for kind in (PLAIN, QUEUE))
    trained = pair.trainings[PLAIN][0].run.trained
    lines = ["| metric | step | plain | through the queue | difference |", "|---|---|---|---|---|"]
    for title, name in _SHOWN.items():
        for step in sorted({trained[0], trained[len(trained) // 2], trained[-1]}):
            if name in plain[step]:
                a, b = plain[step][name], queue[step][name]
                lines.append(f"| {title} | {step} | {a:.6f} | {b:.6f} | {abs(a - b):.1g} |")
    return lines
