"""metrics.jsonl: one JSON object a training step, and no step twice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

Metrics = dict[str, float]


class Records:
    """The metrics of a run, in step order.

    Args:
        path: the file; created when the first record is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Metrics]:
        """All records. A last line that a crash cut off is left out."""
        if not self.path.exists():
            return []
        records: list[Metrics] = []
        for line in self.path.read_text().splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return records

    def rewind(self, step: int) -> None:
        """Forget what came after ``step``: those steps will run again."""
        kept = [record for record in self.read() if record["step"] <= step]
        temporary = self.path.with_suffix(".tmp")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text("".join(f"{json.dumps(record)}\n" for record in kept))
        temporary.replace(self.path)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the record of a step."""
        with self.path.open("a") as file:
            file.write(f"{json.dumps({'step': step, **metrics})}\n")
