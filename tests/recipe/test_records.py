"""metrics.jsonl over crashes and resumed runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.ppo.records import Records


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "metrics.jsonl")


def test_a_run_that_continues_writes_no_step_twice(records: Records) -> None:
    for step in range(5):
        records.write(step, {"reward/mean": step / 10})

    records.rewind(2)
    records.write(3, {"reward/mean": 0.9})

    assert [record["step"] for record in records.read()] == [0, 1, 2, 3]
    assert records.read()[-1]["reward/mean"] == 0.9


def test_a_run_without_a_checkpoint_starts_over(records: Records) -> None:
    records.write(0, {"test/acc": 0.5})

    records.rewind(-1)

    assert records.read() == []


def test_a_line_cut_off_by_a_crash_is_dropped(records: Records) -> None:
    records.write(0, {"test/acc": 0.5})
    with records.path.open("a") as file:
        file.write('{"step": 1, "rew')

    assert [record["step"] for record in records.read()] == [0]
    records.rewind(1)
    records.write(1, {"reward/mean": 0.1})
    assert [record["step"] for record in records.read()] == [0, 1]
