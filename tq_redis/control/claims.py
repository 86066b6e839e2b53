"""Claims: which samples a task gets, for how long, and how they come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tq_redis.control import packing, refusals
from tq_redis.control.asking import (
    ROWS_PER_CLAIM,
    UNDO_S,
    claimed,
    milliseconds,
    not_enough,
    parts_of,
    report,
)
from tq_redis.control.draws import ROWS_PER_PART, Draws, pieces_of
from tq_redis.control.keys import encode
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
)
from tq_redis.deadline import Deadline
from tq_redis.metadata.claim import Claim

ROWS_PER_PAGE = 2000
# A claim in pieces that is not complete by then comes back by itself.
_HOLD_S = 60.0


class Claims(Draws):
    """Claiming, leases, and what a task will still get."""

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
        step, need = _rows_per_script(wanted), wanted.count
        if wanted.group_size:
            step = max(1, step // wanted.group_size) * wanted.group_size
        pieces = [
            {"count": min(step, need - first), "need": need - first}
            for first in range(0, need, step)
        ]
        found = await self._take(partition, wanted, consumer, pieces, deadline)
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
                are the result. The others are held until their draws are asked for, and no longer
                than the lease, if there is one. A draw that was made meanwhile stays as it is.
        """
        if shares is not None:
            assert wanted.draw is not None
            pieces = pieces_of(shares, wanted.draw)
        else:
            pieces = [{"ids": to_ranges(page)} for page in _pages(ids, _rows_per_script(wanted))]
            pieces = pieces or [{"ids": []}]
        return await self._take(partition, wanted, consumer, pieces, deadline)

    async def ready(
        self,
        partition: str,
        wanted: Wanted,
        consumer: str,
        deadline: Deadline,
        *,
        draws: Sequence[str] = (),
    ) -> tuple[Ready | None, NotEnough]:
        """All samples that the task could claim now, for a sampler; many in several steps.

        Args:
            draws: those that the sampler makes together; :attr:`NotEnough.missing` will have those
                of them that were not made yet.

        Returns:
            The samples, or None where the draw was made already: :meth:`claim_chosen` gets its
            samples. And what to wait for if none of them is wanted.
        """
        found = Ready([], [], [])
        arguments = self._index_arguments(wanted) | {"rows": ROWS_PER_CLAIM}
        arguments |= {"consumer": encode(consumer), "count": wanted.count}
        arguments |= {"draws": list(draws)} if draws else {}
        standing: NotEnough | None = None
        more = True
        while more:
            arguments["after"] = found.ids[-1] if found.ids else 0
            reply = await self._run_again(
                partition, "list_ready", wanted.task, arguments, ListReadyReply, deadline
            )
            standing = standing or not_enough(reply)
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
            await self._shard(partition).command("HDEL", key, waiter, deadline=Deadline(UNDO_S))

        self._later(forget())

    # Leases

    async def ack(
        self, partition: str, claim: Claim, ids: Sequence[int], deadline: Deadline
    ) -> list[int]:
        """The work on these samples is done. Returns those that the claim held no longer."""
        lost: list[int] = []
        for page in _pages(ids, ROWS_PER_CLAIM):
            arguments = self._held(claim, page)
            reply = await self._mutate("ack", partition, arguments, Reply, deadline)
            lost += reply.ids
        return lost

    async def release(
        self, partition: str, claim: Claim, ids: Sequence[int], deadline: Deadline
    ) -> None:
        """Give samples back that the claim holds."""
        for page in _pages(ids, ROWS_PER_CLAIM):
            arguments = self._held(claim, page)
            reply = await self._mutate("release", partition, arguments, AsideReply, deadline)
            report(partition, claim.task, reply.aside)

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
        arguments = self._held(claim, ids) | {"lease": milliseconds(lease_s)}
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

    async def _take(
        self,
        partition: str,
        wanted: Wanted,
        consumer: str,
        pieces: Sequence[Mapping[str, Any]],
        deadline: Deadline,
    ) -> Claimed | Taken | NotEnough:
        if len(pieces) > 1 and wanted.draw is not None:
            return await self._draw(partition, wanted, consumer, pieces, deadline)
        if len(pieces) > 1:
            return await self._in_pieces(partition, wanted, consumer, pieces, deadline)
        arguments = {**self._claim_arguments(wanted, consumer), **pieces[0]}
        reply = await self._claim(partition, wanted, arguments, deadline)
        if reply.code == "drawn":
            return await self._recalled(partition, wanted, consumer, deadline)
        if reply.code == "taken":
            return Taken(reply.ids)
        return not_enough(reply) if reply.code != "ok" else claimed([reply], wanted)

    async def _in_pieces(
        self,
        partition: str,
        wanted: Wanted,
        consumer: str,
        pieces: Sequence[Mapping[str, Any]],
        deadline: Deadline,
    ) -> Claimed | Taken | NotEnough:
        lease = milliseconds(wanted.lease_s or max(_HOLD_S, 2 * deadline.remaining))
        common = self._claim_arguments(wanted, consumer) | {"lease": lease}
        got: list[ClaimReply] = []
        complete = False
        try:
            for piece in pieces:
                reply = await self._claim(partition, wanted, {**common, **piece}, deadline)
                if reply.code == "taken":
                    return Taken(reply.ids)
                if reply.code != "ok":
                    return not_enough(reply)
                got.append(reply)
            if wanted.lease_s is None:
                for reply in got:
                    lost = await self.ack(
                        partition, Claim(wanted.task, reply.claim), reply.ids, deadline
                    )
                    if lost:
                        raise refusals.lease_lost(partition, wanted.task, lost)
            complete = True
            return claimed(got, wanted)
        finally:
            if not complete and got:
                self._later(self._undo_parts(partition, wanted.task, parts_of(got)))

    async def _undo_parts(
        self, partition: str, task: str, parts: Sequence[tuple[int, list[int]]]
    ) -> None:
        """Also those that were acknowledged already. They do not count as delivered."""
        deadline = Deadline(UNDO_S)
        for number, ids in parts:
            arguments = self._held(Claim(task, number), ids)
            await self._mutate("cancel", partition, arguments, Reply, deadline)

    def _held(self, claim: Claim, ids: Sequence[int]) -> dict[str, Any]:
        return {"task": encode(claim.task), "claim": claim.number, "ids": to_ranges(ids)}


def _rows_per_script(wanted: Wanted) -> int:
    return ROWS_PER_CLAIM if wanted.draw is None else ROWS_PER_PART


def _pages(ids: Sequence[int], size: int) -> list[Sequence[int]]:
    return [ids[first : first + size] for first in range(0, len(ids), size)]
