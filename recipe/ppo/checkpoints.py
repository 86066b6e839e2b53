"""Which checkpoint is the last complete one.

A checkpoint is a folder ``global_step_<n>`` (verl's layout). It counts only once the tracker file
names it, and the tracker is replaced in one step after everything is written, so a run that is
killed while it saves continues from the checkpoint before.
"""

from __future__ import annotations

import shutil
from pathlib import Path

_TRACKER = "latest_checkpointed_iteration.txt"
_PREFIX = "global_step_"


class Checkpoints:
    """The checkpoints of a run.

    Args:
        root: the folder that holds them.
        keep: how many of the last ones stay; None: all.
    """

    def __init__(self, root: Path, keep: int | None) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"At least one checkpoint must be kept, got {keep}")
        self.root = root
        self.keep = keep

    def folder(self, step: int) -> Path:
        return self.root / f"{_PREFIX}{step}"

    @staticmethod
    def step_of(folder: Path) -> int:
        """The step after which the checkpoint in ``folder`` was saved."""
        return int(folder.name.removeprefix(_PREFIX))

    @property
    def latest(self) -> int | None:
        """The step of the last complete checkpoint."""
        tracker = self.root / _TRACKER
        return int(tracker.read_text()) if tracker.exists() else None

    def start(self, step: int) -> Path:
        """An empty folder for the checkpoint of ``step``."""
        folder = self.folder(step)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def finish(self, step: int) -> None:
        """Make the checkpoint of ``step`` the latest, and remove those that are not kept."""
        temporary = self.root / f"{_TRACKER}.tmp"
        temporary.write_text(str(step))
        temporary.replace(self.root / _TRACKER)
        steps = sorted(self.step_of(path) for path in self._folders())
        complete = [other for other in steps if other <= step]
        stale = [other for other in steps if other > step]
        dropped = [] if self.keep is None else complete[: -self.keep]
        for other in (*dropped, *stale):
            shutil.rmtree(self.folder(other))

    def _folders(self) -> list[Path]:
        return [path for path in self.root.glob(f"{_PREFIX}*") if path.is_dir()]
