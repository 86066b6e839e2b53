"""A running queue: started by its owner, found and attached to by everybody else."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping
from typing import Any

import msgspec

from tq_redis.client.kv import AsyncKVClient
from tq_redis.config import Config, RedisConfig
from tq_redis.control.keys import Keys
from tq_redis.control.owner import RENEW_S, Ownership
from tq_redis.control.plane import ControlPlane
from tq_redis.control.redis_cli import cli_words
from tq_redis.control.shards import Shards, same_servers, shown
from tq_redis.control.units import UnitList
from tq_redis.data import open_data_plane
from tq_redis.deadline import Deadline
from tq_redis.errors import ConfigError, NotInitializedError, ServerError, TQError, shorten

_log = logging.getLogger(__name__)

# First contact with a server: long enough for a loaded one, short enough to see a wrong address.
_CONTACT_S = 10.0
# Stores are processes that Ray starts: seconds, or much longer on nodes that are busy.
_START_S = 60.0
_END_S = 30.0
_SHARED = ("timeout_s", "idle_ttl_s", "max_deliveries")


async def contact_server(config: Config) -> None:
    """Contact the Redis of ``config``, write nothing, and let go of it.

    Raises:
        ConfigError: the namespace has its partitions on other servers.
        ServerUnavailableError, AuthenticationError, ServerPolicyError: Redis cannot be used.
    """
    if config.redis.url is not None:
        connection = Shards(config.redis)
        try:
            await _meet(connection, config, Deadline(_CONTACT_S))
        finally:
            await connection.close()


async def _meet(
    connection: Shards, config: Config, deadline: Deadline, *, own: bool = False
) -> None:
    """Check the servers, and find those that are not named."""
    namespace = config.redis.namespace
    await connection.check_server(deadline, namespace=namespace, own=own)
    if await connection.learn(Keys(namespace), deadline):
        await connection.check_server(deadline, namespace=namespace)


async def published(config: Config) -> Config | None:
    """The settings of the instance that runs in this namespace, as its owner wrote them into Redis
    for processes that do not see its Ray job; None if there is none.

    Raises:
        ConfigError: the namespace has its partitions on other servers.
        ServerUnavailableError, AuthenticationError: Redis cannot be used.
    """
    connection, keys = Shards(config.redis), Keys(config.redis.namespace)
    deadline = Deadline(_CONTACT_S)
    try:
        await connection.learn(keys, deadline)
        text = await connection.command("GET", keys.settings, deadline=deadline)
    finally:
        await connection.close()
    if text is None:
        return None
    settings = msgspec.json.decode(text, type=Config)
    return msgspec.structs.replace(settings, redis=config.redis)


class Instance:
    """This process's part in a running queue.

    Args:
        config: its settings, ``redis.url`` included.
        job: the Ray job that this process is part of, with its cluster; empty outside Ray.
    """

    def __init__(self, config: Config, job: str = "") -> None:
        if config.redis.url is None:
            raise ConfigError("redis.url is not set")
        self.config = config
        self._connection = Shards(config.redis)
        control = ControlPlane(self._connection, config.redis.namespace, config.idle_ttl_s)
        self._keys = control.keys
        self._data = open_data_plane(config, UnitList(self._connection, self._keys))
        self._ownership = Ownership(self._connection, control.keys, job)
        self._upkeep: asyncio.Task[None] | None = None
        self.core = AsyncKVClient(
            config, control, self._data, f"{socket.gethostname()}:{os.getpid()}"
        )

    @property
    def is_owner(self) -> bool:
        """Whether :meth:`end` ends the instance."""
        return self._upkeep is not None

    async def start(self, *, embedded: bool) -> bool:
        """Become the owner of a new instance. What an earlier owner left in the namespace is
        cleared: its stores are gone, so nobody could read it.

        Returns:
            False if another process of the same run was faster: its instance can be attached to.

        Raises:
            ConfigError: the namespace is in use by another process, or on other servers.
            ServerUnavailableError, AuthenticationError, ServerPolicyError: Redis cannot be used.
        """
        started = False
        try:
            started = await self._start(embedded)
        finally:
            if not started:
                await self.core.close()
        return started

    async def _start(self, embedded: bool) -> bool:
        deadline = Deadline(_CONTACT_S)
        await _meet(self._connection, self.config, deadline, own=embedded)
        if "memory" in self.config.data.backends:  # nobody else could attach
            await self._ownership.take(deadline)
        elif not await self._ownership.take_or_follow(deadline):
            return False
        try:
            await self._publish(deadline)
        except ConfigError:
            await self._ownership.give_up(deadline)
            raise
        left = await self.core.get_partition_list()
        if left:
            _log.warning(
                "Clearing partitions %s that an earlier run left in namespace %s of %s",
                shorten(left),
                self.config.redis.namespace,
                self._connection.url,
            )
            await self._clear_left(left)
        try:
            await self._data.start(Deadline(_START_S))
        except BaseException:
            await self._leave()
            raise
        self._upkeep = asyncio.create_task(self._keep_up())
        return True

    async def attach(self, asked: Config | None = None) -> None:
        """Join a running instance.

        Args:
            asked: settings of a process that could have started it, had it not run. If the owner
                died, such a process takes its place; the samples stay.

        Raises:
            ConfigError: the namespace has its partitions on other servers; or, with ``asked``, its
                owner lives and is of another run, or runs it with other settings.
            ServerUnavailableError, AuthenticationError: Redis cannot be used.
        """
        deadline = Deadline(_CONTACT_S)
        try:
            await self._connection.learn(self._keys, deadline)
            if asked is not None and await self._ownership.take_or_follow(deadline):
                self._upkeep = asyncio.create_task(self._keep_up())
            elif asked is not None:
                _require_same_settings(asked, self.config)
        except BaseException:
            await self.core.close()
            raise

    async def end(self) -> None:
        """Close; the owner ends the instance: partitions, stores, its claim to the namespace."""
        if self._upkeep is not None:
            self._upkeep.cancel()
            await self._leave()
        await self.core.close()

    async def _leave(self) -> None:
        """End what this process owns."""
        try:
            await self._clear(await self.core.get_partition_list(timeout=_CONTACT_S))
            await self._connection.command(
                "DEL", self._keys.settings, deadline=Deadline(_CONTACT_S)
            )
            await self._connection.withdraw(self._keys, Deadline(_CONTACT_S))
            await self._ownership.give_up(Deadline(_CONTACT_S))
        except ServerError as error:
            _log.warning(
                "The keys of namespace %s could not be removed; they expire by themselves. %s",
                self.config.redis.namespace,
                error,
            )
        await self._data.shutdown(Deadline(_END_S))

    async def cli_words(self, key: str) -> tuple[str, bool]:
        """The arguments of redis-cli that lead to a key, and whether it wants a password.

        Raises:
            ServerUnavailableError
        """
        shard = self._connection.shard_of(key)
        words = await cli_words(shard, Deadline(_CONTACT_S))
        return words, "password" in shard.address.options

    async def _publish(self, deadline: Deadline) -> None:
        # Outlives every partition, as the counters of sample ids do.
        lifetime_s = 2 * self.config.idle_ttl_s
        await self._connection.publish(self._keys, lifetime_s, deadline)
        if "memory" in self.config.data.backends:
            return  # no other process can read it
        # Without addresses and passwords: who reads this has its own.
        shown = msgspec.structs.replace(self.config, redis=RedisConfig())
        words = ("SET", self._keys.settings, msgspec.json.encode(shown), "EX", lifetime_s)
        await self._connection.command(*words, deadline=deadline)

    async def _clear(self, partitions: list[str]) -> None:
        for name in partitions:
            await self.core.clear_partition(name, timeout=_END_S)

    async def _clear_left(self, partitions: list[str]) -> None:
        """What an earlier run left, maybe in a Ray cluster of its own, which died with it."""
        for name in partitions:
            try:
                await self._clear([name])
            except NotInitializedError as error:
                _log.warning(
                    "Blocks of partition %s are left to their stores, which end when nobody calls "
                    "them: %s",
                    name,
                    error,
                )
                await self.core.abandon_trash(name, Deadline(_END_S))

    async def _keep_up(self) -> None:
        """Renew the claim to the namespace, and free what writers that died left behind."""
        sweep = Deadline(self.config.data.orphan_grace_s)
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await self._ownership.renew(Deadline(RENEW_S))
                await self._publish(Deadline(RENEW_S))
                if sweep.passed:
                    await self.core.sweep()
                    sweep = Deadline(self.config.data.orphan_grace_s)
            except TQError as error:
                _log.warning("Upkeep of the queue failed, will try again: %s", error)


def choose(running: Mapping[str, str], namespace: str | None) -> Config | None:
    """The running instance to attach to, or None.

    Args:
        running: namespace -> settings as JSON.
        namespace: the one asked for, or None for the only one.

    Raises:
        ConfigError: several run, and none was named.
    """
    if namespace is None and len(running) > 1:
        raise ConfigError(
            f"Several queues run in this Ray cluster: {sorted(running)}. "
            f"Name one: init({{'redis': {{'namespace': ...}}}}) or TQ_REDIS_NAMESPACE."
        )
    found = running.get(namespace) if namespace else next(iter(running.values()), None)
    return None if found is None else msgspec.json.decode(found, type=Config)


def require_same_server(asked: Config, running: Config) -> None:
    """Raises:
    ConfigError: the running instance keeps its state in another Redis than the one asked for.
    """
    if asked.redis.url is not None and not same_servers(asked.redis, running.redis):
        raise ConfigError(
            f"Namespace {running.redis.namespace!r} runs on {shown(running.redis)}, "
            f"not on {shown(asked.redis)}. "
            f"Leave redis.url out to attach to it, or choose another namespace."
        )


def require_same_instance(asked: Config, running: Config) -> None:
    """Raises:
    ConfigError: the instance of this process is not the one asked for.
    """
    if asked.redis.namespace != running.redis.namespace:
        raise ConfigError(
            f"This process is a client of namespace {running.redis.namespace!r}, not of "
            f"{asked.redis.namespace!r}. Call close() first, or use another process."
        )
    require_same_server(asked, running)


def _require_same_settings(asked: Config, running: Config) -> None:
    """Raises:
    ConfigError: a setting is neither that of the running instance nor the default.
    """
    leaves = [_leaves(config) for config in (asked, running, Config())]
    other = [
        f"{name} is {there!r}, not {here!r}"
        for name, here, there, default in (
            (name, *(leaf[name] for leaf in leaves)) for name in leaves[0]
        )
        if here not in (there, default)
    ]
    if other:
        raise ConfigError(
            f"Namespace {running.redis.namespace!r} runs with other settings: {'; '.join(other)}. "
            f"Leave them out to attach to it, or choose another namespace."
        )


def _leaves(config: Config) -> dict[str, Any]:
    """The settings that a running instance has for all who attach, by name."""
    data = {f"data.{name}": value for name, value in msgspec.structs.asdict(config.data).items()}
    return {**data, **{name: getattr(config, name) for name in _SHARED}}
