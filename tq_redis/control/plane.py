"""One typed method per Lua verb: who has what, and who may take it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from tq_redis.control import packing, refusals
from tq_redis.control.claims import ROWS_PER_PAGE
from tq_redis.control.keys import decode, encode
from tq_redis.control.limits import CELLS_PER_CLEAR, Limits
from tq_redis.control.pages import pages
from tq_redis.control.ranges import from_ranges, to_ranges
from tq_redis.control.records import Changes, Lost, Rows, Run, Tags, Version, Write, Written
from tq_redis.control.replies import (
    ClearPartitionReply,
    ClearSamplesReply,
    DescribeReply,
    ListChangesReply,
    LocateReply,
    MarkLostReply,
    ProduceReply,
    Reply,
)
from tq_redis.control.snapshots import Snapshots
from tq_redis.deadline import Deadline

# Cells (rows x fields) that one script handles: some five milliseconds of Redis's only thread.
CELLS_PER_CALL = 8192
# To write a cell costs more than to read it.
_CELLS_PER_PUT = 3072


def rows_per_put(write: Write, fields: int) -> int:
    """Rows that one :meth:`ControlPlane.produce` should have, for a write of so many fields.

    A row costs about as much as three cells, and eight where it may be in a group or be there
    already. A tag costs as much as a field.
    """
    plain = write.ids is None and write.keys is None and write.groups is None
    tags = {name for row in write.tags or () for name in row}
    return max(1, _CELLS_PER_PUT // (fields + len(tags) + (3 if plain else 8)))


class BlockGoneError(Exception):
    """All rows that earlier steps of a put wrote were cleared, and their block with them. The
    rest of the put needs a block of its own."""


class NotAdmittedError(Exception):
    """New rows in a partition where a task has a limit, and :meth:`ControlPlane.admit` has kept no
    room for them."""


class ControlPlane(Limits, Snapshots):
    """The state of one namespace in Redis.

    Every call may raise the errors of :class:`RedisConnection`.
    """

    # Samples

    async def produce(self, partition: str, write: Write, deadline: Deadline) -> Written:
        """Write rows in one atomic step.

        Raises:
            InputError: a tag is not JSON.
            PartitionNotFoundError, SampleNotFoundError: ``write.ids`` are not there.
            SchemaConflictError: a row has the field with another dtype.
            PartitionEndedError: new rows where no more are to come.
            BlockGoneError: a block that an earlier step named is not used any more.
            NotAdmittedError: a task has a limit, and no room is kept for the new rows.
        """
        arguments = packing.write_arguments(write)
        if write.ids is None:
            first = write.first_id
            if first is None:
                first = await self.reserve(partition, write.count, deadline)
            arguments["first"] = first
        reply = await self._mutate("produce", partition, arguments, ProduceReply, deadline)
        if reply.code == "conflict":
            raise refusals.conflict(partition, reply)
        if reply.code == "no_partition" and write.ids is None:
            await self._unlist(partition, deadline)  # reserving ids has listed it
        if reply.code == "gone":
            raise BlockGoneError(partition)
        if reply.code == "limited":
            raise NotAdmittedError(partition)
        if reply.code in ("ended", "unexpected"):
            raise refusals.no_more_samples(partition, reply)
        await self._check(reply, partition, deadline)
        if reply.created:
            # Listed before the call too, but a clear may have come in between.
            await self._list(partition, deadline)
        return Written(from_ranges(reply.ids), reply.blocks, reply.freed)

    async def register(self, partition: str, write: Write, deadline: Deadline) -> list[int]:
        """Write rows without columns, many in several steps. Returns their ids: fewer than there
        are rows if those behind them are not admitted any more.

        Raises:
            The errors of :meth:`produce`; rows of earlier steps are written.
        """
        step = rows_per_put(write, 0)
        ids: list[int] = []
        for first in range(0, write.count, step):
            part = write.part(first, min(first + step, write.count))
            try:
                ids += (await self.produce(partition, part, deadline)).ids
            except NotAdmittedError:
                if first == 0:
                    raise
                break
        return ids

    async def set_tags(
        self, partition: str, ids: Sequence[int], tags: Sequence[Tags], deadline: Deadline
    ) -> None:
        """Give rows exactly these tags; many rows in several steps.

        Raises:
            InputError: a tag is not JSON.
            PartitionNotFoundError, SampleNotFoundError
        """
        names = {name for row in tags for name in row}
        step = max(1, CELLS_PER_CLEAR // (len(names) + 1))
        for first in range(0, len(ids), step):
            page = slice(first, first + step)
            arguments = {"ids": to_ranges(ids[page]), "tags": packing.tag_columns(tags[page])}
            reply = await self._mutate("set_tags", partition, arguments, Reply, deadline)
            await self._check(reply, partition, deadline)

    # Reading

    async def locate(
        self, partition: str, ids: Sequence[int], fields: Sequence[str], deadline: Deadline
    ) -> dict[str, list[Run]]:
        """Where the cells are: per field, runs ``(handle, first row in the block, rows)``.

        Runs stand in the order of ``ids``.

        Raises:
            PartitionNotFoundError, SampleNotFoundError, FieldNotFoundError, NotReadyError
        """
        where: dict[str, list[Run]] = {name: [] for name in fields}
        step = max(1, CELLS_PER_CALL // max(1, len(fields)))
        for first in range(0, len(ids), step):
            part = ids[first : first + step]
            arguments = {"ids": to_ranges(part), "fields": [encode(name) for name in fields]}
            reply = await self._run("locate", partition, arguments, LocateReply, deadline)
            if reply.code == "not_ready":
                name = decode(reply.field)
                await self.require_field(partition, name, deadline)
                raise refusals.not_ready(partition, name, reply.ids)
            await self._check(reply, partition, deadline)
            packing.append_runs(where, fields, reply)
        return where

    async def describe(
        self,
        partition: str,
        deadline: Deadline,
        *,
        ids: Sequence[int] | None = None,
        keys: Sequence[str] | None = None,
        fields: Sequence[str] | None = None,
        task: str | None = None,
        groups: bool = False,
    ) -> Rows:
        """What is known of rows: those named by ``ids`` or ``keys``, else all of the partition.

        Args:
            fields: the fields asked about; None: all.
            task: whose consumption is asked about.
            groups: whether groups are asked about.

        Raises:
            PartitionNotFoundError
        """
        rows = Rows([], [], [], {}, {}, [], [])
        named = ids if ids is not None else keys
        if named is not None and not named:
            return rows
        select: dict[str, Any] = {} if task is None else {"task": encode(task)}
        if fields is not None:
            select["fields"] = [encode(name) for name in fields]
        select["groups"] = groups
        async with aclosing(self._described(partition, select, deadline, ids, keys)) as found:
            async for reply in found:
                packing.append_rows(rows, reply)
        return rows

    def _described(
        self,
        partition: str,
        common: Mapping[str, Any],
        deadline: Deadline,
        ids: Sequence[int] | None = None,
        keys: Sequence[str] | None = None,
    ) -> AsyncGenerator[DescribeReply]:
        named = ids if ids is not None else keys
        done = 0

        async def ask(after: int) -> DescribeReply:
            select: dict[str, Any] = {"after": after}
            if ids is not None:
                select = {"ids": to_ranges(ids[done : done + ROWS_PER_PAGE])}
            elif keys is not None:
                select = {"keys": list(keys[done : done + ROWS_PER_PAGE])}
            arguments = {"cells": CELLS_PER_CALL, **common, **select}
            reply = await self._run("describe", partition, arguments, DescribeReply, deadline)
            await self._check(reply, partition, deadline)
            return reply

        def following(reply: DescribeReply) -> Coroutine[Any, Any, DescribeReply] | None:
            nonlocal done
            done += len(reply.ids)
            more = reply.more if named is None else done < len(named)
            return ask(reply.ids[-1]) if more else None

        return pages(ask(0), following)

    async def changes(self, partition: str, since: Version | None, deadline: Deadline) -> Changes:
        """Keys that were made, cleared, or whose tags changed, since a version; all keys where that
        is not known.

        Raises:
            PartitionNotFoundError
        """
        version = since or Version("", 0)
        samples: dict[str, int] = {}
        tags: dict[str, dict[str, Any]] = {}

        async def ask(since: Version) -> ListChangesReply:
            arguments = {
                "cells": CELLS_PER_CALL,
                "generation": since.generation,
                "since": since.number,
            }
            reply = await self._run(
                "list_changes", partition, arguments, ListChangesReply, deadline
            )
            await self._check(reply, partition, deadline)
            return reply

        def following(reply: ListChangesReply) -> Coroutine[Any, Any, ListChangesReply] | None:
            return ask(Version(reply.generation, reply.upto)) if reply.more else None

        async with aclosing(pages(ask(version), following)) as changed:
            async for reply in changed:
                version = Version(reply.generation, reply.upto)
                if reply.whole:
                    # What changes meanwhile comes after this version, and is told again.
                    return await self._all_keys(partition, version, deadline)
                samples |= zip(reply.keys, reply.ids, strict=True)
                tags |= zip(reply.keys, packing.tag_rows(reply.tags, len(reply.keys)), strict=True)
        return Changes(version, False, samples, tags)

    async def _all_keys(self, partition: str, version: Version, deadline: Deadline) -> Changes:
        samples: dict[str, int] = {}
        tags: dict[str, dict[str, Any]] = {}
        async with aclosing(self._described(partition, {"fields": []}, deadline)) as found:
            async for reply in found:
                samples |= zip(reply.keys, reply.ids, strict=True)
                tags |= zip(reply.keys, packing.tag_rows(reply.tags, len(reply.keys)), strict=True)
        for known in samples, tags:
            known.pop("", None)  # of samples without a key
        return Changes(version, True, samples, tags)

    async def summary(self, partition: str, deadline: Deadline) -> dict[str, int | str]:
        """The summary hash, names decoded.

        Raises:
            PartitionNotFoundError
        """
        found = await self.connection.command(
            "HGETALL", self.keys.summary(partition), deadline=deadline
        )
        if not found:
            raise refusals.no_partition(partition, await self.partitions(deadline))
        return {
            decode(name.decode()): packing.number_or_text(value.decode())
            for name, value in found.items()
        }

    async def read(self, partition: str, *commands: Sequence[Any], deadline: Deadline) -> list[Any]:
        """Replies of plain commands that read keys of a partition, in one round trip."""
        return await self._shard(partition).commands(*commands, deadline=deadline)

    async def fields(self, partition: str, deadline: Deadline) -> list[str]:
        """Names of the partition's fields, sorted; empty where it does not exist."""
        names = await self.connection.command(
            "HKEYS", self.keys.schema(partition), deadline=deadline
        )
        return sorted(decode(name.decode()) for name in names)

    async def require_field(self, partition: str, name: str, deadline: Deadline) -> None:
        """Check that a field exists.

        Raises:
            FieldNotFoundError: no sample of the partition ever had it.
        """
        known = await self.fields(partition, deadline)
        if name not in known:
            raise refusals.no_field(partition, name, known)

    # Losing and clearing

    async def mark_lost(
        self,
        partition: str,
        ids: Sequence[int],
        fields: Sequence[str],
        handles: Sequence[str],
        deadline: Deadline,
    ) -> Lost:
        """Note that these blocks are gone: cells that lie in them are not produced any more, and
        the tasks that wrote them may claim these rows again.

        What other tasks claimed stays claimed. Cells that were written again since, into other
        blocks, stay; rows that were cleared are passed over. Many rows in several steps; can be
        repeated.

        Args:
            ids: rows that have cells in the blocks.
            fields: the fields of these cells, distinct.
        """
        lost: dict[str, set[int]] = {}
        tasks: dict[str, set[int]] = {}
        alone: set[int] = set()
        freed: list[str] = []
        for first in range(0, len(handles), ROWS_PER_PAGE):
            common = {
                "fields": [encode(name) for name in fields],
                "handles": list(handles[first : first + ROWS_PER_PAGE]),
                "cells": CELLS_PER_CLEAR,
            }
            left = sorted(set(ids))
            while left:
                arguments = common | {"ids": to_ranges(left[:ROWS_PER_PAGE])}
                reply = await self._mutate(
                    "mark_lost", partition, arguments, MarkLostReply, deadline
                )
                for found, page in ((lost, reply.lost), (tasks, reply.tasks)):
                    for name, ranges in page:
                        found.setdefault(decode(name), set()).update(from_ranges(ranges))
                alone.update(from_ranges(reply.left))
                freed += reply.freed
                del left[: reply.done]
        return Lost(_sorted(lost), _sorted(tasks), sorted(alone), freed)

    async def clear_samples(
        self, partition: str, ids: Sequence[int], deadline: Deadline
    ) -> list[str]:
        """Forget rows; unknown ones are passed over. Returns handles of blocks to free."""
        left = sorted(set(ids))
        freed: list[str] = []
        while left:
            arguments = {"ids": to_ranges(left[:ROWS_PER_PAGE]), "cells": CELLS_PER_CLEAR}
            reply = await self._mutate(
                "clear_samples", partition, arguments, ClearSamplesReply, deadline
            )
            freed += reply.freed
            del left[: reply.done]
        return freed

    async def clear_partition(
        self, partition: str, deadline: Deadline, *, keep_limits: bool = False
    ) -> list[str]:
        """Forget a partition; an unknown one is passed over.

        It is gone for everybody when this returns.

        Args:
            keep_limits: where its tasks have limits, they stay, in a partition made anew.

        Returns:
            The generations whose blocks are to be freed, for :meth:`trash`.
        """
        arguments: dict[str, Any] = {}
        if keep_limits:
            arguments["generation"] = await self.reserve(partition, 1, deadline)
        reply = await self._mutate(
            "clear_partition", partition, arguments, ClearPartitionReply, deadline
        )
        await self._unlist(partition, deadline)
        return reply.trash

    # Refusals

    async def _check(self, reply: Reply, partition: str, deadline: Deadline) -> None:
        if reply.code == "no_partition":
            raise refusals.no_partition(partition, await self.partitions(deadline))
        if reply.code == "unknown":
            raise refusals.no_samples(partition, reply.ids)


def _sorted(rows: Mapping[str, set[int]]) -> dict[str, list[int]]:
    return {name: sorted(found) for name, found in rows.items()}
