"""Under which claim a row was taken, and how the claims of many rows travel."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tq_redis.errors import InputError

# Each distinct claim once, and for every row its place in that table; packed.
PackedClaims = tuple[list[tuple[str, int] | None], bytes]


class Claim(NamedTuple):
    """A claim under a lease.

    Attributes:
        task: the task that claimed.
        number: of the claim in its partition, as the control plane counts them.
    """

    task: str
    number: int


Claims = Sequence[Claim | None] | Claim | None


def claim_of_each(claims: Claims, size: int) -> list[Claim | None]:
    """One entry per row, where one claim, or None, may have been given for all of them.

    Raises:
        InputError: an entry is neither a :class:`Claim` nor None.
    """
    if claims is None or isinstance(claims, Claim):
        return [claims] * size
    rows = list(claims)
    if not set(map(type, rows)) <= {Claim, type(None)}:
        wrong = next(row for row in rows if row is not None and type(row) is not Claim)
        raise InputError(f"claims must hold Claim or None for each row, got {wrong!r}")
    return rows


def pack_claims(claims: Sequence[Claim | None]) -> PackedClaims | None:
    """Plain data, small whatever the order of the rows; None where no row has a claim."""
    places = {claim: place for place, claim in enumerate(dict.fromkeys(claims))}
    if not any(places):
        return None
    table = [None if claim is None else (claim.task, claim.number) for claim in places]
    rows = np.array([places[claim] for claim in claims], np.min_scalar_type(len(table)))
    return table, zlib.compress(rows.tobytes())


def unpack_claims(packed: PackedClaims | None) -> list[Claim | None] | None:
    """What :func:`pack_claims` was given; None where no row has a claim."""
    if packed is None:
        return None
    table = [None if entry is None else Claim(*entry) for entry in packed[0]]
    rows = np.frombuffer(zlib.decompress(packed[1]), np.min_scalar_type(len(table)))
    return [table[place] for place in rows.tolist()]
