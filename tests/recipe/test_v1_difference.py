"""Two trainings, number by number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipe.v1.difference import Run, differences, read_run, replaced, report

STEP = {
    "critic/score/mean": 0.5,
    "actor/grad_norm": 1.0,
    "actor/entropy": 0.25,
    "timing_s/step": 2.0,
    "perf/throughput": 10.0,
}


def run(*scores: float, name: str = "tq_redis", seconds: float = 2.0) -> Run:
    steps = {
        step: {**STEP, "critic/score/mean": score, "timing_s/step": seconds}
        for step, score in enumerate(scores, start=1)
    }
    return Run(name, {0: {"val/acc": 0.75}, **steps})


def test_equal_runs_are_equal_however_long_they_took() -> None:
    text, equal = report(run(0.1, 0.2, seconds=2.0), run(0.1, 0.2, name="other", seconds=3.0))

    assert equal
    assert text.startswith("2 steps, 4 metrics; 0 of them differ.")
    assert "2.00 and 2.00 on tq_redis, 3.00 and 3.00 on other" in text


def test_the_smallest_difference_in_any_step_is_one() -> None:
    text, equal = report(run(0.1, 0.2), run(0.1, 0.2 + 2**-55, name="other"))

    assert not equal
    assert "- `critic/score/mean` by up to 2.78e-17" in text


def test_a_step_that_one_run_lacks_is_a_difference() -> None:
    found = differences(run(0.1), run(0.1, 0.2))

    assert found["critic/score/mean"] == float("inf")
    assert found["val/acc"] == 0


def test_the_first_step_does_not_count_for_the_time() -> None:
    slow_start = run(0.1, 0.2, 0.3)
    slow_start.steps[1]["timing_s/step"] = 100.0

    assert slow_start.step_times == [2.0, 2.0]


def test_the_log_of_verl_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": n, "data": STEP}) + "\n" for n in (1, 2)))

    assert read_run("a", path).steps == {1: STEP, 2: STEP}


def test_the_page_keeps_what_is_around_the_result() -> None:
    begin, end = "<!-- recipe.v1.compare: begin -->", "<!-- recipe.v1.compare: end -->"

    page = replaced(f"before\n{begin}\nold\n{end}\nafter\n", "new")

    assert page == f"before\n{begin}\nnew\n{end}\nafter\n"
    with pytest.raises(ValueError, match="needs the lines"):
        replaced("no marks", "new")
