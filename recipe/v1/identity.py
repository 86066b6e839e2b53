"""What a sample is called from run to run.

verl names a prompt by a random uid, and a request by another one. What stays the same is the row of
the data set, the step, and the place in the GRPO group: the session.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def sample_seed(seed: int, step: int, row: int, session: int) -> int:
    """63 bits that are this sample's alone."""
    name = f"{seed} {step} {row} {session}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) >> 1


def sample_order(keys: Sequence[str], rows: Sequence[int]) -> list[int]:
    """The places of samples in the order of their data row, session and output.

    Args:
        keys: ``{uid}_{session}_{output}``, as verl names them.
        rows: of the data set, of each sample.
    """

    def name(place: int) -> tuple[int, int, int]:
        _, session, output = keys[place].rsplit("_", 2)
        return rows[place], int(session), int(output)

    return sorted(range(len(keys)), key=name)
