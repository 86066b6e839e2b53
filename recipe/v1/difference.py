"""Two trainings, number by number."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

# Seconds and bytes differ from run to run on any machine.
_MEASURED = ("timing_", "perf/", "actor/perf/")
_STEP_TIME = "timing_s/step"
_SHOWN = {
    "reward": "critic/score/mean",
    "gradient norm": "actor/grad_norm",
    "entropy": "actor/entropy",
}


@dataclass(frozen=True, slots=True)
class Run:
    """The metrics of one training.

    Attributes:
        name: of the queue that it ran on.
        steps: step -> metric -> number; step 0 is the validation before training.
    """

    name: str
    steps: dict[int, dict[str, float]]

    @property
    def step_times(self) -> list[float]:
        """Seconds of each step but the first one, in which processes still start."""
        return [self.steps[step][_STEP_TIME] for step in self.trained[1:]]

    @property
    def trained(self) -> list[int]:
        """The steps that trained."""
        return [step for step, metrics in sorted(self.steps.items()) if _STEP_TIME in metrics]


def read_run(name: str, path: Path) -> Run:
    """What verl's file logger wrote.

    Args:
        name: of the queue that it ran on.
        path: a JSON object a line, with ``step`` and ``data``.
    """
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return Run(name, {record["step"]: record["data"] for record in records})


def differences(one: Run, other: Run) -> dict[str, float]:
    """metric -> its largest difference in any step; infinite where one run lacks it."""
    found: dict[str, float] = {}
    for step in one.steps.keys() | other.steps.keys():
        a, b = one.steps.get(step, {}), other.steps.get(step, {})
        for name in a.keys() | b.keys():
            if not name.startswith(_MEASURED):
                both = name in a and name in b
                gap = abs(a[name] - b[name]) if both else float("inf")
                found[name] = max(found.get(name, 0.0), gap)
    return found


def report(one: Run, other: Run) -> tuple[str, bool]:
    """Tables of both in Markdown, and whether they are equal."""
    found = differences(one, other)
    unequal = {name: gap for name, gap in sorted(found.items()) if gap != 0}
    summary = f"{len(one.trained)} steps, {len(found)} metrics; {len(unequal)} of them differ."
    gaps = [f"- `{name}` by up to {gap:.3g}" for name, gap in unequal.items()]
    times = ", ".join(f"{_times(run)} on {run.name}" for run in (one, other))
    parts = [[summary], gaps, _table(one, other), [f"Seconds a step, median and fastest: {times}."]]
    text = "\n\n".join("\n".join(part) for part in parts if part)
    return text, not unequal


def replaced(page: str, text: str, program: str = "recipe.v1.compare") -> str:
    """The page with ``text`` between the two marks of a program.

    Raises:
        ValueError: the page has no marks.
    """
    first, last = f"<!-- {program}: begin -->", f"<!-- {program}: end -->"
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"The page needs the lines {first} and {last}")
    return f"{before}{first}\n{text}\n{last}{after}"


def _times(run: Run) -> str:
    return f"{statistics.median(run.step_times):.2f} and {min(run.step_times):.2f}"


def _table(one: Run, other: Run) -> list[str]:
    names = [f"{title}, {run.name}" for title in _SHOWN for run in (one, other)]
    lines = [f"| step | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for step in sorted(set(one.trained) & set(other.trained)):
        values = [run.steps[step][name] for name in _SHOWN.values() for run in (one, other)]
        lines.append(f"| {step} | {' | '.join(f'{value:.6f}' for value in values)} |")
    return lines
