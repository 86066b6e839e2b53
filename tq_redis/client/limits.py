"""Limits: how far producers may run ahead of a task's consumers."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import get_args

from tq_redis.client.core import ANSWER_S, ClientCore
from tq_redis.control import refusals
from tq_redis.control.limits import WhenFull
from tq_redis.control.plane import NotAdmittedError
from tq_redis.control.records import Full, Write
from tq_redis.control.standing import standing_of
from tq_redis.deadline import Deadline
from tq_redis.errors import InputError, PartitionFullError, PartitionNotFoundError


class LimitCalls(ClientCore):
    """Declaring limits, and putting new samples within them."""

    async def limit(
        self,
        partition_id: str,
        task_name: str,
        samples: int | None,
        *,
        when_full: WhenFull = "wait",
        timeout: float | None = None,
    ) -> None:
        """Let at most so many samples be in a partition that a task has not consumed.

        Samples that are held with a lease, and those that do not have all fields yet, count; those
        that are set aside do not. Only new samples meet the limit: columns can always be added to
        samples that exist. It may be declared before the first put, and again with another number;
        with fewer than there are, nothing happens until the next put. Each task may have one.
        ``clear_partition`` forgets it, ``load_checkpoint`` keeps it.

        Args:
            partition_id: where; it need not exist yet.
            task_name: the task that is to keep up.
            samples: how many; at least one batch of the task, and one put. None: no limit any more.
            when_full: what a put of new samples does that are too many. ``wait``: it waits, until
                its deadline (:class:`PartitionFullError`). ``evict``: the oldest samples that the
                task has not claimed are cleared, in whole groups; it waits only while what
                consumers hold leaves no room. :meth:`get_evicted` lists what was cleared.
            timeout: seconds for Redis to answer.

        Raises:
            InputError: ``samples`` is not positive, ``when_full`` is neither, or a consumer of the
                task waits for a larger batch.
        """
        if samples is not None and samples < 1:
            raise InputError(f"samples must be positive, or None for no limit; got {samples}")
        if when_full not in get_args(WhenFull):
            raise InputError(f"when_full must be 'wait' or 'evict', got {when_full!r}")
        if not task_name:
            raise InputError("A limit needs task_name: consumption is kept per task")
        deadline = self._deadline(timeout)
        await self.control.limit(partition_id, task_name, samples, when_full, deadline)

    async def get_evicted(
        self, task_name: str, partition_id: str, *, timeout: float | None = None
    ) -> list[int]:
        """Ids of the samples that were cleared because the task was at its limit, ascending: of the
        4,096 latest in the partition. ``evicted:<task>`` in the summary counts all."""
        return await self.control.evicted(partition_id, task_name, self._deadline(timeout))

    # Inner parts

    async def _register(self, partition: str, write: Write, deadline: Deadline) -> list[int]:
        """Write rows without columns, when their limits let them. Returns their ids."""

        async def make(left: Write) -> list[int]:
            return await self.control.register(partition, left, deadline)

        return await self._within_limits(partition, write, make, deadline)

    async def _within_limits(
        self,
        partition: str,
        whole: Write,
        make: Callable[[Write], Awaitable[list[int]]],
        deadline: Deadline,
    ) -> list[int]:
        """Write rows, new ones when the limits of tasks let them. Returns their ids.

        Args:
            make: writes these rows and returns their ids: fewer if the last ones have to be written
                anew.
        """
        ids: list[int] = []
        while len(ids) < whole.count:  # once, as nearly always
            left = whole.part(len(ids), whole.count) if ids else whole
            room = await self._room_for(partition, left, deadline)
            made: list[int] = []
            try:
                made = await make(left.within(room))
            except NotAdmittedError:
                self._limited.add(partition)
            finally:
                self._settle(partition, left, len(made), room)
            ids += made
        return ids

    async def _room_for(self, partition: str, write: Write, deadline: Deadline) -> str | None:
        """Wait until a write may make its new rows. Returns the name under which room is kept for
        them; None: it needs none, as far as is known.

        A process learns from its first put that a partition has limits. From then on its puts ask
        before they write bytes, and hold neither bytes nor ids while they wait.
        """
        if partition not in self._limited or write.ids is not None:
            return None
        rows = await self._new_rows(partition, write, deadline)
        if not rows:
            return None
        name = uuid.uuid4().hex
        try:
            while full := await self._admit(partition, name, rows, deadline):
                await self._wait_for_room(partition, rows, full, deadline)
        except BaseException:
            self.control.dismiss(partition, name)
            raise
        return name if partition in self._limited else None

    async def _wait_for_room(
        self, partition: str, rows: int, full: Full, deadline: Deadline
    ) -> None:
        if deadline.passed:
            raise await self._no_room(partition, rows, full, deadline)
        until = deadline.remaining
        if full.retry_s is not None:
            until = min(until, full.retry_s)
        await self.control.wait_for_room(partition, full.event, Deadline(until))

    async def _admit(self, partition: str, name: str, rows: int, deadline: Deadline) -> Full | None:
        answer = Deadline(max(deadline.remaining, ANSWER_S))
        # Bytes that are not named by then are freed too.
        lifetime_s = min(max(deadline.remaining, ANSWER_S), self.config.data.orphan_grace_s)
        found = await self.control.admit(partition, name, rows, lifetime_s, answer)
        if not found.limited:
            self._limited.discard(partition)
        await self._free(partition, found.freed, answer)
        return found.full

    async def _new_rows(self, partition: str, write: Write, deadline: Deadline) -> int:
        if write.keys is None:
            return write.count
        try:
            found = await self.control.describe(partition, deadline, keys=write.keys, fields=())
        except PartitionNotFoundError:
            return write.count
        return found.ids.count(0)

    def _settle(self, partition: str, write: Write, made: int, room: str | None) -> None:
        """Others may have room that is left over: the write failed, or others made its keys."""
        if room is not None and (made < write.count or write.keys is not None):
            self.control.dismiss(partition, room)

    async def _no_room(
        self, partition: str, rows: int, full: Full, deadline: Deadline
    ) -> PartitionFullError:
        answer = Deadline(ANSWER_S)
        hint = ""
        try:
            task = (await standing_of(self.control, partition, answer)).tasks.get(full.task)
        except PartitionNotFoundError:
            task = None
        if task is None or not task.ready:
            hint = " No consumer of it has asked for samples yet."
        elif task.waiters and task.waiters[0].count + rows - 1 > full.limit:
            batch = task.waiters[0].count
            hint = (
                f" Its consumer waits for {batch}: puts of {rows} samples and batches of {batch} "
                f"both go on with a limit of {batch + rows - 1} or more."
            )
        return refusals.full(partition, rows, full, hint, deadline)
