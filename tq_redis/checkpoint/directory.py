"""The directory of a checkpoint: written beside its place, and then put there in one step.

``<dir>.tmp-<random>`` is being written, or removed; a writer holds a lock on it. ``<dir>.replaced``
is the checkpoint that makes way for the new one, until that is in its place. A crash at any point
leaves a whole checkpoint as ``<dir>`` or, if that is not there, as ``<dir>.replaced``.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from tq_redis.checkpoint.files import disk_errors
from tq_redis.checkpoint.manifest import NAME
from tq_redis.errors import CheckpointError

# Some network file systems have no locks; two savers to one directory are then on their own.
_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL}


class Draft:
    """A checkpoint that is being written.

    Args:
        directory: where it is to be; its parent directory must exist.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.target = _real(directory)
        self.folder = _beside(self.target)
        self._lock: int | None = None

    def begin(self) -> None:
        """Make the folder, and remove what savers left that died.

        Raises:
            CheckpointError: something else than a checkpoint is in its place, or the disk refuses.
        """
        with disk_errors(self.target, "write"), _locked(self.target.parent):
            _repair(self.target)
            _refuse_others(self.target)
            for left in self.target.parent.glob(f"{_escaped(self.target.name)}.tmp-*"):
                _remove_if_abandoned(left)
            self.folder.mkdir()
            self._lock = _lock(self.folder)

    def commit(self) -> None:
        """Put the folder in its place. What was there before is gone only afterwards.

        Raises:
            CheckpointError: the disk refuses.
        """
        with disk_errors(self.target, "write"):
            for path in self.folder.iterdir():
                _sync(path)
            _sync(self.folder)
            with _locked(self.target.parent):
                _repair(self.target)
                _refuse_others(self.target)
                if self.target.exists():
                    self.target.rename(_replaced(self.target))
                self.folder.rename(self.target)
                _sync(self.target.parent)
                removed = _out_of_the_way(self.target)
            shutil.rmtree(removed, ignore_errors=True)

    def discard(self) -> None:
        """Remove the folder, if it was not put in its place."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def find(directory: str | os.PathLike[str]) -> Path:
    """The folder of a checkpoint; a replacement that was interrupted is undone.

    Raises:
        CheckpointError: there is none.
    """
    target = _real(directory)
    old = _replaced(target)
    if not target.exists() and old.exists():
        # Where nothing may be written, it is read where it is.
        with suppress(OSError), _locked(target.parent):
            _repair(target)
    found = target if target.exists() or not old.exists() else old
    if not (found / NAME).is_file():
        missing = "does not exist" if not found.exists() else f"has no {NAME}: it is no checkpoint"
        raise CheckpointError(f"{found} {missing}", path=str(found))
    return found


def _real(directory: str | os.PathLike[str]) -> Path:
    return Path(os.path.realpath(directory))


def _beside(target: Path) -> Path:
    return target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")


def _replaced(target: Path) -> Path:
    return target.with_name(f"{target.name}.replaced")


def _out_of_the_way(target: Path) -> Path:
    """Give what was replaced the name of something that is being removed."""
    removed = _beside(target)
    with suppress(FileNotFoundError):
        _replaced(target).rename(removed)
    return removed


def _repair(target: Path) -> None:
    """Undo a replacement that was interrupted, or finish it."""
    if not target.exists():
        if (_replaced(target) / NAME).is_file():
            _replaced(target).rename(target)
    elif (target / NAME).is_file() and (_replaced(target) / NAME).is_file():
        _out_of_the_way(target)  # a save removes it


def _refuse_others(target: Path) -> None:
    """Raises:
    CheckpointError: what is there was not made by us, and would be lost.
    """
    if target.exists() and not (target / NAME).is_file() and _has_content(target):
        raise CheckpointError(
            f"{target} exists and is no checkpoint of tq_redis; it would be replaced. Choose "
            f"another directory",
            path=str(target),
        )


def _has_content(path: Path) -> bool:
    return not path.is_dir() or any(path.iterdir())


def _escaped(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _remove_if_abandoned(folder: Path) -> None:
    with suppress(OSError):  # its writer lives, or has just put it in its place
        lock = _lock(folder, wait=False)
        try:
            shutil.rmtree(folder)
        finally:
            if lock is not None:
                os.close(lock)


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    lock = _lock(folder)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _lock(folder: Path, *, wait: bool = True) -> int | None:
    """A lock on a folder, as an open file to be closed; None where there are no locks.

    Raises:
        OSError: somebody else has it, and we do not wait.
    """
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if not wait or error.errno not in _NO_LOCKS:
            raise
        return None
    return file


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
