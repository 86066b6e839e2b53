"""How a task asks for samples, and what it is told."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from tq_redis.control import packing, refusals
from tq_redis.control.blocks import BlockLists
from tq_redis.control.keys import decode, encode, index_name
from tq_redis.control.records import Claimed, NotEnough, Wanted
from tq_redis.control.replies import ClaimReply, Reply, ShortReply
from tq_redis.control.shards import Connection
from tq_redis.deadline import Deadline
from tq_redis.errors import ServerUnavailableError, TQError, shorten
from tq_redis.metadata.claim import Claim

_log = logging.getLogger(__name__)

# Samples that one claim script takes: a few milliseconds of Redis's only thread. More are taken in
# pieces, each held with a lease until all are there.
ROWS_PER_CLAIM = 1024
# Cells that a script may look at to complete an index, or to take back what leases lost.
_CELLS_PER_BUILD = 3072
UNDO_S = 60.0
_CLOSE_S = 5.0
# What one step of building an index may take, whatever is left of a call's deadline.
_STEP_S = 5.0


class Asking(BlockLists):
    """Arguments and replies of claims, and work that nobody waits for."""

    def __init__(self, connection: Connection, name: str, idle_ttl_s: int) -> None:
        super().__init__(connection, name, idle_ttl_s)
        self._undoing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def close(self) -> None:
        """Finish what cancelled calls left to be undone, and let go of connections."""
        self._closed = True
        if self._undoing:
            await asyncio.wait(self._undoing, timeout=_CLOSE_S)
        await self.connection.close()

    async def _run_again(
        self,
        partition: str,
        verb: Any,
        task: str,
        arguments: Mapping[str, Any],
        kind: type[Any],
        deadline: Deadline,
        request: str | None = None,
    ) -> Any:
        """Run a verb until it has done what there was to do before.

        It gets nearer to its end with each step, so it goes on also behind the deadline.
        """
        step = deadline
        while True:
            reply = await self._mutate(verb, partition, arguments, kind, step, request=request)
            report(partition, task, reply.aside)
            if reply.code != "again":
                return reply
            step = Deadline(max(deadline.remaining, _STEP_S))

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what the caller does not wait for; :meth:`close` does."""
        if self._closed:  # there is no connection any more; leases run out by themselves
            work.close()
            return

        async def logged() -> None:
            try:
                await work
            except TQError as error:
                _log.warning("What a call left could not be cleaned up, and expires: %s", error)

        task = asyncio.create_task(logged())
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)

    def _index_arguments(self, wanted: Wanted) -> dict[str, Any]:
        group = wanted.group_size
        arguments: dict[str, Any] = {
            "task": encode(wanted.task),
            "fields": [encode(name) for name in wanted.fields],
            "group_size": group,
            "index": index_name(wanted.task, group, wanted.fields),
            "cells": _CELLS_PER_BUILD,
        }
        if wanted.draw is not None:
            arguments |= {"draw": wanted.draw, "whole": wanted.whole or wanted.draw}
        if wanted.waiter is not None:
            name, seconds = wanted.waiter
            arguments["waiter"] = (name, int(1000 * seconds))
        return arguments

    def _claim_arguments(self, wanted: Wanted, consumer: str) -> dict[str, Any]:
        return self._index_arguments(wanted) | {
            "consumer": encode(consumer),
            "lease": milliseconds(wanted.lease_s),
            "limit": wanted.max_deliveries,
        }

    async def _claim(
        self, partition: str, wanted: Wanted, arguments: Mapping[str, Any], deadline: Deadline
    ) -> ClaimReply:
        request = uuid.uuid4().hex
        try:
            reply = await self._run_again(
                partition, "claim", wanted.task, arguments, ClaimReply, deadline, request
            )
        except (asyncio.CancelledError, ServerUnavailableError):
            # Nobody will read the reply. A draw is kept: whoever asks again gets its samples.
            if wanted.draw is None:
                self._later(self._undo(partition, wanted.task, request))
            raise
        require_rows(partition, reply)
        return reply

    async def _undo(self, partition: str, task: str, request: str, **making: str) -> None:
        """Undo a claim; with ``whole`` and ``by``, all pieces of a draw that is being made."""
        arguments = {"task": encode(task), **making}
        await self._mutate("cancel", partition, arguments, Reply, Deadline(UNDO_S), request=request)


def require_rows(partition: str, reply: ClaimReply) -> None:
    """Refuse samples of a draw that the call cannot have.

    Raises:
        SampleNotFoundError: they were cleared.
        NotReadyError: they lack a field.
    """
    if reply.code == "unknown":
        raise refusals.no_samples(partition, reply.ids)
    if reply.code == "not_ready":
        raise refusals.not_ready(partition, decode(reply.field), reply.ids)


def milliseconds(seconds: float | None) -> int:
    return 0 if seconds is None else max(1, int(1000 * seconds))


def claimed(replies: Sequence[ClaimReply], wanted: Wanted) -> Claimed:
    forms = map(packing.schema_from_json, replies[0].schema)
    leased = wanted.lease_s is not None
    return Claimed(
        [sample for reply in replies for sample in reply.ids],
        dict(zip(wanted.fields, forms, strict=True)),
        [row for reply in replies for row in packing.tag_rows(reply.tags, len(reply.ids))],
        [
            Claim(wanted.task, reply.claim) if leased else None
            for reply in replies
            for _ in reply.ids
        ],
        parts_of(replies),
    )


def parts_of(replies: Sequence[ClaimReply]) -> list[tuple[int, list[int]]]:
    return [(reply.claim, reply.ids) for reply in replies]


def not_enough(reply: ShortReply) -> NotEnough:
    return NotEnough(
        exists=reply.code != "no_partition",
        ready=reply.ready,
        groups=reply.groups,
        event=reply.event,
        left=None if reply.left < 0 else reply.left,
        complete=reply.complete,
        retry_s=None if reply.retry < 0 else reply.retry / 1000,
        limit=None if reply.limit < 0 else reply.limit,
        missing=tuple(reply.missing),
    )


def report(partition: str, task: str, aside: Sequence[int]) -> None:
    if aside:
        _log.warning(
            "Samples %s of partition %r are set aside for task %r: they were delivered too often "
            "and never acknowledged. reset_consumption gives them another chance.",
            shorten(aside),
            partition,
            task,
        )
