from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq_redis.control.ranges import from_ranges, to_ranges

IDS = st.lists(st.integers(1, 30) | st.integers(1, 2**53))


@given(IDS)
def test_unpacking_gives_the_ids_in_their_order(ids: list[int]) -> None:
    assert from_ranges(to_ranges(ids)) == ids


@given(IDS)
def test_neighbouring_ranges_could_not_be_one(ids: list[int]) -> None:
    ranges = to_ranges(ids)
    starts, counts = ranges[::2], ranges[1::2]
    assert all(count > 0 for count in counts)
    assert all(a + n != b for a, n, b in zip(starts, counts, starts[1:], strict=False))


def test_ids_in_a_row_are_two_numbers() -> None:
    assert to_ranges(range(5, 50_005)) == [5, 50_000]
    assert to_ranges([4, 5, 6, 2]) == [4, 3, 2, 1]
    assert to_ranges([]) == []


def test_half_a_range_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        from_ranges([1, 2, 3])
