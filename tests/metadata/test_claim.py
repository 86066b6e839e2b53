from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.metadata.build import CLAIMS
from tq_redis.errors import InputError
from tq_redis.metadata import BatchMeta, Claim
from tq_redis.metadata.claim import pack_claims, unpack_claims

ONE, TWO = Claim("update_actor", 17), Claim("update_actor", 18)


def test_one_claim_stands_for_all_rows() -> None:
    assert BatchMeta([1, 2], "p", claims=ONE).claims == [ONE, ONE]
    assert BatchMeta([1, 2], "p", claims=[ONE, None]).claims == [ONE, None]
    assert BatchMeta([1, 2], "p").claims == [None, None]


@pytest.mark.parametrize("wrong", [("update_actor", 17), ["update_actor", None], [(1, 2), ONE]])
def test_what_is_no_claim_is_refused(wrong: Any) -> None:
    """Also the plain tuple that would pass for the claims of two rows."""
    with pytest.raises(InputError, match="claims must hold Claim or None"):
        BatchMeta([1, 2], "p", claims=wrong)


def test_each_row_keeps_its_claim() -> None:
    meta = BatchMeta([1, 2, 3], ["p", "q", "p"], claims=[ONE, None, TWO])
    assert [part.claims for part in meta.chunk(2)] == [[ONE, None], [TWO]]
    assert [part.claims for part in meta.chunk_by_partition()] == [[ONE, TWO], [None]]
    assert meta.padded(4).claims == [ONE, None, TWO, ONE]
    assert meta.padded(4).unpadded() == meta
    assert meta.select_samples([2, 2]).claims == [TWO, TWO]
    assert meta[-1].claims == [TWO]
    assert meta.select_fields([]).claims == meta.with_fields({}).claims == meta.claims
    assert BatchMeta.concat([meta.padded(4), BatchMeta([9], "p")]).claims == [ONE, None, TWO, None]
    meta.reorder([1, 2, 0])
    assert meta.claims == [None, TWO, ONE]


def test_batches_of_other_claims_are_not_equal() -> None:
    assert BatchMeta([1], "p", claims=ONE) == BatchMeta([1], "p", claims=[ONE])
    assert BatchMeta([1], "p", claims=ONE) != BatchMeta([1], "p", claims=TWO)
    assert BatchMeta([1], "p", claims=ONE) != BatchMeta([1], "p")


def test_in_a_union_the_own_claim_comes_first() -> None:
    mine = BatchMeta([1, 2, 3], "p", claims=[ONE, None, None])
    other = BatchMeta([1, 2, 3], "p", claims=[TWO, TWO, None])
    assert mine.union(other).claims == [ONE, TWO, None]
    assert mine.union(BatchMeta()).claims == mine.claims == BatchMeta().union(mine).claims


@given(st.lists(CLAIMS) | st.integers(254, 258).map(lambda n: [Claim("t", i) for i in range(n)]))
def test_packed_claims_unpack_as_they_were(claims: list[Claim | None]) -> None:
    packed = pack_claims(claims)
    assert (packed is None) == (not any(claims))
    assert (unpack_claims(packed) or [None] * len(claims)) == claims


@pytest.mark.parametrize(
    ("count", "mixed", "most"),
    [(1, False, 60), (4, False, 100), (4, True, 512), (128, False, 1536), (128, True, 2048)],
)
def test_claims_take_little_room(count: int, mixed: bool, most: int) -> None:
    """Well under 100 bytes a claim in the order claimed, half a byte a row when mixed."""
    claims = [Claim("update_actor", 17_000 + row * count // 1024) for row in range(1024)]
    if mixed:
        random.Random(7).shuffle(claims)
    plain = BatchMeta(range(1024), "p")
    leased = BatchMeta(range(1024), "p", claims=claims)
    added = len(pickle.dumps(leased)) - len(pickle.dumps(plain))
    assert added < most
    assert pickle.loads(pickle.dumps(leased)) == leased


def test_a_batch_without_claims_pickles_none_of_this() -> None:
    packed = pickle.dumps(BatchMeta(range(1024), "p"))
    assert b"claim" not in packed
    assert b"tq_redis.metadata.claim" not in pickle.dumps(BatchMeta([1], "p", claims=ONE))
