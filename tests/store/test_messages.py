"""What a message carries itself, and what goes beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from tq_redis.store import messages as m
from tq_redis.store.server import buffers_of

SIZES = st.sampled_from([0, 1, 7, (16 << 10) - 1, 16 << 10, 64 << 10])
DTYPES = st.sampled_from([np.dtype("<i8"), np.dtype("<f4"), np.dtype("u1"), np.dtype("?")])


def sent(parcels: list[m.Parcel], frames: list[Any]) -> list[Any]:
    request = m.decode_request(m.encode(m.Hold("p", ["a"], parcels)))
    assert isinstance(request, m.Hold)
    return m.unpack(request.parcels, buffers_of([zmq.Frame(memoryview(frame)) for frame in frames]))


@given(st.lists(st.lists(st.tuples(SIZES, DTYPES), max_size=4), max_size=4))
def test_blocks_come_out_as_they_went_in(blocks: list[list[tuple[int, np.dtype[Any]]]]) -> None:
    contents = [
        (str(n).encode(), [np.arange(size).astype(dtype) for size, dtype in block])
        for n, block in enumerate(blocks)
    ]

    received = sent(*m.pack(contents))

    assert [header for header, _ in received] == [header for header, _ in contents]
    for (_, arrays), (_, expected) in zip(received, contents, strict=True):
        assert [array.dtype for array in arrays] == [array.dtype for array in expected]
        assert all(map(np.array_equal, arrays, expected))
        assert all(array.flags.aligned for array in arrays)


def test_only_large_buffers_take_a_frame() -> None:
    small, large = np.zeros(1000), np.ones(1 << 20)

    parcels, frames = m.pack([(b"", [small, large, small]), (b"", [small])])

    assert len(frames) == 1
    assert frames[0] is large
    assert [[within is None for _, within in parcel.buffers] for parcel in parcels] == [
        [False, True, False],
        [False],
    ]


def test_a_frame_that_nobody_names_is_an_error() -> None:
    parcels, _ = m.pack([(b"", [np.zeros(10)])])

    with pytest.raises(ValueError, match="More buffers came"):
        sent(parcels, [np.zeros(1)])
