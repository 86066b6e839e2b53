"""Messages on a stream socket."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq_redis.store.frames import FrameReader, framed

EDGES = [0, 1, 8, 9, 1000, 16 << 10, 64 << 10, (64 << 10) - 9, 100_000, 300_000]
SIZES = st.sampled_from(EDGES + [size + 1 for size in EDGES])
MESSAGES = st.lists(st.lists(SIZES, min_size=1, max_size=5), max_size=5)
CHUNKS = st.lists(st.sampled_from([1, 8, 9, 10, 1000, 1 << 16, 1 << 20]), max_size=40)


def read(data: bytes, reader: FrameReader, chunks: Sequence[int] = ()) -> list[list[bytes]]:
    """The messages in ``data``; first so many bytes come at a time, then as many as may."""
    messages: list[list[bytes]] = []
    chunk, left = iter(chunks), memoryview(data)
    while left:
        buffer = reader.buffer()
        count = min(len(buffer), len(left), next(chunk, len(left)))
        buffer[:count] = left[:count]
        left = left[count:]
        messages += [list(map(bytes, frames)) for frames in reader.received(count)]
    return messages


@given(MESSAGES, CHUNKS)
def test_messages_come_out_as_they_went_in(sizes: list[list[int]], chunks: list[int]) -> None:
    byte = itertools.count()
    messages = [[bytes([next(byte) % 251]) * size for size in message] for message in sizes]
    data = b"".join(piece for message in messages for piece in framed(message))

    assert read(data, FrameReader(), chunks) == messages


def test_large_frames_are_not_copied_to_be_sent() -> None:
    large, small = np.arange(1 << 16), np.arange(3)

    pieces = framed([small, large, small])

    assert [np.shares_memory(np.frombuffer(piece, np.uint8), large) for piece in pieces] == [
        False,
        True,
        False,
    ]
    assert read(b"".join(pieces), FrameReader()) == [
        [small.tobytes(), large.tobytes(), small.tobytes()]
    ]


def test_frames_have_memory_of_their_own() -> None:
    reader = FrameReader()
    data = b"".join(framed([b"a" * 100, b"b" * 1000]))
    reader.buffer()[: len(data)] = data
    (message,) = reader.received(len(data))
    read(b"".join(framed([b"c" * 100_000])), reader)
    assert message == [b"a" * 100, b"b" * 1000]


@pytest.mark.parametrize("size", [17, 1 << 20, (1 << 64) - 1])
def test_no_frame_may_be_larger_than_allowed(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} bytes comes, where 16 are allowed"):
        read(struct.pack("<Q?", size, False), FrameReader(largest=16))


def test_a_frame_for_which_there_is_no_memory() -> None:
    for size in (1 << 62, (1 << 64) - 1):
        with pytest.raises(ValueError, match="no memory"):
            read(struct.pack("<Q?", size, False), FrameReader())


def test_what_is_allowed_may_change_between_messages() -> None:
    """A client is known after its first message, and the second one may have come with it."""
    reader = FrameReader(largest=6)
    data = b"".join(framed([b"secret"]) + framed([b"a" * 1000]))
    reader.buffer()[: len(data)] = data
    got: list[list[bytes | bytearray]] = []
    for message in reader.received(len(data)):
        reader.largest = None
        got.append(message)
    assert got == [[b"secret"], [b"a" * 1000]]
