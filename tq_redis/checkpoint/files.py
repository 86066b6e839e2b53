"""The files of a checkpoint: frames of msgpack, and the buffers of blocks between them.

A frame is its length (4 bytes, little endian) and as many bytes of msgpack. A file of state has a
:class:`Page` in each. In a file of blocks each is a :class:`BlockHead`, behind which the block's
buffers follow as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import numpy as np

from tq_redis.errors import CheckpointError, TQError

_BUFFERING = 1 << 20
_LENGTH_BYTES = 4

T = TypeVar("T")


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file, and how to see that it is whole.

    Attributes:
        name: inside the checkpoint's directory.
        bytes: its size.
        sha256: hexadecimal.
    """

    name: str
    bytes: int
    sha256: str


class Page(msgspec.Struct, frozen=True, array_like=True):
    """A part of one key of a partition.

    Attributes:
        suffix: what the key's name has behind that of the partition; empty for the summary.
        type: hash, set or zset.
        items: name, value, ...; members; or member, score, ...
    """

    suffix: str
    type: str
    items: list[str]


class BlockHead(msgspec.Struct, frozen=True, array_like=True):
    """A block.

    Attributes:
        number: by which the partition's locators name it.
        header: as the codec made it.
        buffers: numpy's name of the dtype and the number of bytes of each.
    """

    number: str
    header: bytes
    buffers: list[tuple[str, int]]


@contextmanager
def disk_errors(path: Path, doing: str) -> Generator[None]:
    """Raises:
    CheckpointError: for any error of the operating system in the body.
    """
    try:
        yield
    except TQError:  # some are an OSError as well
        raise
    except OSError as error:
        where = error.filename or path
        raise CheckpointError(
            f"Cannot {doing} checkpoint {path}: {error.strerror} ({where})", path=str(where)
        ) from error


class Writer:
    """Writes a new file, and learns its checksum on the way."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._bytes = 0

    def open(self) -> None:
        """Make the file, before anything else. Whoever gives up on it calls :meth:`abandon`."""
        self._file = self._path.open("xb", buffering=_BUFFERING)

    def page(self, suffix: str, kind: str, items: msgspec.Raw) -> None:
        """Append a :class:`Page`, whose items are packed already."""
        self._frame([suffix, kind, items])

    def block(self, number: str, header: bytes, buffers: Sequence[np.ndarray[Any, Any]]) -> None:
        """Append a block."""
        forms = [(buffer.dtype.str, buffer.nbytes) for buffer in buffers]
        self._frame(BlockHead(number, header, forms))
        for buffer in buffers:
            if buffer.nbytes:
                self._write(np.ascontiguousarray(buffer).data)

    def close(self) -> FileRecord:
        """Write what is buffered. It is on disk for sure only after an fsync."""
        assert self._file is not None
        self._file.close()
        return FileRecord(self._path.name, self._bytes, self._digest.hexdigest())

    def abandon(self) -> None:
        """Let go of a file that is not to be finished."""
        with suppress(OSError):  # what is buffered may not fit any more
            if self._file is not None:
                self._file.close()

    def _frame(self, content: Any) -> None:
        packed = msgspec.msgpack.encode(content)
        self._write(len(packed).to_bytes(_LENGTH_BYTES, "little") + packed)

    def _write(self, data: bytes | memoryview) -> None:
        assert self._file is not None
        self._file.write(data)
        self._digest.update(data)
        self._bytes += memoryview(data).nbytes


def check_file(folder: Path, record: FileRecord) -> None:
    """Raises:
    CheckpointError: the file is missing, or not as it was written.
    """
    path = folder / record.name
    with disk_errors(folder, "read"), path.open("rb") as file:
        size = path.stat().st_size
        if size != record.bytes:
            raise CheckpointError(
                f"Checkpoint file {path} has {size} bytes instead of {record.bytes}: it was "
                f"cut short or changed",
                path=str(path),
            )
        if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
            raise CheckpointError(
                f"Checkpoint file {path} was changed: its SHA-256 is not {record.sha256}",
                path=str(path),
            )


def read_pages(path: Path) -> Generator[Page]:
    """The pages of a file of state that was checked."""
    with path.open("rb") as file:
        while (page := _next_frame(file, Page)) is not None:
            yield page


def read_blocks(path: Path) -> Generator[tuple[str, tuple[bytes, list[np.ndarray[Any, Any]]]]]:
    """Number, header and buffers of each block of a file of blocks that was checked."""
    with path.open("rb") as file:
        while (head := _next_frame(file, BlockHead)) is not None:
            buffers = [_next_buffer(file, *form) for form in head.buffers]
            yield head.number, (head.header, buffers)


def _next_buffer(file: BufferedReader, dtype: str, nbytes: int) -> np.ndarray[Any, Any]:
    buffer = np.empty(nbytes, np.uint8)
    file.readinto(buffer.data)
    return buffer.view(dtype)


def _next_frame(file: BufferedReader, kind: type[T]) -> T | None:
    length = file.read(_LENGTH_BYTES)
    if not length:
        return None
    return msgspec.msgpack.decode(file.read(int.from_bytes(length, "little")), type=kind)
