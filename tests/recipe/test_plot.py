"""The PNG of a run, also of one that has only begun."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.ppo.plot import TEST_ACCURACY, VAL_ACCURACY, draw
from recipe.ppo.records import Metrics

BEGUN: list[Metrics] = [{"step": 0, TEST_ACCURACY: 0.5, VAL_ACCURACY: 0.5}]
DONE: list[Metrics] = [
    *BEGUN,
    {"step": 1, "critic/score/mean": 0.8, "reward/acc/mean": 0.2, TEST_ACCURACY: 0.6},
]


@pytest.mark.parametrize("history", [BEGUN, DONE])
def test_draws_what_there_is(history: list[Metrics], tmp_path: Path) -> None:
    draw(history, tmp_path / "accuracy.png")

    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
