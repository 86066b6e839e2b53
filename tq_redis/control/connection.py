"""The only place that talks to Redis: deadlines, retries, connections of waiting calls."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import redis.exceptions as rex
from tenacity import (
    AsyncRetrying,
    retry_if_exception,
    stop_before_delay,
    wait_random_exponential,
)

from tq_redis.config import RedisConfig
from tq_redis.control.addresses import Address, parse_address
from tq_redis.control.rights import require_rights
from tq_redis.control.scripts import Verb, load_script
from tq_redis.control.server_errors import is_elsewhere, may_pass, our_errors
from tq_redis.control.topologies import Primary, open_topology
from tq_redis.deadline import Deadline
from tq_redis.errors import ConfigError, ServerPolicyError

T = TypeVar("T")

_log = logging.getLogger(__name__)

_OLDEST_SERVER = (6, 2)
# One attempt of a command; a frozen server is left for a new connection after this long.
_ATTEMPT_S = 5.0
# A cluster's client must see the silence of a node itself, so that it looks for another.
_SILENCE_S = 4.0
# A waiter looks again after this long even if nothing woke it: the server may have restarted with
# its clock set back, and then new events have ids from before the one that is waited behind. It is
# also how long it takes a waiter to leave a server that is frozen.
_BLOCK_S = 5.0
_BLOCK_GRACE_S = 2.0
_WAIT_FAILED_S = 0.1

# Others' progress is no news to who waits for samples, unless the event says so.
NO_NEWS = frozenset({b"claim", b"ack", b"room"})

_ERRORS = (rex.RedisError, rex.RedisClusterException, TimeoutError)


class RedisConnection:
    """Connections to one place where state is kept: a server, a master that Sentinels name, or a
    cluster.

    Short calls share at most ``config.max_connections`` connections and wait their turn for one.
    A call that blocks in Redis has a connection of its own, so that waiters never hold up others.
    Belongs to the event loop that first uses it.

    A call goes on for as long as its deadline allows while a primary dies, freezes, is replaced or
    restarts, or slots of a cluster move.

    Every call may raise :class:`ServerUnavailableError` (no answer within its deadline),
    :class:`AuthenticationError`, :class:`ServerFullError` and :class:`ServerError`.

    Args:
        url: its address; :mod:`tq_redis.control.addresses` names the forms.

    Attributes:
        address: the address, parsed.
        url: the address, without its password.
        changes: how often another server may have taken over, or the same one begun anew.

    Raises:
        ConfigError: the address cannot be parsed.
    """

    def __init__(self, url: str | Address, config: RedisConfig) -> None:
        self.address = parse_address(url) if isinstance(url, str) else url
        self.url = self.address.shown
        self._calls = open_topology(self.address, timeout_s=_SILENCE_S)
        # Before the wait itself is given up, so that its client sees which node was silent.
        self._waits = open_topology(self.address, timeout_s=_BLOCK_S + _BLOCK_GRACE_S / 2)
        self.changes = 0
        self._slots = asyncio.Semaphore(config.max_connections)
        self._allow_eviction = config.allow_eviction

    @property
    def shards(self) -> tuple[RedisConnection, ...]:
        """This one, as :class:`tq_redis.control.shards.Shards` has several."""
        return (self,)

    def shard_of(self, key: str) -> RedisConnection:
        """Where a key lives."""
        return self

    async def close(self) -> None:
        """Close every connection."""
        await self._calls.aclose()
        await self._waits.aclose()

    async def run(self, verb: Verb, key: str, arguments: bytes, deadline: Deadline) -> bytes:
        """Run a Lua verb on ``key``; ``arguments`` and the reply are msgpack."""
        script = load_script(verb)
        keys = self._declared(key)

        async def attempt() -> bytes:
            try:
                return await self._calls.execute("EVALSHA", script.sha, len(keys), *keys, arguments)
            except rex.NoScriptError:
                # A restart or failover forgot the script; nothing of it ran.
                return await self._calls.execute("EVAL", script.source, len(keys), *keys, arguments)

        return await self._until(deadline, attempt)

    def _declared(self, key: str) -> tuple[str, ...]:
        """The keys that a script is called with. In a cluster a partition's key is joined by one
        that never exists: while a slot moves, a node that has not got all keys of a call refuses
        it as a whole (TRYAGAIN). A script that began would stop at the first key that is away,
        and leave half of its work."""
        moving = self.address.kind == "cluster" and "{" in key
        return (key, f"{key}:moving") if moving else (key,)

    async def command(self, *words: Any, deadline: Deadline) -> Any:
        """Run one plain command that is safe to send twice."""
        return await self._until(deadline, lambda: self._calls.execute(*words))

    async def commands(self, *commands: Sequence[Any], deadline: Deadline) -> list[Any]:
        """Run plain commands that are safe to send twice, in one round trip."""
        if not commands:
            return []
        return await self._until(deadline, lambda: self._calls.pipeline(commands))

    async def wait_for_event(
        self,
        stream: str,
        after: str,
        deadline: Deadline,
        *,
        no_news: frozenset[bytes] = NO_NEWS,
    ) -> None:
        """Wait for an entry in ``stream`` behind ``after`` that is of none of the kinds
        ``no_news``, or says that it is news all the same.

        Returns when there is one, when the deadline passes, and now and then without a reason, for
        example when the connection fails: the caller looks again in any case.
        """
        block, cancelled = Deadline(min(deadline.remaining, _BLOCK_S)), _cancellations()
        while not block.passed:
            try:
                async with asyncio.timeout(block.remaining + _BLOCK_GRACE_S):
                    entries = await self._next_events(stream, after, block)
            except _ERRORS as error:
                if not may_pass(error):
                    with our_errors(self.url, deadline):
                        raise
                self._waits.forget()
                # The caller asks again at once, and that may well succeed on another connection.
                await asyncio.sleep(min(_WAIT_FAILED_S, block.remaining))
                return
            finally:
                _raise_lost_cancellation(cancelled)
            if any(_is_news(words, no_news) for _, words in entries):
                return
            after = entries[-1][0] if entries else after

    async def life_of_server(self, key: str, deadline: Deadline) -> str | None:
        """What tells the server with ``key`` from every other, and from itself before its last
        start; None if the user may not ask (INFO)."""

        async def ask() -> str | None:
            try:
                info: dict[str, Any] = await self._calls.execute_at(key, "INFO", "server")
            except rex.NoPermissionError:
                return None
            return info["run_id"]

        return await self._until(deadline, ask)

    async def primary(self, deadline: Deadline) -> tuple[str, int]:
        """Host and port of a server that writes now."""
        name = next(iter(await self._until(deadline, self._calls.primaries)))
        host, _, port = name.rpartition(":")
        return host, int(port)

    async def check_server(
        self, deadline: Deadline, *, namespace: str | None = None, own: bool = False
    ) -> None:
        """Refuse servers that are not safe to keep state in: every primary is looked at.

        Args:
            namespace: where given, the user must be allowed all commands on its keys.
            own: the server is an embedded one, whose state ends with it anyway.

        Raises:
            ConfigError: what is there is of another kind than the address says.
            ServerPolicyError: it would evict keys, or is older than Redis 6.2.
            ServerUnavailableError, AuthenticationError: it cannot be reached, or its user is not
                allowed what is needed.
        """

        async def ask() -> dict[str, dict[str, Any] | None]:
            primaries = await self._calls.primaries()
            if namespace is not None:
                for primary in primaries.values():
                    await require_rights(primary, namespace)
            return {name: await _info(primary) for name, primary in primaries.items()}

        for name, info in (await self._until(deadline, ask)).items():
            if info is None:
                _log.warning(
                    "Redis at %s does not let this user see its settings (INFO): make sure that "
                    "it is 6.2 or newer and that maxmemory-policy is noeviction.",
                    self.url,
                )
                continue
            where = self.url if self.address.kind == "single" else f"{self.url} ({name})"
            self._check_kind(info, where)
            self._check_settings(info, where, own=own)

    def _check_kind(self, info: dict[str, Any], where: str) -> None:
        mode = str(info.get("server_mode", info.get("redis_mode")))  # Valkey's name, Redis's name
        found = mode if mode in ("cluster", "sentinel") else None
        if found == "sentinel" or (found == "cluster") != (self.address.kind == "cluster"):
            what = {"cluster": "a node of a Redis Cluster", "sentinel": "a Sentinel"}
            right = f"redis+{found}" if found else "redis"
            raise ConfigError(
                f"Redis at {where} is {what.get(found or '', 'a single server')}: "
                f"its address starts with {right}:// (or the same with rediss)."
            )

    def _check_settings(self, info: dict[str, Any], where: str, *, own: bool) -> None:
        version = str(info["redis_version"])
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST_SERVER:
            raise ServerPolicyError(f"Redis at {where} is {version}; 6.2 or newer is needed.")
        policy = str(info["maxmemory_policy"])
        if policy != "noeviction" and not self._allow_eviction:
            raise ServerPolicyError(
                f"Redis at {where} has maxmemory-policy {policy}: it would drop samples "
                f"silently. Set maxmemory-policy noeviction there (or redis.allow_eviction here)."
            )
        if not info["aof_enabled"] and not own:
            _log.warning(
                "Redis at %s has no append-only file: if it restarts, the status of every sample "
                "is lost. Set appendonly yes.",
                where,
            )

    async def _next_events(
        self, stream: str, after: str, block: Deadline
    ) -> list[tuple[str, list[bytes]]]:
        """``(id, [name, value, ...])`` of the events behind ``after``; empty if none came."""
        milliseconds = max(1, int(block.remaining * 1000))
        words = ("XREAD", "BLOCK", milliseconds, "STREAMS", stream, after)
        reply = await self._waits.execute_at(stream, *words)
        return [
            (entry.decode(), [part for pair in words.items() for part in pair])
            for _, entries in reply or ()
            for entry, words in entries
        ]

    async def _until(self, deadline: Deadline, attempt: Callable[[], Awaitable[T]]) -> T:
        """``attempt`` until it succeeds, fails for good, or the deadline passes."""
        failure: BaseException | None = None

        async def bounded() -> T:
            nonlocal failure
            try:
                async with asyncio.timeout(_ATTEMPT_S):
                    return await attempt()
            except _ERRORS as error:
                failure = error
                if may_pass(error) and is_elsewhere(error):
                    self._calls.forget()
                    self.changes += 1
                raise

        cancelled = _cancellations()
        try:
            with our_errors(self.url, deadline):
                try:
                    async with asyncio.timeout(deadline.remaining), self._slots:
                        try:
                            return await bounded()  # as nearly always; what follows takes 0.1 ms
                        except _ERRORS as error:
                            if not may_pass(error):
                                raise
                        return await self._again(deadline, bounded)
                except TimeoutError as error:
                    # What an attempt failed for says more than that the last one was cut short.
                    raise failure or error from None
        finally:
            _raise_lost_cancellation(cancelled)

    async def _again(self, deadline: Deadline, attempt: Callable[[], Awaitable[T]]) -> T:
        retrying = AsyncRetrying(
            stop=stop_before_delay(deadline.remaining),
            wait=wait_random_exponential(multiplier=0.02, max=0.5),
            retry=retry_if_exception(may_pass),
            reraise=True,
        )
        return await retrying(attempt)


def _cancellations() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def _raise_lost_cancellation(before: int) -> None:
    """redis-py sends with ``asyncio.wait_for``, which up to Python 3.11 drops a cancellation that
    comes at the moment when it is done: the caller would go on as if nothing had happened."""
    if _cancellations() > before:
        raise asyncio.CancelledError


async def _info(primary: Primary) -> dict[str, Any] | None:
    """What a server says of itself; None if the user may not know."""
    try:
        return await primary.execute("INFO")
    except rex.NoPermissionError:
        return None


def _is_news(words: Sequence[bytes], no_news: frozenset[bytes]) -> bool:
    return b"news" in words or words[1] not in no_news
