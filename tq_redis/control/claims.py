"""Claims: which samples a task gets, for how long, and how they come back."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tq_redis.control import packing, refusals
from tq_redis.control.blocks import BlockLists
from tq_redis.control.keys import decode, encode, index_name
from tq_redis.control.ranges import to_ranges
from tq_redis.control.records import Claimed, NotEnough, Ready, Taken, Wanted
from tq_redis.control.replies import (
    AsideReply,
    ClaimReply,
    ExpectReply,
    ListReadyReply,
    RenewReply,
    Reply,
    ResetReply,
    ShortReply,
)
from tq_redis.control.shards import Connection
from tq_redis.deadline import Deadline
from tq_redis.errors import ServerUnavailableError, TQError, shorten
from tq_redis.metadata.claim import Claim

_log = logging.getLogger(__name__)

# Samples that one claim script takes: a few milliseconds of Redis's only thread. More are taken in
# pieces, each held with a lease until all are there.
ROWS_PER_CLAIM = 1024
# A batch that is remembered under a name is taken by one script whatever its size, so that it is
# drawn once; the largest keeps Redis busy for some 30 ms.
ROWS_PER_DRAW = 8192
ROWS_PER_PAGE = 2000
# Cells that a script may look at to complete an index, or to take back what leases lost.
_CELLS_PER_BUILD = 2048
_HOLD_S = 60.0
_UNDO_S = 60.0
_CLOSE_S = 5.0
# What one step of building an index may take, whatever is left of a call's deadline.
_STEP_S = 5.0


class Claims(BlockLists):
    """Claiming, leases, and what a task will still get."""

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

    async def claim(
        self, partition: str, wanted: Wanted, consumer: str, deadline: Deadline
    ) -> Claimed | NotEnough:
        """Take samples that have all the fields and that the task may claim: exactly as many as
        are wanted, or none.

        If the call is cancelled or fails, what it took is given back.

        Raises:
            SampleNotFoundError: samples of the draw were cleared.
            NotReadyError: they lack a field that this call asks for.
        """
        need = wanted.count
        if need <= ROWS_PER_CLAIM or wanted.draw is not None:
            arguments = self._claim_arguments(wanted, consumer) | {"count": need, "need": need}
            reply = await self._claim(partition, wanted, arguments, deadline)
            return _not_enough(reply) if reply.code != "ok" else _claimed([reply], wanted)
        step = ROWS_PER_CLAIM
        if wanted.group_size:
            step = max(1, step // wanted.group_size) * wanted.group_size
        pieces = [
            {"count": min(step, need - first), "need": need - first}
            for first in range(0, need, step)
        ]
        found = await self._in_pieces(partition, wanted, consumer, pieces, deadline)
        assert not isinstance(found, Taken)  # only chosen samples can be
        return found

    async def claim_chosen(
        self,
        partition: str,
        wanted: Wanted,
        consumer: str,
        ids: Sequence[int],
        deadline: Deadline,
        *,
        shares: Mapping[str, Sequence[int]] | None = None,
    ) -> Claimed | Taken | NotEnough:
        """Take these samples, all or none. Other arguments as for :meth:`claim`.

        Args:
            ids: distinct, as a sampler chose them among :meth:`ready` ones.
            shares: draw -> its part of ``ids``; ``wanted.draw`` is one of them, and its samples
                are the result. The others are held until their draws are asked for.
        """
        if len(ids) <= ROWS_PER_CLAIM or wanted.draw is not None:
            arguments = self._claim_arguments(wanted, consumer) | {"ids": to_ranges(ids)}
            if shares is not None:
                arguments["shares"] = [(name, to_ranges(rows)) for name, rows in shares.items()]
            reply = await self._claim(partition, wanted, arguments, deadline)
            if reply.code == "taken":
                return Taken(reply.ids)
            return _not_enough(reply) if reply.code != "ok" else _claimed([reply], wanted)
        pieces = [
            {"ids": to_ranges(ids[first : first + ROWS_PER_CLAIM])}
            for first in range(0, len(ids), ROWS_PER_CLAIM)
        ]
        return await self._in_pieces(partition, wanted, consumer, pieces, deadline)

    async def ready(
        self, partition: str, wanted: Wanted, consumer: str, deadline: Deadline
    ) -> tuple[Ready | None, NotEnough]:
        """All samples that the task could claim now, for a sampler; many in several steps.

        Returns:
            The samples, or None where the draw was made already: :meth:`claim_chosen` gets its
            samples. And what to wait for if none of them is wanted.
        """
        found = Ready([], [], [])
        arguments = self._index_arguments(wanted) | {"rows": ROWS_PER_PAGE}
        arguments |= {"consumer": encode(consumer), "count": wanted.count}
        standing: NotEnough | None = None
        more = True
        while more:
            arguments["after"] = found.ids[-1] if found.ids else 0
            reply = await self._run_again(
                partition, "list_ready", wanted.task, arguments, ListReadyReply, deadline
            )
            standing = standing or _not_enough(reply)
            if reply.code != "ok":
                return (None if reply.code == "drawn" else found), standing
            found.ids.extend(reply.ids)
            found.groups.extend(map(packing.group_name, reply.group_of))
            found.tags.extend(packing.tag_rows(reply.tags, len(reply.ids)))
            more = reply.more
        assert standing is not None
        return found, replace(standing, ready=len(found.ids))

    def take_back(self, partition: str, wanted: Wanted, found: Claimed) -> None:
        """The consumer went away before it got these: give them back, in the background.

        A draw is kept: whoever asks again gets its samples.
        """
        if wanted.draw is None:
            self._later(self._undo_parts(partition, wanted.task, found.parts))

    async def wait(self, partition: str, after: str, deadline: Deadline) -> None:
        """Wait until something is put, returned or cleared behind the event ``after``.

        Returns without a reason now and then, and when the deadline passes.
        """
        await self.connection.wait_for_event(self.keys.events(partition), after, deadline)

    def forget_waiter(self, partition: str, waiter: str) -> None:
        """Take a call out of the list of those that wait. Done in the background."""

        async def forget() -> None:
            key = self.keys.waiters(partition)
            await self._shard(partition).command("HDEL", key, waiter, deadline=Deadline(_UNDO_S))

        self._later(forget())

    # Leases

    async def ack(
        self, partition: str, claim: Claim, ids: Sequence[int], deadline: Deadline
    ) -> list[int]:
        """The work on these samples is done. Returns those that the claim held no longer."""
        lost: list[int] = []
        for page in _pages(ids):
            arguments = self._held(claim, page)
            reply = await self._mutate("ack", partition, arguments, Reply, deadline)
            lost += reply.ids
        return lost

    async def release(
        self, partition: str, claim: Claim, ids: Sequence[int], deadline: Deadline
    ) -> None:
        """Give samples back that the claim holds."""
        for page in _pages(ids):
            arguments = self._held(claim, page)
            reply = await self._mutate("release", partition, arguments, AsideReply, deadline)
            _report(partition, claim.task, reply.aside)

    async def renew(
        self,
        partition: str,
        claim: Claim,
        lease_s: float | None,
        deadline: Deadline,
        *,
        ids: Sequence[int] = (),
    ) -> float | None:
        """Let the lease run from now on again, for so many seconds; None: the claim has ended.

        Args:
            ids: samples of the claim. Where it holds none of them any more, it has ended, or is
                another claim of that number: they are counted anew in a partition made anew.
        """
        arguments = self._held(claim, ids) | {"lease": _milliseconds(lease_s)}
        reply = await self._mutate("renew", partition, arguments, RenewReply, deadline)
        return reply.lease / 1000 if reply.code == "ok" else None

    # What is to come, and to come again

    async def reset_consumption(self, partition: str, task: str, deadline: Deadline) -> int:
        """Let the task claim all samples again; open claims are lost. Returns how many it can.

        Raises:
            PartitionNotFoundError
        """
        arguments = {"task": encode(task), "after": 0, "upto": 0, "rows": ROWS_PER_PAGE}
        returned, done = 0, False
        while not done:
            reply = await self._mutate(
                "reset_consumption", partition, arguments, ResetReply, deadline
            )
            if reply.code == "no_partition":
                raise refusals.no_partition(partition, await self.partitions(deadline))
            returned += reply.rows
            done = reply.done
            arguments |= {"after": reply.after, "upto": reply.upto}
        return returned

    async def expect(self, partition: str, samples: int | None, deadline: Deadline) -> None:
        """Say how many samples will be made in all; None: no more than there are.

        Raises:
            PartitionEndedError: more are made already, or the partition has ended.
        """
        arguments: dict[str, Any] = {"generation": await self.reserve(partition, 1, deadline)}
        arguments |= {"ended": True} if samples is None else {"samples": samples}
        reply = await self._mutate("expect", partition, arguments, ExpectReply, deadline)
        if reply.code != "ok":
            raise refusals.cannot_expect(partition, samples, reply)
        if reply.created:
            await self._list(partition, deadline)

    # Inner parts

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
        if reply.code == "unknown":
            raise refusals.no_samples(partition, reply.ids)
        if reply.code == "not_ready":
            raise refusals.not_ready(partition, decode(reply.field), reply.ids)
        return reply

    async def _in_pieces(
        self,
        partition: str,
        wanted: Wanted,
        consumer: str,
        pieces: Sequence[Mapping[str, Any]],
        deadline: Deadline,
    ) -> Claimed | Taken | NotEnough:
        lease = _milliseconds(wanted.lease_s or max(_HOLD_S, 2 * deadline.remaining))
        common = self._claim_arguments(wanted, consumer) | {"lease": lease}
        got: list[ClaimReply] = []
        complete = False
        try:
            for piece in pieces:
                reply = await self._claim(partition, wanted, {**common, **piece}, deadline)
                if reply.code == "taken":
                    return Taken(reply.ids)
                if reply.code != "ok":
                    return _not_enough(reply)
                got.append(reply)
            if wanted.lease_s is None:
                for reply in got:
                    lost = await self.ack(
                        partition, Claim(wanted.task, reply.claim), reply.ids, deadline
                    )
                    if lost:
                        raise refusals.lease_lost(partition, wanted.task, lost)
            complete = True
            return _claimed(got, wanted)
        finally:
            if not complete and got:
                self._later(self._undo_parts(partition, wanted.task, _parts(got)))

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
            _report(partition, task, reply.aside)
            if reply.code != "again":
                return reply
            step = Deadline(max(deadline.remaining, _STEP_S))

    async def _undo(self, partition: str, task: str, request: str) -> None:
        arguments = {"task": encode(task)}
        deadline = Deadline(_UNDO_S)
        await self._mutate("cancel", partition, arguments, Reply, deadline, request=request)

    async def _undo_parts(
        self, partition: str, task: str, parts: Sequence[tuple[int, list[int]]]
    ) -> None:
        """Also those that were acknowledged already. They do not count as delivered."""
        deadline = Deadline(_UNDO_S)
        for number, ids in parts:
            arguments = self._held(Claim(task, number), ids)
            await self._mutate("cancel", partition, arguments, Reply, deadline)

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
            "build": max(1, _CELLS_PER_BUILD // (len(wanted.fields) + (3 if group else 2))),
        }
        if wanted.draw is not None:
            arguments["draw"] = wanted.draw
        if wanted.waiter is not None:
            name, seconds = wanted.waiter
            arguments["waiter"] = (name, int(1000 * seconds))
        return arguments

    def _claim_arguments(self, wanted: Wanted, consumer: str) -> dict[str, Any]:
        return self._index_arguments(wanted) | {
            "consumer": encode(consumer),
            "lease": _milliseconds(wanted.lease_s),
            "limit": wanted.max_deliveries,
        }

    def _held(self, claim: Claim, ids: Sequence[int]) -> dict[str, Any]:
        return {"task": encode(claim.task), "claim": claim.number, "ids": to_ranges(ids)}


def _milliseconds(seconds: float | None) -> int:
    return 0 if seconds is None else max(1, int(1000 * seconds))


def _pages(ids: Sequence[int]) -> list[Sequence[int]]:
    return [ids[first : first + ROWS_PER_CLAIM] for first in range(0, len(ids), ROWS_PER_CLAIM)]


def _claimed(replies: Sequence[ClaimReply], wanted: Wanted) -> Claimed:
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
        _parts(replies),
    )


def _parts(replies: Sequence[ClaimReply]) -> list[tuple[int, list[int]]]:
    return [(reply.claim, reply.ids) for reply in replies]


def _not_enough(reply: ShortReply) -> NotEnough:
    return NotEnough(
        exists=reply.code != "no_partition",
        ready=reply.ready,
        groups=reply.groups,
        event=reply.event,
        left=None if reply.left < 0 else reply.left,
        complete=reply.complete,
        retry_s=None if reply.retry < 0 else reply.retry / 1000,
    )


def _report(partition: str, task: str, aside: Sequence[int]) -> None:
    if aside:
        _log.warning(
            "Samples %s of partition %r are set aside for task %r: they were delivered too often "
            "and never acknowledged. reset_consumption gives them another chance.",
            shorten(aside),
            partition,
            task,
        )
