"""Which checkpoint a run continues from."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.ppo.checkpoints import Checkpoints


def save(checkpoints: Checkpoints, step: int) -> None:
    (checkpoints.start(step) / "data.pt").write_text(str(step))
    checkpoints.finish(step)


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_none_before_the_first(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none", keep=2).latest is None


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)

    for step in (5, 20, 100):
        save(checkpoints, step)

    assert checkpoints.latest == 100
    assert folders(tmp_path) == ["global_step_100", "global_step_20"]


def test_one_that_was_not_finished_does_not_count(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 20)
    (checkpoints.start(40) / "model.pt").write_text("half")

    assert Checkpoints(tmp_path, keep=2).latest == 20


def test_the_rest_of_an_unfinished_one_is_not_mixed_into_the_next(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 20)
    (checkpoints.start(40) / "old.pt").write_text("half")

    save(checkpoints, 40)

    assert [path.name for path in checkpoints.folder(40).iterdir()] == ["data.pt"]


def test_one_beyond_the_latest_is_removed(tmp_path: Path) -> None:
    """A run killed while it saved step 40 continued from 20 and now saves step 30."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 20)
    checkpoints.start(40)

    save(checkpoints, 30)

    assert folders(tmp_path) == ["global_step_20", "global_step_30"]


def test_all_are_kept_where_no_number_is_given(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=None)

    for step in (5, 20, 100):
        save(checkpoints, step)

    assert [Checkpoints.step_of(path) for path in sorted(tmp_path.glob("global*"))] == [100, 20, 5]


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got 0"):
        Checkpoints(tmp_path, keep=0)
