"""Messages on a stream socket: of each frame its size and whether more follow, then the frame."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

_HEAD = struct.Struct("<Q?")
# A frame is copied into one buffer with what is around it up to here, and sent as it lies above.
_COPIED = 16 << 10
_SCRATCH = 64 << 10


def framed(frames: Sequence[Any]) -> list[memoryview]:
    """The bytes of a message, in pieces; large frames are not copied.

    Args:
        frames: at least one; contiguous buffers.
    """
    pieces: list[memoryview] = []
    copied = bytearray()
    for left, frame in zip(range(len(frames) - 1, -1, -1), frames, strict=True):
        view = memoryview(frame)
        copied += _HEAD.pack(view.nbytes, left > 0)
        if view.nbytes < _COPIED:
            copied += view
        else:
            pieces += [memoryview(copied), view.cast("B")]
            copied = bytearray()
    return [*pieces, memoryview(copied)] if copied else pieces


class FrameReader:
    """Cuts what comes from a socket into messages, of which each frame has memory of its own.

    Args:
        largest: no frame may be larger, in bytes; None: each may have any size.
    """

    def __init__(self, largest: int | None = None) -> None:
        self.largest = largest
        self._scratch = memoryview(bytearray(_SCRATCH))
        self._start = self._end = 0  # what lies between them is not cut yet
        self._head: tuple[int, bool] | None = None  # of the frame that comes
        self._large: bytearray | None = None  # that frame, if it is larger than scratch
        self._filled = 0  # bytes of it
        self._frames: list[bytes | bytearray] = []

    def buffer(self) -> memoryview:
        """Where the next bytes go; never empty."""
        if self._large is not None:
            return memoryview(self._large)[self._filled :]
        if self._start:
            left = self._end - self._start
            self._scratch[:left] = self._scratch[self._start : self._end]
            self._start, self._end = 0, left
        return self._scratch[self._end :]

    def received(self, count: int) -> Iterator[list[bytes | bytearray]]:
        """The messages that are whole now that so many bytes of :meth:`buffer` are filled, one by
        one: ``largest`` may be changed between them. All must be taken.

        Raises:
            ValueError: a frame is larger than it may be, or than there is memory for.
        """
        if self._large is None:
            self._end += count
        else:
            self._filled += count
        while (next_one := self._next_frame()) is not None:
            frame, more_follow = next_one
            self._frames.append(frame)
            if not more_follow:
                message, self._frames = self._frames, []
                yield message

    def _next_frame(self) -> tuple[bytes | bytearray, bool] | None:
        """A frame that is whole, and whether more of its message follow."""
        if self._head is None:
            head = self._cut(_HEAD.size)
            if head is None:
                return None
            self._head = _HEAD.unpack(head)
        size, more_follow = self._head
        if self.largest is not None and size > self.largest:
            raise ValueError(f"A frame of {size} bytes comes, where {self.largest} are allowed")
        frame = self._cut(size) if size <= _SCRATCH else self._cut_large(size)
        if frame is None:
            return None
        self._head = None
        return frame, more_follow

    def _cut(self, size: int) -> bytes | None:
        if self._end - self._start < size:
            return None
        self._start += size
        return bytes(self._scratch[self._start - size : self._start])

    def _cut_large(self, size: int) -> bytearray | None:
        if self._large is None:
            try:
                self._large = bytearray(size)
            except (MemoryError, OverflowError) as error:
                raise ValueError(f"There is no memory for a frame of {size} bytes") from error
            self._filled = self._end - self._start
            self._large[: self._filled] = self._scratch[self._start : self._end]
            self._start = self._end = 0
        if self._filled < size:
            return None
        frame, self._large = self._large, None
        return frame
