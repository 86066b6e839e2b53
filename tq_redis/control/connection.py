"""The only place that talks to Redis: pools, deadlines, retries."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import redis.asyncio as aioredis
import redis.exceptions as rex
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from tenacity import (
    AsyncRetrying,
    retry_if_exception,
    stop_before_delay,
    wait_random_exponential,
)

from tq_redis.config import RedisConfig
from tq_redis.control.scripts import Verb, load_script
from tq_redis.control.server_errors import hide_password, may_pass, our_errors
from tq_redis.deadline import Deadline
from tq_redis.errors import AuthenticationError, ConfigError, ServerPolicyError

__all__ = ["RedisConnection", "hide_password"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_OLDEST_SERVER = (6, 2)
_CONNECT_S = 5.0
# One attempt of a command; a frozen server is left for a new connection after this long.
_ATTEMPT_S = 10.0
# A waiter looks again after this long even if nothing woke it: the server may have restarted with
# its clock set back, and then new events have ids from before the one that is waited behind.
_BLOCK_S = 10.0
_BLOCK_GRACE_S = 2.0
_WAIT_FAILED_S = 0.1


class _Pipeline(Protocol):
    def execute_command(self, *words: Any) -> object: ...
    async def execute(self) -> list[Any]: ...
    async def __aenter__(self) -> _Pipeline: ...
    async def __aexit__(self, *error: object) -> None: ...


class _Commands(Protocol):
    """What is used of redis-py, whose own types leave most of it open."""

    async def execute_command(self, *words: Any) -> Any: ...
    def pipeline(self, *, transaction: bool) -> _Pipeline: ...
    async def aclose(self) -> None: ...


class RedisConnection:
    """Connections to one Redis server.

    Short calls share at most ``config.max_connections`` connections and wait their turn for one.
    A call that blocks in Redis has a connection of its own, so that waiters never hold up others.
    Belongs to the event loop that first uses it.

    Every call may raise :class:`ServerUnavailableError` (no answer within its deadline),
    :class:`AuthenticationError`, :class:`ServerFullError` and :class:`ServerError`.

    Attributes:
        url: the address, without its password.

    Raises:
        ConfigError: the address cannot be parsed.
    """

    def __init__(self, url: str, config: RedisConfig) -> None:
        try:
            self.url = hide_password(url)
            self._calls = _open(url)
            self._waits = _open(url)
        except ValueError as error:
            # The address is left out: what cannot be parsed cannot be freed of its password.
            raise ConfigError(f"Bad Redis address: {error}") from error
        self._slots = asyncio.Semaphore(config.max_connections)
        self._allow_eviction = config.allow_eviction

    async def close(self) -> None:
        """Close every connection."""
        await self._calls.aclose()
        await self._waits.aclose()

    async def run(self, verb: Verb, key: str, arguments: bytes, deadline: Deadline) -> bytes:
        """Run a Lua verb on ``key``; ``arguments`` and the reply are msgpack."""
        script = load_script(verb)

        async def attempt() -> bytes:
            try:
                return await self._calls.execute_command("EVALSHA", script.sha, 1, key, arguments)
            except rex.NoScriptError:
                # A restart or failover forgot the script; nothing of it ran.
                return await self._calls.execute_command("EVAL", script.source, 1, key, arguments)

        return await self._until(deadline, attempt)

    async def command(self, *words: Any, deadline: Deadline) -> Any:
        """Run one plain command that is safe to send twice."""
        return await self._until(deadline, lambda: self._calls.execute_command(*words))

    async def commands(self, *commands: Sequence[Any], deadline: Deadline) -> list[Any]:
        """Run plain commands that are safe to send twice, in one round trip."""
        if not commands:
            return []

        async def attempt() -> list[Any]:
            async with self._calls.pipeline(transaction=False) as pipe:
                for words in commands:
                    pipe.execute_command(*words)
                return await pipe.execute()

        return await self._until(deadline, attempt)

    async def wait_for_event(self, stream: str, after: str, deadline: Deadline) -> None:
        """Wait for an entry other than a claim in ``stream`` behind ``after``.

        Returns when there is one, when the deadline passes, and now and then without a reason, for
        example when the connection fails: the caller looks again in any case.
        """
        block = Deadline(min(deadline.remaining, _BLOCK_S))
        while not block.passed:
            try:
                async with asyncio.timeout(block.remaining + _BLOCK_GRACE_S):
                    entries = await self._next_events(stream, after, block)
            except (rex.RedisError, TimeoutError) as error:
                if not may_pass(error):
                    with our_errors(self.url, deadline):
                        raise
                # The caller asks again at once, and that may well succeed on another connection.
                await asyncio.sleep(min(_WAIT_FAILED_S, block.remaining))
                return
            if any(_is_news(words) for _, words in entries):
                return
            after = entries[-1][0] if entries else after

    async def check_server(self, deadline: Deadline, *, own: bool = False) -> None:
        """Refuse a server that is not safe to keep state in.

        Args:
            own: the server is an embedded one, whose state ends with it anyway.

        Raises:
            ServerPolicyError: it would evict keys, or is older than Redis 6.2.
            ServerUnavailableError, AuthenticationError: it cannot be reached.
        """
        try:
            info: dict[str, Any] = await self.command("INFO", deadline=deadline)
        except AuthenticationError as error:
            if not isinstance(error.__cause__, rex.NoPermissionError):
                raise
            _log.warning(
                "Redis at %s does not let this user see its settings (INFO): make sure that it is "
                "6.2 or newer and that maxmemory-policy is noeviction.",
                self.url,
            )
            return
        version = str(info["redis_version"])
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST_SERVER:
            raise ServerPolicyError(f"Redis at {self.url} is {version}; 6.2 or newer is needed.")
        policy = str(info["maxmemory_policy"])
        if policy != "noeviction" and not self._allow_eviction:
            raise ServerPolicyError(
                f"Redis at {self.url} has maxmemory-policy {policy}: it would drop samples "
                f"silently. Set maxmemory-policy noeviction there (or redis.allow_eviction here)."
            )
        if not info["aof_enabled"] and not own:
            _log.warning(
                "Redis at %s has no append-only file: if it restarts, the status of every sample "
                "is lost. Set appendonly yes.",
                self.url,
            )

    async def _next_events(
        self, stream: str, after: str, block: Deadline
    ) -> list[tuple[str, list[bytes]]]:
        """``(id, [name, value, ...])`` of the events behind ``after``; empty if none came."""
        milliseconds = max(1, int(block.remaining * 1000))
        reply = await self._waits.execute_command(
            "XREAD", "BLOCK", milliseconds, "STREAMS", stream, after
        )
        return [
            (entry.decode(), [part for pair in words.items() for part in pair])
            for _, entries in reply or ()
            for entry, words in entries
        ]

    async def _until(self, deadline: Deadline, attempt: Callable[[], Awaitable[T]]) -> T:
        """``attempt`` until it succeeds, fails for good, or the deadline passes."""

        async def bounded() -> T:
            async with asyncio.timeout(_ATTEMPT_S):
                return await attempt()

        retrying = AsyncRetrying(
            stop=stop_before_delay(deadline.remaining),
            wait=wait_random_exponential(multiplier=0.02, max=0.5),
            retry=retry_if_exception(may_pass),
            reraise=True,
        )
        with our_errors(self.url, deadline):
            async with asyncio.timeout(deadline.remaining), self._slots:
                return await retrying(bounded)


def _open(url: str) -> _Commands:
    """A client that neither retries nor limits anything by itself: that is done here."""
    options: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": _CONNECT_S,
        "socket_timeout": None,
        "max_connections": 2**31,
        "protocol": 2,
        "client_name": "tq_redis",
    }
    from_url = cast("Callable[..., _Commands]", aioredis.Redis.from_url)  # pyright: ignore[reportUnknownMemberType]
    return from_url(url, **options)


def _is_news(words: Sequence[bytes]) -> bool:
    return tuple(words[:2]) != (b"kind", b"claim")
