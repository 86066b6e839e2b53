"""Draws that are too large for one script: made in pieces, and read part by part."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from tq_redis.control.asking import (
    Asking,
    claimed,
    milliseconds,
    not_enough,
    require_rows,
)
from tq_redis.control.ranges import to_ranges
from tq_redis.control.records import Claimed, NotEnough, Taken, Wanted
from tq_redis.control.replies import ClaimReply, RecallReply
from tq_redis.deadline import Deadline
from tq_redis.errors import TQError

# Rows of a draw that one script handles. It does more for each than a plain claim: it checks them,
# and keeps their ids.
ROWS_PER_PART = 512
# Each share has a claim of its own, which costs as much as some rows.
_SHARES_PER_PIECE = 64
# A draw whose maker sends no piece for so long comes back by itself.
_HOLD_S = 10.0

# It came and went meanwhile: try again at once.
_CHANGED = NotEnough(exists=True, ready=0, groups=0, event="0-0", retry_s=0.0)


class Draws(Asking):
    """Making draws, and getting what they have."""

    async def _draw(
        self,
        partition: str,
        wanted: Wanted,
        consumer: str,
        pieces: Sequence[Mapping[str, Any]],
        deadline: Deadline,
    ) -> Claimed | Taken | NotEnough:
        """Get a draw; make it first if nobody has.

        Whoever makes it gets it as everybody else does. So it may die at any moment: what is not
        published comes back, and what is waits for its ranks.
        """
        found = await self._recall(partition, wanted, consumer, deadline)
        if found is None:
            found = await self._make(partition, wanted, consumer, pieces, deadline)
        return found or await self._recalled(partition, wanted, consumer, deadline)

    async def _recalled(
        self, partition: str, wanted: Wanted, consumer: str, deadline: Deadline
    ) -> Claimed | NotEnough:
        """A draw that was just there."""
        return await self._recall(partition, wanted, consumer, deadline) or _CHANGED

    async def _recall(
        self, partition: str, wanted: Wanted, consumer: str, deadline: Deadline
    ) -> Claimed | NotEnough | None:
        """A draw that was made, all of it; None if none was, or it is forgotten meanwhile.

        Raises:
            SampleNotFoundError, NotReadyError: nothing was taken.
        """
        parts: list[RecallReply] = []
        while not parts or len(parts) < parts[0].parts:
            place = {"part": len(parts) + 1, "by": parts[0].by if parts else ""}
            reply = await self._part(partition, wanted, consumer, place, deadline)
            if reply.code in ("short", "no_partition"):
                return not_enough(reply)
            require_rows(partition, reply)
            if reply.code != "ok":
                return None
            parts.append(reply)
        for number, part in enumerate(parts, start=1):
            if part.waits:
                place = {"part": number, "by": part.by, "take": True}
                reply = await self._part(partition, wanted, consumer, place, deadline)
                if reply.code != "ok":
                    return None
        return claimed(parts, wanted)

    async def _part(
        self,
        partition: str,
        wanted: Wanted,
        consumer: str,
        place: Mapping[str, Any],
        deadline: Deadline,
    ) -> RecallReply:
        arguments = self._claim_arguments(wanted, consumer) | {"count": wanted.count, **place}
        return await self._run_again(
            partition, "recall", wanted.task, arguments, RecallReply, deadline
        )

    async def _make(
        self,
        partition: str,
        wanted: Wanted,
        consumer: str,
        pieces: Sequence[Mapping[str, Any]],
        deadline: Deadline,
    ) -> Taken | NotEnough | None:
        """Publish a draw; None if that was done, by this call or by another one.

        It holds its pieces until the last one is there. If it fails, they are given back.
        """
        common = self._claim_arguments(wanted, consumer)
        by, last = uuid.uuid4().hex, len(pieces) - 1
        request = ""
        try:
            for place, piece in enumerate(pieces):
                request = uuid.uuid4().hex
                making = {
                    "by": by,
                    "first": place == 0,
                    "last": place == last,
                    "hold": milliseconds(_HOLD_S),
                }
                arguments = {**common, **piece, "making": making}
                reply = await self._run_again(
                    partition, "claim", wanted.task, arguments, ClaimReply, deadline, request
                )
                if reply.code == "taken":
                    return Taken(reply.ids)
                if reply.code in ("drawn", "lost"):
                    return None
                if reply.code != "ok":
                    return not_enough(reply)
        except (asyncio.CancelledError, TQError):
            undo = self._undo(partition, wanted.task, request, whole=common["whole"], by=by)
            self._later(undo)
            raise
        return None


def pieces_of(shares: Mapping[str, Sequence[int]], own: str) -> list[dict[str, Any]]:
    """The shares of a draw as arguments of the scripts that claim them, that of ``own`` first."""
    pieces: list[list[tuple[str, list[int]]]] = [[]]
    rows = 0
    for name in sorted(shares, key=lambda name: name != own):
        ids = shares[name]
        for first in range(0, len(ids), ROWS_PER_PART):
            page = ids[first : first + ROWS_PER_PART]
            if rows + len(page) > ROWS_PER_PART or len(pieces[-1]) == _SHARES_PER_PIECE:
                pieces.append([])
                rows = 0
            pieces[-1].append((name, to_ranges(page)))
            rows += len(page)
    return [{"ids": [], "shares": piece} for piece in pieces]
