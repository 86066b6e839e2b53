"""The only place that talks to Redis: pools, deadlines, retries, and redis errors made ours."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit, urlunsplit

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
from tq_redis.deadline import Deadline
from tq_redis.errors import (
    AuthenticationError,
    ConfigError,
    ServerError,
    ServerFullError,
    ServerPolicyError,
    ServerUnavailableError,
    TQError,
)

T = TypeVar("T")

_log = logging.getLogger(__name__)

_OLDEST_SERVER = (6, 2)
# One attempt of a command; a frozen server is left for a new connection after this long.
_ATTEMPT_S = 10.0
# XREAD blocks in slices, so that a connection that died silently is noticed.
_BLOCK_S = 10.0

# Every mutating verb carries a request id under which Redis keeps its reply, and the others change
# nothing, so whatever may succeed on another attempt may be sent again.
_PASSING = (
    rex.ConnectionError,
    rex.TimeoutError,
    rex.BusyLoadingError,
    rex.ReadOnlyError,
    rex.TryAgainError,
    TimeoutError,
)
_REFUSED = (rex.AuthenticationError, rex.AuthorizationError, rex.NoPermissionError)


def _may_pass(error: BaseException) -> bool:
    # redis-py files a refused password under ConnectionError.
    return isinstance(error, _PASSING) and not isinstance(error, _REFUSED)


def hide_password(url: str) -> str:
    """The address without its password, for messages and logs."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))


class RedisConnection:
    """Connections to one Redis server.

    Short calls share at most ``config.max_connections`` connections and wait their turn for one.
    A call that blocks in Redis has a connection of its own, so that waiters never hold up others.
    Belongs to the event loop that first uses it.

    Raises:
        ConfigError: the address cannot be parsed.
    """

    def __init__(self, url: str, config: RedisConfig) -> None:
        self.url = hide_password(url)
        self._slots = asyncio.Semaphore(config.max_connections)
        self._allow_eviction = config.allow_eviction
        options: dict[str, Any] = {
            "retry": Retry(NoBackoff(), 0),
            "socket_connect_timeout": 5.0,
            "protocol": 2,
            "client_name": "tq_redis",
        }
        try:
            self._calls = aioredis.Redis.from_url(url, **options)
            self._waits = aioredis.Redis.from_url(url, **options)
        except ValueError as error:
            raise ConfigError(f"Bad Redis address {self.url!r}: {error}") from error

    async def close(self) -> None:
        """Close every connection."""
        await self._calls.aclose()
        await self._waits.aclose()

    async def run(self, verb: Verb, key: str, arguments: bytes, deadline: Deadline) -> bytes:
        """Run a Lua verb on a partition; ``arguments`` and the reply are msgpack."""
        script = load_script(verb)

        async def attempt() -> bytes:
            try:
                reply = await self._calls.evalsha(script.sha, 1, key, arguments)  # type: ignore[misc]
            except rex.NoScriptError:
                # A restart or failover forgot the script; nothing of it ran.
                reply = await self._calls.eval(script.source, 1, key, arguments)  # type: ignore[misc]
            return cast(bytes, reply)

        return await self._until(deadline, attempt)

    async def command(self, *words: Any, deadline: Deadline) -> Any:
        """Run one plain command that is safe to send twice."""
        return await self._until(deadline, lambda: self._calls.execute_command(*words))

    async def commands(self, *commands: Sequence[Any], deadline: Deadline) -> list[Any]:
        """Run plain commands that are safe to send twice, in one round trip."""

        async def attempt() -> list[Any]:
            async with self._calls.pipeline(transaction=False) as pipe:
                for words in commands:
                    pipe.execute_command(*words)
                return cast("list[Any]", await pipe.execute())

        return await self._until(deadline, attempt)

    async def wait_for_event(self, stream: str, after: str, deadline: Deadline) -> None:
        """Return soon after an entry other than a claim enters ``stream`` behind ``after``, when
        the deadline passes, or when the connection fails: the caller looks again in any case."""
        while not deadline.passed:
            block = min(deadline.remaining, _BLOCK_S)
            try:
                async with asyncio.timeout(block + 2.0):
                    reply = await self._waits.xread({stream: after}, block=max(1, int(block * 1000)))
            except _PASSING:
                return
            for _, entries in cast("list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]", reply):
                if any(fields[b"kind"] != b"claim" for _, fields in entries):
                    return
                after = entries[-1][0].decode()

    async def check_server(self, deadline: Deadline, *, own: bool = False) -> None:
        """Refuse a server that is not safe to keep state in.

        Args:
            own: the server is an embedded one, whose state ends with it anyway.

        Raises:
            ServerPolicyError: it would evict keys, or is older than Redis 6.2.
            ServerUnavailableError, AuthenticationError: it cannot be reached.
        """
        info = await self._until(deadline, lambda: self._calls.info("server"))
        version = str(info["redis_version"])
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_SERVER:
            raise ServerPolicyError(f"Redis at {self.url} is {version}; 6.2 or newer is needed.")
        try:
            policy = await self._setting("maxmemory-policy", deadline)
            append_only = await self._setting("appendonly", deadline)
        except AuthenticationError:
            _log.warning("Redis at %s does not let this user read its settings: make sure that "
                         "maxmemory-policy is noeviction.", self.url)
            return
        if policy not in ("noeviction", "") and not self._allow_eviction:
            raise ServerPolicyError(
                f"Redis at {self.url} has maxmemory-policy {policy}: it would drop samples silently. "
                f"Set maxmemory-policy noeviction there (or redis.allow_eviction here)."
            )
        if append_only == "no" and not own:
            _log.warning("Redis at %s has no append-only file: if it restarts, the status of every "
                         "sample is lost. Set appendonly yes.", self.url)

    async def _setting(self, name: str, deadline: Deadline) -> str:
        values = await self._until(deadline, lambda: self._calls.config_get(name))
        return str(values.get(name, ""))

    async def _until(self, deadline: Deadline, attempt: Callable[[], Awaitable[T]]) -> T:
        """``attempt`` until it succeeds, fails for good, or the deadline passes."""

        async def bounded() -> T:
            async with asyncio.timeout(_ATTEMPT_S):
                return await attempt()

        retrying = AsyncRetrying(
            stop=stop_before_delay(deadline.remaining),
            wait=wait_random_exponential(multiplier=0.02, max=0.5),
            retry=retry_if_exception(_may_pass),
            reraise=True,
        )
        try:
            async with asyncio.timeout(deadline.remaining), self._slots:
                return await retrying(bounded)
        except _REFUSED as error:
            raise AuthenticationError(
                f"Redis at {self.url} refused this user: {error}. "
                f"Check the user, the password and the ACL in the address."
            ) from error
        except _PASSING as error:
            raise ServerUnavailableError(
                f"No answer from Redis at {self.url} within {deadline.seconds:g} s "
                f"({type(error).__name__}: {error}). Is the server running and reachable?",
                deadline=deadline.seconds,
            ) from error
        except rex.OutOfMemoryError as error:
            raise ServerFullError(
                f"Redis at {self.url} is at maxmemory; nothing was written. "
                f"Clear finished partitions or raise maxmemory, then retry."
            ) from error
        except rex.RedisError as error:
            raise _server_error(self.url, error) from error


def _server_error(url: str, error: rex.RedisError) -> TQError:
    text = str(error)
    # redis-py has no class of its own for some refusals that arrive from inside a script.
    if text.startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
        return AuthenticationError(f"Redis at {url} refused this user: {text}.")
    if "OOM command not allowed" in text:
        return ServerFullError(
            f"Redis at {url} is at maxmemory; nothing was written. "
            f"Clear finished partitions or raise maxmemory, then retry."
        )
    return ServerError(f"Redis at {url} failed: {text}")
