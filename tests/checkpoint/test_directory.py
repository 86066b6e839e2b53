"""A crash at any point leaves one whole checkpoint."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tq_redis import CheckpointError
from tq_redis.checkpoint.directory import Draft, find
from tq_redis.checkpoint.manifest import Manifest, read_manifest, write_manifest


class Crash(BaseException):
    """The process ends here."""


def draft(folder: Path, step: int) -> Draft:
    """A draft that is complete."""
    draft = Draft(folder)
    draft.begin()
    (draft.folder / "large").write_bytes(b"x" * step)
    write_manifest(draft.folder, Manifest("0", 0.0, step, [], {"step": step}))
    return draft


def save(folder: Path, step: int) -> None:
    made = draft(folder, step)
    made.commit()
    made.discard()


def found(folder: Path) -> int:
    return read_manifest(find(folder)).metadata["step"]


def crash_at(patch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """Let a function of os, or a method of Path, crash at its ``number``-th call from now on."""
    owner: Any = Path if name == "rename" else os
    real = getattr(owner, name)
    left = [number]

    def call(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise Crash
        return real(*args, **kwargs)

    patch.setattr(owner, name, call)


@pytest.mark.parametrize(("name", "calls"), [("rename", 3), ("fsync", 4), ("unlink", 2)])
def test_a_crash_while_a_checkpoint_is_replaced(folder: Path, name: str, calls: int) -> None:
    for number in range(1, calls + 1):
        save(folder, 1)
        crashed = draft(folder, 2)
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, name, number)
            with pytest.raises(Crash):
                crashed.commit()
        os.close(crashed._lock)  # type: ignore[arg-type]  # as the end of its process does
        assert found(folder) in (1, 2)
        assert found(folder) == read_manifest(folder).metadata["step"]
        # The next save goes on from there, and removes what is left.
        save(folder, 3)
        assert found(folder) == 3
        assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("number", [1, 2])
def test_a_crash_of_the_first_save_leaves_none(folder: Path, number: int) -> None:
    crashed = draft(folder, 1)
    with pytest.MonkeyPatch.context() as patch:
        crash_at(patch, "fsync", number)
        with pytest.raises(Crash):
            crashed.commit()
    with pytest.raises(CheckpointError, match="does not exist"):
        find(folder)
    os.close(crashed._lock)  # type: ignore[arg-type]
    save(folder, 2)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_an_interrupted_replacement_is_undone_by_a_load(folder: Path) -> None:
    save(folder, 1)
    folder.rename(folder.with_name("ck.replaced"))
    assert find(folder) == folder
    assert found(folder) == 1
    assert not folder.with_name("ck.replaced").exists()


def test_where_nothing_may_be_written_it_is_read_where_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, 1)
    folder.rename(folder.with_name("ck.replaced"))

    def refuse(*args: Any) -> None:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        assert found(folder) == 1
    find(folder)


def test_drafts_of_savers_that_live_are_left_alone(folder: Path) -> None:
    slow = draft(folder, 1)
    save(folder, 2)
    assert found(folder) == 2
    slow.commit()
    slow.discard()
    assert found(folder) == 1


def test_a_directory_of_the_same_name_with_an_ending_is_left_alone(folder: Path) -> None:
    other = folder.with_name("ck.old")
    other.mkdir()
    (other / "mine").write_text("mine")
    for step in (1, 2):
        save(folder, step)
    assert (other / "mine").read_text() == "mine"


def test_a_link_is_followed(folder: Path) -> None:
    """The checkpoint is replaced where it lies; the link stays."""
    link = folder.with_name("latest")
    link.symlink_to(folder)
    for step in (1, 2):
        save(link, step)
    assert link.is_symlink()
    assert found(folder) == found(link) == 2


def test_names_with_wildcards(tmp_path: Path) -> None:
    save(tmp_path / "ck[1]*?", 1)
    crashed = draft(tmp_path / "ck[1]*?", 2)
    os.close(crashed._lock)  # type: ignore[arg-type]
    save(tmp_path / "ck[1]*?", 3)
    assert [path.name for path in tmp_path.iterdir()] == ["ck[1]*?"]


def test_many_savers_to_one_directory(folder: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda step: save(folder, step), range(1, 33)))
    assert found(folder) in range(1, 33)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
