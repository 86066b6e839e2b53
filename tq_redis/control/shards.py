"""Several places for state: each partition lives in one of them, whoever asks.

Which one follows from the name of the partition and the set of servers (rendezvous hashing), so
every process finds it by itself. The list of servers also stands in each of them, under
``tq:<ns>:shards``: a process that knows one address learns the others, and one that was given
other servers is refused before it looks for partitions where they are not. What stands there has
no user, no password and no options: a process reaches the others with those of the address that it
knows.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from tq_redis.config import RedisConfig
from tq_redis.control.addresses import hide_password, parse_address
from tq_redis.control.connection import NO_NEWS, RedisConnection
from tq_redis.control.keys import Keys
from tq_redis.control.scripts import Verb
from tq_redis.deadline import Deadline
from tq_redis.errors import ConfigError

T = TypeVar("T")

_HASH_TAG = re.compile(r"\{([^}]+)\}")


class _Record(msgspec.Struct, frozen=True):
    """What stands in a shard.

    Attributes:
        shards: all servers of the namespace, sorted.
        this: which of them has this record; it may be known under another name, too.
    """

    shards: list[str]
    this: int


class Shards:
    """The connections to all shards. Has the calls of :class:`RedisConnection`; each goes to the
    shard of its key, or of its hash tag: all keys of a partition have the same.

    Args:
        config: ``config.url`` names all servers, or one of them.

    Raises:
        ConfigError: an address is wrong, or stands there twice.
    """

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        opened = [RedisConnection(url, config) for url in config.urls]
        self._by_server = {shard.address.server: shard for shard in opened}
        if len(self._by_server) < len(opened):
            raise ConfigError(f"redis.url names a server twice: {_shown(opened)}")

    @property
    def url(self) -> str:
        """The addresses, without passwords."""
        return " ".join(shard.url for shard in self.shards)

    @property
    def shards(self) -> tuple[RedisConnection, ...]:
        return tuple(self._by_server.values())

    def shard_of(self, key: str) -> RedisConnection:
        """Where a key lives."""
        if len(self._by_server) == 1:
            return self.shards[0]
        tag = _HASH_TAG.search(key)
        name = tag[1] if tag else key
        return self._by_server[max(self._by_server, key=lambda server: _weight(server, name))]

    # The calls of RedisConnection

    async def run(self, verb: Verb, key: str, arguments: bytes, deadline: Deadline) -> bytes:
        return await self.shard_of(key).run(verb, key, arguments, deadline)

    async def command(self, *words: Any, deadline: Deadline) -> Any:
        return await self.shard_of(words[1]).command(*words, deadline=deadline)

    async def commands(self, *commands: Sequence[Any], deadline: Deadline) -> list[Any]:
        """In one round trip; all keys are of one partition."""
        if not commands:
            return []
        return await self.shard_of(commands[0][1]).commands(*commands, deadline=deadline)

    async def wait_for_event(
        self,
        stream: str,
        after: str,
        deadline: Deadline,
        *,
        no_news: frozenset[bytes] = NO_NEWS,
    ) -> None:
        await self.shard_of(stream).wait_for_event(stream, after, deadline, no_news=no_news)

    async def check_server(
        self, deadline: Deadline, *, namespace: str | None = None, own: bool = False
    ) -> None:
        await self._everywhere(
            lambda shard: shard.check_server(deadline, namespace=namespace, own=own)
        )

    async def close(self) -> None:
        await self._everywhere(lambda shard: shard.close())

    # The list of shards

    async def learn(self, keys: Keys, deadline: Deadline) -> bool:
        """Compare the servers with those that the namespace has, and learn the others if one is
        known.

        Returns:
            Whether there are others.

        Raises:
            ConfigError: the namespace has other servers.
        """

        async def read(shard: RedisConnection) -> _Record | None:
            return _decoded(await shard.command("GET", keys.shards, deadline=deadline))

        known = self.shards
        for shard, record in zip(known, await self._everywhere(read), strict=True):
            if record is None:
                continue
            if len(known) > 1:
                self._require_same(record, keys, shard)
                continue
            address = shard.address
            self._by_server = {
                server: shard
                if number == record.this
                else RedisConnection(address.beside(server), self._config)
                for number, server in enumerate(record.shards)
            }
        return len(self.shards) > len(known)

    async def publish(self, keys: Keys, lifetime_s: int, deadline: Deadline) -> None:
        """Write the list into each shard, or prolong its lifetime there.

        Raises:
            ConfigError: another list stands there, or two addresses name the same server. Nothing
                of this call stays.
        """
        written: list[RedisConnection] = []
        try:
            for number, server in enumerate(sorted(self._by_server)):
                if await self._write(number, server, keys, lifetime_s, deadline):
                    written.append(self._by_server[server])
                await self._check_written(number, server, keys, deadline)
        except ConfigError:
            for shard in written:
                await shard.command("DEL", keys.shards, deadline=deadline)
            raise

    async def _write(
        self, number: int, server: str, keys: Keys, lifetime_s: int, deadline: Deadline
    ) -> bool:
        """Whether there was no list before."""
        record = msgspec.json.encode(_Record(sorted(self._by_server), number))
        new, _ = await self._by_server[server].commands(
            ("SET", keys.shards, record, "NX", "EX", lifetime_s),
            ("EXPIRE", keys.shards, lifetime_s),
            deadline=deadline,
        )
        return bool(new)

    async def _check_written(
        self, number: int, server: str, keys: Keys, deadline: Deadline
    ) -> None:
        shard = self._by_server[server]
        record = _decoded(await shard.command("GET", keys.shards, deadline=deadline))
        if record is None:
            return
        self._require_same(record, keys, shard)
        if record.this != number:
            other = self._by_server[record.shards[record.this]]
            raise ConfigError(
                f"{shard.url} and {other.url} are the same server. Name it once in redis.url."
            )

    async def withdraw(self, keys: Keys, deadline: Deadline) -> None:
        """Remove the list: the namespace has ended."""
        await self._everywhere(lambda shard: shard.command("DEL", keys.shards, deadline=deadline))

    def _require_same(self, record: _Record, keys: Keys, shard: RedisConnection) -> None:
        if set(record.shards) != self._by_server.keys():
            raise ConfigError(
                f"Namespace {keys.namespace!r} has its partitions on "
                f"{' '.join(record.shards)}, as {shard.url} says, not on {_shown(self.shards)}. "
                f"Give redis.url the same servers (or one of them), or choose another "
                f"redis.namespace. If the run that wrote this is dead for good, remove the key "
                f"{keys.shards} there."
            )

    async def _everywhere(self, call: Callable[[RedisConnection], Awaitable[T]]) -> list[T]:
        return list(await asyncio.gather(*map(call, self.shards)))


Connection = RedisConnection | Shards


def same_servers(some: RedisConfig, others: RedisConfig) -> bool:
    """Whether two settings mean the same servers; one of several addresses is enough."""
    known = [{parse_address(url).server for url in config.urls} for config in (some, others)]
    small, large = sorted(known, key=len)
    return small == large or (len(small) == 1 and small <= large)


def shown(config: RedisConfig) -> str:
    """The addresses of the settings, without passwords."""
    return " ".join(map(hide_password, config.urls))


def _weight(server: str, name: str) -> bytes:
    """Rendezvous hashing: a name lives where this is highest. A server that comes or goes moves
    no name between the others."""
    return hashlib.blake2b(f"{server}\n{name}".encode(), digest_size=8).digest()


def _decoded(record: bytes | None) -> _Record | None:
    return None if record is None else msgspec.json.decode(record, type=_Record)


def _shown(shards: Sequence[RedisConnection]) -> str:
    return " ".join(shard.url for shard in shards)
