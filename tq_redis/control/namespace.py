"""What belongs to a namespace as a whole, and how its verbs are called."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, TypeVar

from tq_redis.control.connection import RedisConnection
from tq_redis.control.keys import Keys, decode, encode
from tq_redis.control.packing import arguments
from tq_redis.control.replies import Reply
from tq_redis.control.replies import decode as decode_reply
from tq_redis.control.scripts import Verb
from tq_redis.deadline import Deadline

# Redis keeps a reply for its replay until the call has given up for sure.
_REPLAY_GRACE_S = 30

R = TypeVar("R", bound=Reply)


class Namespace:
    """The list of partitions, the counter of sample ids, and calls of verbs.

    Args:
        connection: to the server that holds it.
        name: one per training run.
        idle_ttl_s: lifetime of a partition that nobody writes to or claims from, in seconds.
    """

    def __init__(self, connection: RedisConnection, name: str, idle_ttl_s: int) -> None:
        self.connection = connection
        self.keys = Keys(name)
        self._idle_ttl_s = idle_ttl_s
        self._prolonged = Deadline(0)

    async def reserve(self, partition: str, count: int, deadline: Deadline) -> int:
        """Draw ``count`` consecutive sample ids and return the first. Ids are never reused."""
        last, *_ = await self.connection.commands(
            ("INCRBY", self.keys.next_sample, count), *self._listing(partition), deadline=deadline
        )
        return int(last) - count + 1

    async def partitions(self, deadline: Deadline) -> list[str]:
        """Names of the partitions, sorted."""
        names = await self.connection.command("SMEMBERS", self.keys.partitions, deadline=deadline)
        listed = sorted(decode(name.decode()) for name in names)
        existing = await self.connection.commands(
            *(("EXISTS", self.keys.summary(name)) for name in listed), deadline=deadline
        )
        return [name for name, found in zip(listed, existing, strict=True) if found]

    async def keep_alive(self, deadline: Deadline) -> None:
        """Prolong the lifetime of the keys that belong to the namespace as a whole."""
        await self.connection.commands(*self._lifetimes(), deadline=deadline)

    async def _list(self, partition: str, deadline: Deadline) -> None:
        await self.connection.commands(*self._listing(partition), deadline=deadline)

    async def _unlist(self, partition: str, deadline: Deadline) -> None:
        _, made_again = await self.connection.commands(
            ("SREM", self.keys.partitions, encode(partition)),
            ("EXISTS", self.keys.summary(partition)),
            deadline=deadline,
        )
        if made_again:
            await self._list(partition, deadline)

    def _listing(self, partition: str) -> list[tuple[Any, ...]]:
        return [("SADD", self.keys.partitions, encode(partition)), *self._lifetimes()]

    def _lifetimes(self) -> list[tuple[Any, ...]]:
        # Every process that writes or claims does this once in a quarter of idle_ttl, so that what
        # is left of twice idle_ttl is always more than any partition has.
        self._prolonged = Deadline(self._idle_ttl_s / 4)
        return [
            ("EXPIRE", name, 2 * self._idle_ttl_s)
            for name in (self.keys.next_sample, self.keys.partitions)
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
    ) -> R:
        """Run a verb that writes. The request id makes Redis answer a repeated one as before."""
        if self._prolonged.passed:
            await self.keep_alive(deadline)
        once = {
            "request": uuid.uuid4().hex,
            "request_ttl": int(deadline.remaining) + _REPLAY_GRACE_S,
            "idle_ttl": self._idle_ttl_s,
        }
        return await self._run(verb, partition, {**values, **once}, kind, deadline)
