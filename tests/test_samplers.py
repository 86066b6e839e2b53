from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tq_redis as tq
from tq_redis.samplers import balanced_shares

SIZES = st.integers(1, 6).flatmap(
    lambda parts: st.tuples(
        st.just(parts),
        st.integers(0, 8).flatmap(
            lambda rows: st.lists(
                st.integers(0, 1000), min_size=rows * parts, max_size=rows * parts
            )
        ),
    )
)


@given(SIZES)
def test_shares_deal_out_everything_evenly(case: tuple[int, list[int]]) -> None:
    parts, sizes = case
    shares = balanced_shares(sizes, parts)
    assert sorted(place for share in shares for place in share) == list(range(len(sizes)))
    assert {len(share) for share in shares} == {len(sizes) // parts}
    sums = [sum(sizes[place] for place in share) for share in shares]
    assert max(sums) - min(sums) <= max(sizes, default=0)
    assert shares == balanced_shares(sizes, parts)


def test_shares_are_nearly_equal() -> None:
    """Where lengths vary as those of responses do, dealing by turns leaves the ranks far apart."""
    lengths = [1 + (row * 7919) % 2048 for row in range(256)]
    sums = [sum(lengths[place] for place in share) for share in balanced_shares(lengths, 8)]
    by_turns = [sum(lengths[rank::8]) for rank in range(8)]
    assert max(sums) - min(sums) < 0.01 * max(sums)
    assert max(by_turns) - min(by_turns) > 5 * (max(sums) - min(sums))


def test_what_cannot_be_dealt_out() -> None:
    with pytest.raises(tq.InputError, match="5 sizes cannot be dealt out to 2"):
        balanced_shares([1] * 5, 2)
    with pytest.raises(tq.InputError, match="parts must be a positive integer"):
        balanced_shares([1], 0)


@pytest.mark.parametrize("number", [0, -1, 1.5])
def test_numbers_must_be_positive(number: int) -> None:
    with pytest.raises(tq.InputError, match="n_samples_per_prompt must be a positive"):
        tq.GRPOGroupNSampler(number)
    with pytest.raises(tq.InputError, match="dp_size must be a positive"):
        tq.SeqlenBalancedSampler(dp_size=number)
