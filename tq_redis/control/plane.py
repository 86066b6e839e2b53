"""One typed method per Lua verb: who has what, and who may take it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from tq_redis.control.connection import RedisConnection
from tq_redis.control.keys import Keys, decode, encode
from tq_redis.control.ranges import from_ranges, to_ranges
from tq_redis.control.replies import (
    ClaimReply,
    ClearReply,
    DescribeReply,
    LocateReply,
    ProduceReply,
    Reply,
)
from tq_redis.control.replies import decode as decode_reply
from tq_redis.control.scripts import Verb
from tq_redis.deadline import Deadline
from tq_redis.errors import (
    FieldNotFoundError,
    NotReadyError,
    PartitionNotFoundError,
    SampleNotFoundError,
    SchemaConflictError,
    nearest,
    shorten,
)
from tq_redis.metadata.schema import FieldSchema

# Cells (rows x fields) that one script handles: a few milliseconds of Redis's only thread.
CELLS_PER_CALL = 8192
ROWS_PER_PAGE = 2000
# Redis keeps a reply for its replay until the call has given up for sure.
_REPLAY_GRACE_S = 30

Tags = Mapping[str, Any]
Run = tuple[str, int, int]
R = TypeVar("R", bound=Reply)


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """A block that a put wrote, as :meth:`ControlPlane.produce` records it.

    Attributes:
        handle: the data plane's name for it.
        nbytes: its size in bytes.
        first_row: the first row of the put that it holds.
        rows: how many rows it holds.
        dtypes: field -> dtype (empty for non-tensor values), for every field it holds.
    """

    handle: str
    nbytes: int
    first_row: int
    rows: int
    dtypes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Write:
    """The rows of one produce call and what is written of them.

    Either ``ids`` names existing rows, or ``count`` new ones are made (with ``keys``: rows are
    found by key, and made where the key is new).
    """

    count: int
    ids: Sequence[int] | None = None
    keys: Sequence[str] | None = None
    groups: Sequence[str] | None = None
    tags: Sequence[Tags] | None = None
    blocks: Sequence[BlockEntry] = ()
    schema: Mapping[str, FieldSchema] = field(default_factory=dict[str, FieldSchema])
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """Attributes:
    ids: the row's sample ids, in the order of the put.
    freed: handles of blocks whose last cell this call replaced.
    """

    ids: list[int]
    freed: list[str]


@dataclass(frozen=True, slots=True)
class Claimed:
    """Attributes:
    ids: sample ids, ascending, or group by group.
    schema: the form of each field asked for.
    tags: one dict per row.
    """

    ids: list[int]
    schema: dict[str, FieldSchema]
    tags: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class NotEnough:
    """Fewer samples can be claimed than were asked for.

    Attributes:
        exists: whether the partition exists.
        ready: samples that could be claimed.
        groups: groups that are ready as a whole.
        event: what to wait behind.
    """

    exists: bool
    ready: int
    groups: int
    event: str


@dataclass(frozen=True, slots=True)
class Rows:
    """What is known of some rows.

    Attributes:
        ids: sample ids; 0 where a user key was not found.
        keys: user keys, None where a row has none.
        tags: one dict per row.
        schema: the fields that were asked about and that the partition has.
        produced: field -> one flag per row.
        consumed: one flag per row, if a task was named.
    """

    ids: list[int]
    keys: list[str | None]
    tags: list[dict[str, Any]]
    schema: dict[str, FieldSchema]
    produced: dict[str, list[bool]]
    consumed: list[bool]

    def common_fields(self) -> list[str]:
        """Fields that every row has, sorted."""
        return sorted(name for name, flags in self.produced.items() if all(flags))


def _schema_from_json(text: str) -> FieldSchema:
    return msgspec.json.decode(text, type=FieldSchema)


class ControlPlane:
    """The state of one namespace in Redis.

    Args:
        connection: to the server that holds it.
        namespace: one per training run.
        idle_ttl_s: lifetime of a partition that nobody writes to or claims from, in seconds.
    """

    def __init__(self, connection: RedisConnection, namespace: str, idle_ttl_s: int) -> None:
        self.connection = connection
        self.keys = Keys(namespace)
        self._idle_ttl_s = idle_ttl_s

    # Samples

    async def reserve(self, partition: str, count: int, deadline: Deadline) -> int:
        """Draw ``count`` consecutive sample ids and return the first. Ids are never reused."""
        last, *_ = await self.connection.commands(
            ("INCRBY", self.keys.next_sample, count), *self._listing(partition), deadline=deadline
        )
        return int(last) - count + 1

    async def produce(self, partition: str, write: Write, deadline: Deadline) -> Written:
        """Write rows in one atomic step.

        Raises:
            PartitionNotFoundError, SampleNotFoundError: ``write.ids`` are not there.
            SchemaConflictError: a row has the field with another dtype.
        """
        arguments: dict[str, Any] = {
            "now": int(time.time()),
            "overwrite": write.overwrite,
            "blocks": [
                (
                    block.handle,
                    block.nbytes,
                    block.first_row,
                    block.rows,
                    [encode(name) for name in block.dtypes],
                    list(block.dtypes.values()),
                )
                for block in write.blocks
            ],
            "schema": [
                text
                for name, form in write.schema.items()
                for text in (encode(name), msgspec.json.encode(form).decode())
            ],
            "tags": _tag_columns(write.tags or ()),
        }
        if write.ids is not None:
            arguments["ids"] = to_ranges(write.ids)
        else:
            arguments["first"] = await self.reserve(partition, write.count, deadline)
            arguments["count"] = write.count
            if write.keys is not None:
                arguments["keys"] = list(write.keys)
            if write.groups is not None:
                arguments["groups"] = list(write.groups)
        reply = await self._mutate("produce", partition, arguments, ProduceReply, deadline)
        if reply.code == "conflict":
            name = decode(reply.field)
            raise SchemaConflictError(
                f"Field {name!r} of partition {partition!r} is {reply.old or 'non-tensor'} in row "
                f"{reply.ids[0]} and would become {reply.new or 'non-tensor'}. "
                f"Convert the column, or pass overwrite=True.",
                partition=partition,
                fields=[name],
                rows=reply.ids,
            )
        await self._check(reply, partition, deadline)
        if reply.created:
            # Listed before the call too, but a clear may have come in between.
            await self.connection.commands(*self._listing(partition), deadline=deadline)
        return Written(from_ranges(reply.ids), reply.freed)

    async def forget_freed(self, partition: str, handles: Sequence[str], deadline: Deadline) -> None:
        """The bytes of these blocks were freed."""
        if handles:
            await self.connection.command(
                "SREM", self.keys.freed(partition), *handles, deadline=deadline
            )

    # Claims

    async def claim(
        self,
        partition: str,
        task: str,
        fields: Sequence[str],
        count: int,
        consumer: str,
        deadline: Deadline,
        *,
        group_size: int = 0,
    ) -> Claimed | NotEnough:
        """Take ``count`` samples that have all ``fields`` and that ``task`` has not consumed.

        With ``group_size`` only whole groups are taken.
        """
        arguments = {
            "task": encode(task),
            "fields": [encode(name) for name in fields],
            "count": count,
            "group_size": group_size,
            "consumer": consumer,
            "build": max(1, CELLS_PER_CALL // (len(fields) + 1)),
        }
        reply = await self._mutate("claim", partition, arguments, ClaimReply, deadline)
        while reply.code == "building":
            reply = await self._mutate("claim", partition, arguments, ClaimReply, deadline)
        if reply.code == "ok":
            forms = [_schema_from_json(text) for text in reply.schema]
            tags = _tag_rows(reply.tags, len(reply.ids))
            return Claimed(reply.ids, dict(zip(fields, forms, strict=True)), tags)
        return NotEnough(reply.code == "short", reply.ready, reply.groups, reply.event)

    async def wait(self, partition: str, after: str, deadline: Deadline) -> None:
        """Return when something was put or cleared since ``after``, or the deadline passes."""
        await self.connection.wait_for_event(self.keys.events(partition), after, deadline)

    # Reading

    async def locate(
        self, partition: str, ids: Sequence[int], fields: Sequence[str], deadline: Deadline
    ) -> dict[str, list[Run]]:
        """Where the cells are: per field, runs ``(handle, first row in the block, rows)`` in the
        order of ``ids``.

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
                await self._raise_not_ready(partition, decode(reply.field), reply.ids, deadline)
            await self._check(reply, partition, deadline)
            _append_runs(where, fields, reply)
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
    ) -> Rows:
        """What is known of rows: those named by ``ids`` or ``keys``, else all of the partition.

        Args:
            fields: the fields asked about; None: all.
            task: whose consumption is asked about.

        Raises:
            PartitionNotFoundError
        """
        rows = Rows([], [], [], {}, {}, [])
        common: dict[str, Any] = {}
        if fields is not None:
            common["fields"] = [encode(name) for name in fields]
        if task is not None:
            common["task"] = encode(task)
        if ids is not None or keys is not None:
            named: Sequence[Any] = ids if ids is not None else keys or ()
            for first in range(0, len(named), ROWS_PER_PAGE):
                part = named[first : first + ROWS_PER_PAGE]
                select = {"ids": to_ranges(part)} if ids is not None else {"keys": list(part)}
                await self._describe_page(partition, common | select, rows, deadline)
            return rows
        after = 0
        while True:
            select = {"after": after, "count": ROWS_PER_PAGE}
            got = await self._describe_page(partition, common | select, rows, deadline)
            if got < ROWS_PER_PAGE:
                return rows
            after = rows.ids[-1]

    async def summary(self, partition: str, deadline: Deadline) -> dict[str, int | str]:
        """The summary hash, names decoded.

        Raises:
            PartitionNotFoundError
        """
        found = await self.connection.command(
            "HGETALL", self.keys.summary(partition), deadline=deadline
        )
        if not found:
            raise await self._no_partition(partition, deadline)
        return {decode(name.decode()): _number(value.decode()) for name, value in found.items()}

    async def partitions(self, deadline: Deadline) -> list[str]:
        """Names of the partitions, sorted."""
        names = await self.connection.command("SMEMBERS", self.keys.partitions, deadline=deadline)
        listed = sorted(decode(name.decode()) for name in names)
        existing = await self.connection.commands(
            *(("EXISTS", self.keys.summary(name)) for name in listed), deadline=deadline
        )
        return [name for name, found in zip(listed, existing, strict=True) if found]

    async def keep_alive(self, deadline: Deadline) -> None:
        """Restart the lifetime of the keys that belong to the namespace as a whole."""
        await self.connection.commands(
            *(
                ("EXPIRE", name, self._idle_ttl_s)
                for name in (self.keys.partitions, self.keys.next_sample)
            ),
            deadline=deadline,
        )

    async def fields(self, partition: str, deadline: Deadline) -> list[str]:
        """Names of the partition's fields, sorted; empty where it does not exist."""
        names = await self.connection.command(
            "HKEYS", self.keys.schema(partition), deadline=deadline
        )
        return sorted(decode(name.decode()) for name in names)

    # Tags

    async def set_tags(
        self, partition: str, ids: Sequence[int], tags: Sequence[Tags], deadline: Deadline
    ) -> None:
        """Give rows exactly these tags.

        Raises:
            PartitionNotFoundError, SampleNotFoundError
        """
        arguments = {"ids": to_ranges(ids), "tags": _tag_columns(tags)}
        reply = await self._mutate("set_tags", partition, arguments, Reply, deadline)
        await self._check(reply, partition, deadline)

    # Clearing

    async def clear_samples(
        self, partition: str, ids: Sequence[int], deadline: Deadline
    ) -> list[str]:
        """Forget rows; unknown ones are passed over. Returns handles of blocks to free."""
        freed: list[str] = []
        step = ROWS_PER_PAGE // 4
        for first in range(0, len(ids), step):
            arguments = {"ids": to_ranges(ids[first : first + step])}
            reply = await self._mutate("clear_samples", partition, arguments, ClearReply, deadline)
            freed = reply.freed or freed
        return freed

    async def clear_partition(self, partition: str, deadline: Deadline) -> list[str]:
        """Forget a partition; unknown ones are passed over. It is gone for everybody when this
        returns. Returns the generations whose blocks are to be freed, for :meth:`trash`."""
        reply = await self._run(
            "clear_partition", partition, {"idle_ttl": self._idle_ttl_s}, ClearReply, deadline
        )
        await self.connection.command(
            "SREM", self.keys.partitions, encode(partition), deadline=deadline
        )
        return reply.trash

    async def trash(self, partition: str, generation: str, deadline: Deadline) -> list[str]:
        """Handles of the blocks that a cleared partition left behind."""
        records = await self.connection.command(
            "HVALS", self.keys.trash(partition, generation), deadline=deadline
        )
        return [msgspec.json.decode(record)["handle"] for record in records]

    async def empty_trash(self, partition: str, generation: str, deadline: Deadline) -> None:
        """The blocks of a cleared partition were freed."""
        await self.connection.command(
            "UNLINK", self.keys.trash(partition, generation), deadline=deadline
        )
        await self.connection.command(
            "SREM", self.keys.trashes(partition), generation, deadline=deadline
        )

    async def named_blocks(self, partition: str, deadline: Deadline) -> set[str]:
        """Handles that the partition's rows use, or that are about to be freed."""
        records = await self.connection.command(
            "HVALS", self.keys.blocks(partition), deadline=deadline
        )
        return {msgspec.json.decode(record)["handle"] for record in records}

    # Calls

    async def _run(
        self, verb: Verb, partition: str, arguments: Mapping[str, Any], kind: type[R], deadline: Deadline
    ) -> R:
        packed = msgspec.msgpack.encode(arguments)
        raw = await self.connection.run(verb, self.keys.summary(partition), packed, deadline)
        return decode_reply(raw, kind)

    async def _mutate(
        self, verb: Verb, partition: str, arguments: Mapping[str, Any], kind: type[R], deadline: Deadline
    ) -> R:
        """Run a verb that writes. The request id makes Redis answer a repeated one as before."""
        once = {
            "request": uuid.uuid4().hex,
            "request_ttl": int(deadline.remaining) + _REPLAY_GRACE_S,
            "idle_ttl": self._idle_ttl_s,
        }
        return await self._run(verb, partition, {**arguments, **once}, kind, deadline)

    def _listing(self, partition: str) -> list[tuple[Any, ...]]:
        name, ttl = self.keys.partitions, self._idle_ttl_s
        return [
            ("SADD", name, encode(partition)),
            ("EXPIRE", name, ttl),
            ("EXPIRE", self.keys.next_sample, ttl),
        ]

    async def _describe_page(
        self, partition: str, arguments: Mapping[str, Any], rows: Rows, deadline: Deadline
    ) -> int:
        reply = await self._run("describe", partition, arguments, DescribeReply, deadline)
        await self._check(reply, partition, deadline)
        rows.ids.extend(reply.ids)
        rows.keys.extend(key or None for key in reply.keys)
        rows.tags.extend(_tag_rows(reply.tags, len(reply.ids)))
        for name, form, flags in reply.fields:
            if form:
                known = rows.produced.setdefault(decode(name), [])
                # A field that appeared between two pages: no earlier row had it.
                known.extend([False] * (len(rows.ids) - len(reply.ids) - len(known)))
                known.extend(flag == "1" for flag in flags)
                rows.schema[decode(name)] = _schema_from_json(form)
        rows.consumed.extend(flag == "1" for flag in reply.consumed)
        return len(reply.ids)

    # Refusals

    async def _check(self, reply: Reply, partition: str, deadline: Deadline) -> None:
        if reply.code == "no_partition":
            raise await self._no_partition(partition, deadline)
        if reply.code == "unknown":
            raise SampleNotFoundError(
                f"Partition {partition!r} has no samples {shorten(reply.ids)}: they were cleared, "
                f"and the metadata is stale. Fetch new metadata.",
                partition=partition,
                rows=reply.ids,
            )

    async def _no_partition(self, partition: str, deadline: Deadline) -> PartitionNotFoundError:
        known = await self.partitions(deadline)
        return PartitionNotFoundError(
            f"Partition {partition!r} does not exist. {nearest(partition, known)}",
            partition=partition,
        )

    async def require_field(self, partition: str, name: str, deadline: Deadline) -> None:
        """Raises:
        FieldNotFoundError: no sample of the partition has this field.
        """
        known = await self.fields(partition, deadline)
        if name not in known:
            raise FieldNotFoundError(
                f"Partition {partition!r} has no field {name!r}. {nearest(name, known)}",
                partition=partition,
                fields=[name],
            )

    async def _raise_not_ready(
        self, partition: str, name: str, ids: Iterable[int], deadline: Deadline
    ) -> None:
        rows = list(ids)
        await self.require_field(partition, name, deadline)
        raise NotReadyError(
            f"Field {name!r} of partition {partition!r} is not produced yet in rows "
            f"{shorten(rows)}. Wait for it with get_meta, or leave the field out.",
            partition=partition,
            fields=[name],
            rows=rows,
        )


def _append_runs(where: dict[str, list[Run]], fields: Sequence[str], reply: LocateReply) -> None:
    handles = dict(reply.blocks)
    decoded: list[list[Run]] = []
    for column in reply.columns:
        if isinstance(column, int):
            decoded.append(decoded[column - 1])
        else:
            triples = zip(column[::3], column[1::3], column[2::3], strict=True)
            decoded.append([(handles[number], row, count) for number, row, count in triples])
    for name, runs in zip(fields, decoded, strict=True):
        where[name].extend(runs)


def _tag_columns(tags: Sequence[Tags]) -> list[tuple[str, list[str]]]:
    """Tags by name: one JSON value per row, empty where a row does not have it."""
    names = {name for row in tags for name in row}
    return [
        (
            encode(name),
            [msgspec.json.encode(row[name]).decode() if name in row else "" for row in tags],
        )
        for name in sorted(names)
    ]


def _tag_rows(columns: Iterable[tuple[str, list[str]]], count: int) -> list[dict[str, Any]]:
    """Inverse of :func:`_tag_columns`."""
    tags: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, values in columns:
        for row, value in enumerate(values):
            if value:
                tags[row][decode(name)] = msgspec.json.decode(value)
    return tags


def _number(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text
