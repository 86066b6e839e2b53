"""What belongs to a namespace as a whole, and how its verbs are called."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any, TypeVar

from tq_redis.control import refusals
from tq_redis.control.connection import RedisConnection
from tq_redis.control.keys import Keys, decode, encode
from tq_redis.control.packing import arguments
from tq_redis.control.replies import Reply
from tq_redis.control.replies import decode as decode_reply
from tq_redis.control.scripts import Verb
from tq_redis.control.shards import Connection
from tq_redis.deadline import Deadline

# Redis keeps a reply for its replay until the call has given up for sure.
_REPLAY_GRACE_S = 30

# More ids than a server gives out in the time whose writes it may lose.
_LOST_IDS = 1_000_000

R = TypeVar("R", bound=Reply)


class Namespace:
    """The list of partitions, the counter of sample ids, and calls of verbs.

    Each shard has a list and a counter for the partitions that live in it.

    Args:
        connection: to the servers that hold it.
        name: one per training run.
        idle_ttl_s: lifetime of a partition that nobody writes to or claims from, in seconds.
    """

    def __init__(self, connection: Connection, name: str, idle_ttl_s: int) -> None:
        self.connection = connection
        self.keys = Keys(name)
        self._idle_ttl_s = idle_ttl_s
        self._prolonged: dict[RedisConnection, Deadline] = {}
        # For each shard, how many changes of it this process had seen when it last looked for ids
        # that the shard may have lost.
        self._counted: dict[RedisConnection, int] = {}
        # And the last id that it has seen the shard give out.
        self._given: dict[RedisConnection, int] = {}

    async def reserve(self, partition: str, count: int, deadline: Deadline) -> int:
        """Draw ``count`` consecutive sample ids and return the first. Ids are never reused."""
        shard = self._shard(partition)
        while True:
            changes = await self._count_on(shard, deadline)
            last, listed = await shard.commands(
                ("INCRBY", self.keys.next_sample, count),
                ("SADD", self.keys.partitions, encode(partition)),
                deadline=deadline,
            )
            self._saw(shard, int(last))
            if listed or last == count:  # one of these keys may be new
                await shard.commands(*self._lifetimes(), deadline=deadline)
            if shard.changes == changes:  # else it may be another server that has counted
                return int(last) - count + 1

    async def _count_on(self, shard: RedisConnection, deadline: Deadline) -> int:
        """Have no id given out again that a shard may have lost. Returns its changes till then."""
        changes = shard.changes
        if self._counted.get(shard) != changes:
            await self._skip_lost(shard, deadline)
            self._counted[shard] = changes
        return changes

    async def _skip_lost(self, shard: RedisConnection, deadline: Deadline) -> None:
        """A replica that became the primary, or a server that came back from its append-only file,
        may not know the ids that were given out last; metadata of their samples may be around."""
        keys = self.keys
        life = await shard.life_of_server(keys.next_sample, deadline)
        counted_by = await shard.command("GET", keys.counted_by, deadline=deadline)
        if life is None or (counted_by is not None and counted_by.decode() == life):
            return
        given = self._given.get(shard, 0)
        # Without a note nobody has counted yet, or the note was lost too.
        if counted_by is not None or given:
            await self._skip(shard, given, _LOST_IDS, deadline)
        note = ("SET", keys.counted_by, life, "EX", 2 * self._idle_ttl_s)
        await shard.command(*note, deadline=deadline)

    async def _skip(self, shard: RedisConnection, upto: int, more: int, deadline: Deadline) -> int:
        """Give out no id up to ``upto``, nor as many ``more``. Returns the last that is skipped."""
        name = self.keys.next_sample
        last = int(await shard.command("GET", name, deadline=deadline) or 0)
        # Sent twice, it skips more.
        step = ("INCRBY", name, max(last, upto) - last + more)
        last = int(await shard.command(*step, deadline=deadline))
        self._saw(shard, last)
        return last

    def _saw(self, shard: RedisConnection, last: int) -> None:
        self._given[shard] = max(self._given.get(shard, 0), last)

    async def partitions(self, deadline: Deadline) -> list[str]:
        """Names of the partitions, sorted."""
        shards = self.connection.shards
        found = await asyncio.gather(*(self._partitions_of(shard, deadline) for shard in shards))
        return sorted(name for names in found for name in names)

    async def keep_alive(self, deadline: Deadline) -> None:
        """Prolong the lifetime of the keys that belong to the namespace as a whole."""
        await asyncio.gather(*(self._prolong(shard, deadline) for shard in self.connection.shards))

    async def _partitions_of(self, shard: RedisConnection, deadline: Deadline) -> list[str]:
        names = await shard.command("SMEMBERS", self.keys.partitions, deadline=deadline)
        listed = [decode(name.decode()) for name in names]
        keys = [self.keys.summary(name) for name in listed]
        one_node = shard.address.kind != "cluster"
        if one_node and keys:
            found = await shard.command("EXISTS", *keys, deadline=deadline)
            if found == len(keys):  # as nearly always
                return listed
        existing = await shard.commands(*(("EXISTS", key) for key in keys), deadline=deadline)
        return [name for name, found in zip(listed, existing, strict=True) if found]

    def _shard(self, partition: str) -> RedisConnection:
        return self.connection.shard_of(self.keys.summary(partition))

    async def _prolong(self, shard: RedisConnection, deadline: Deadline) -> None:
        # Every process that writes or claims does this once in a quarter of idle_ttl, so that what
        # is left of twice idle_ttl is always more than any partition has.
        self._prolonged[shard] = Deadline(self._idle_ttl_s / 4)
        await shard.commands(*self._lifetimes(), deadline=deadline)

    async def _list(self, partition: str, deadline: Deadline) -> None:
        shard = self._shard(partition)
        await shard.commands(*self._listing(partition), deadline=deadline)

    async def _unlist(self, partition: str, deadline: Deadline) -> None:
        _, made_again = await self._shard(partition).commands(
            ("SREM", self.keys.partitions, encode(partition)),
            ("EXISTS", self.keys.summary(partition)),
            deadline=deadline,
        )
        if made_again:
            await self._list(partition, deadline)

    def _listing(self, partition: str) -> list[tuple[Any, ...]]:
        return [("SADD", self.keys.partitions, encode(partition)), *self._lifetimes()]

    def _lifetimes(self) -> list[tuple[Any, ...]]:
        return [
            ("EXPIRE", name, 2 * self._idle_ttl_s)
            for name in (self.keys.next_sample, self.keys.counted_by, self.keys.partitions)
        ]

    async def _run(
        self,
        verb: Verb,
        partition: str,
        values: Mapping[str, Any],
        kind: type[R],
        deadline: Deadline,
    ) -> R:
        key = self.keys.summary(partition)
        reply = await self.connection.run(verb, key, arguments(values), deadline)
        return decode_reply(reply, kind)

    async def _mutate(
        self,
        verb: Verb,
        partition: str,
        values: Mapping[str, Any],
        kind: type[R],
        deadline: Deadline,
        *,
        request: str | None = None,
    ) -> R:
        """Run a verb that writes. The request id makes Redis answer a repeated one as before."""
        shard = self._shard(partition)
        if shard not in self._prolonged or self._prolonged[shard].passed:
            await self._prolong(shard, deadline)
        once = {
            "request": request or uuid.uuid4().hex,
            "request_ttl": int(deadline.remaining) + _REPLAY_GRACE_S,
            "idle_ttl": self._idle_ttl_s,
        }
        while True:
            reply = await self._run(verb, partition, {**values, **once}, kind, deadline)
            if reply.frozen is None:
                return reply
            await self.thawed(partition, reply.frozen, deadline)

    async def thawed(self, partition: str, frozen: tuple[str, float], deadline: Deadline) -> None:
        """Wait until a save lets calls go on that it had to hold up.

        Raises:
            DeadlineError: it did not in time.
        """
        after, milliseconds = frozen
        until = Deadline(min(deadline.remaining, milliseconds / 1000))
        await self.connection.wait_for_event(self.keys.thaws(partition), after, until)
        if deadline.passed:
            raise refusals.frozen(partition, deadline)
