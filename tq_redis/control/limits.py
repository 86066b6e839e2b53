"""Limits: how many samples a task may leave unconsumed, and puts that wait for room."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

from tq_redis.control import refusals
from tq_redis.control.claims import Claims
from tq_redis.control.keys import decode, encode
from tq_redis.control.records import Admission, Full
from tq_redis.control.replies import AdmitReply, LimitReply
from tq_redis.deadline import Deadline
from tq_redis.errors import shorten

WhenFull = Literal["wait", "evict"]

_log = logging.getLogger(__name__)

# To find and drop a cell costs most: Redis waits for its memory.
CELLS_PER_CLEAR = 2048
_DISMISS_S = 60.0
# What one step of making room may take, whatever is left of a call's deadline.
_STEP_S = 5.0
# Others' puts make no room.
_NO_ROOM = frozenset({b"put"})


class Limits(Claims):
    """Declaring limits, and asking whether a put is within them."""

    async def limit(
        self,
        partition: str,
        task: str,
        samples: int | None,
        when_full: WhenFull,
        deadline: Deadline,
    ) -> None:
        """Say how many samples a task may leave unconsumed; None: as many as it likes.

        Raises:
            InputError: a consumer of the task waits for more than that.
        """
        arguments: dict[str, Any] = {"task": encode(task)}
        if samples is not None:
            arguments |= {"samples": samples, "when_full": when_full}
            arguments["generation"] = await self.reserve(partition, 1, deadline)
        reply = await self._mutate("limit", partition, arguments, LimitReply, deadline)
        if reply.code == "waiting":
            consumer = decode(reply.consumer)
            raise refusals.limit_too_small(partition, task, samples, consumer, reply.count)
        if reply.created:
            await self._list(partition, deadline)

    async def admit(
        self, partition: str, put: str, rows: int, lifetime_s: float, deadline: Deadline
    ) -> Admission:
        """Ask whether a put may make new rows. If so, room for them is kept until it has made them
        (:attr:`Write.admission` names it), or does not need it any more (:meth:`dismiss`).

        Args:
            put: a name for it.
            rows: how many.
            lifetime_s: seconds after which the room comes back in any case.

        Raises:
            InputError: no put may make so many.
            PartitionEndedError: no more are to come.
        """
        arguments = {
            "put": put,
            "rows": rows,
            "lifetime": int(1000 * lifetime_s),
            "cells": CELLS_PER_CLEAR,
        }
        freed: list[str] = []
        step = deadline
        while True:
            reply = await self._mutate("admit", partition, arguments, AdmitReply, step)
            freed += reply.freed
            for task, ids, total in reply.evicted:
                _report(partition, decode(task), ids, total)
            if reply.code != "again":
                break
            step = Deadline(max(deadline.remaining, _STEP_S))
        if reply.code in ("ended", "unexpected"):
            raise refusals.no_more_samples(partition, reply)
        if reply.code == "too_many":
            raise refusals.more_than_limit(partition, decode(reply.task), rows, reply.limit)
        full = _full(reply) if reply.code == "full" else None
        return Admission(reply.code != "unlimited", full, freed)

    async def wait_for_room(self, partition: str, after: str, deadline: Deadline) -> None:
        """Wait until something but a put happens behind the event ``after``.

        Returns without a reason now and then, and when the deadline passes.
        """
        events = self.keys.events(partition)
        await self.connection.wait_for_event(events, after, deadline, no_news=_NO_ROOM)

    def dismiss(self, partition: str, put: str) -> None:
        """A put needs no more room. Done in the background."""

        async def give_up() -> None:
            arguments = {"put": put, "rows": 0}
            await self._mutate("admit", partition, arguments, AdmitReply, Deadline(_DISMISS_S))

        self._later(give_up())

    async def evicted(self, partition: str, task: str, deadline: Deadline) -> list[int]:
        """The last samples that made room because of a task's limit, ascending."""
        members = await self.connection.command(
            "ZRANGE", self.keys.evicted(partition), 0, -1, deadline=deadline
        )
        found = (member.decode().rpartition(":") for member in members)
        return [int(sample) for name, _, sample in found if name == encode(task)]


def _full(reply: AdmitReply) -> Full:
    return Full(
        task=decode(reply.task),
        limit=reply.limit,
        unconsumed=reply.unconsumed,
        held=reply.held,
        event=reply.event,
        retry_s=None if reply.retry < 0 else reply.retry / 1000,
    )


def _report(partition: str, task: str, evicted: Sequence[int], total: int) -> None:
    # A producer that is too fast evicts with every put: warnings come ever more rarely.
    doubled = total.bit_length() > (total - len(evicted)).bit_length()
    _log.log(
        logging.WARNING if doubled else logging.INFO,
        "Samples %s of partition %r were cleared to make room: task %r is at its limit. It has "
        "lost %d so far; get_evicted lists them.",
        shorten(evicted),
        partition,
        task,
        total,
    )
