"""The one edge at which errors of redis-py become ours."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from urllib.parse import urlsplit

import redis.exceptions as rex

from tq_redis.deadline import Deadline
from tq_redis.errors import (
    AuthenticationError,
    ServerError,
    ServerFullError,
    ServerUnavailableError,
)

_PASSING = (
    rex.ConnectionError,
    rex.TimeoutError,
    rex.BusyLoadingError,
    rex.ReadOnlyError,
    rex.TryAgainError,
    rex.ClusterDownError,
    TimeoutError,
)
_REFUSED = (rex.AuthenticationError, rex.AuthorizationError, rex.NoPermissionError)

# What redis-py has no class for: BUSY, and what goes wrong inside a script, which Redis 6.2 quotes.
_PASSING_TEXTS = ("BUSY ", "-READONLY ", "-MASTERDOWN ")
_REFUSED_TEXTS = ("ACL failure", "NOPERM", "The user executing the script")


def may_pass(error: BaseException) -> bool:
    """Whether another attempt may succeed.

    Every mutating verb carries a request id under which Redis keeps its reply, and the others
    change nothing, so what may pass may also be sent again.
    """
    if _is_refusal(error):  # redis-py files a refused password under ConnectionError
        return False
    if isinstance(error, rex.ResponseError) and _names_one_of(error, _PASSING_TEXTS):
        return True
    return isinstance(error, _PASSING)


@contextmanager
def our_errors(url: str, deadline: Deadline) -> Generator[None]:
    """Raise errors of redis-py, and a deadline that passed, as errors of this package.

    Args:
        url: the server's address as it may be shown.
        deadline: the call's.

    Raises:
        ServerUnavailableError, AuthenticationError, ServerFullError, ServerError
    """
    try:
        yield
    except (rex.RedisError, TimeoutError) as error:
        if _is_refusal(error):
            raise AuthenticationError(
                f"Redis at {url} refused this user: {error}. "
                f"Check the user, the password and the ACL in the address."
            ) from error
        if may_pass(error):
            raise ServerUnavailableError(
                f"No answer from Redis at {url} within {deadline.seconds:g} s "
                f"({type(error).__name__}: {error}). Is the server running and reachable?",
                deadline=deadline.seconds,
            ) from error
        if isinstance(error, rex.OutOfMemoryError) or "OOM command not allowed" in str(error):
            raise ServerFullError(
                f"Redis at {url} is at maxmemory; nothing was written. "
                f"Clear finished partitions or raise maxmemory, then retry."
            ) from error
        raise ServerError(f"Redis at {url} failed: {error}") from error


def hide_password(url: str) -> str:
    """The address without its password, for messages and logs.

    Raises:
        ValueError: it is no address.
    """
    parts = urlsplit(url)
    if parts.password is not None:
        host = parts.netloc.rpartition("@")[2]
        url = url.replace(parts.netloc, f"{parts.username or ''}:***@{host}", 1)
    return re.sub(r"(?<=[?&]password=)[^&#]*", "***", url)


def _is_refusal(error: BaseException) -> bool:
    return isinstance(error, _REFUSED) or (
        isinstance(error, rex.ResponseError) and _names_one_of(error, _REFUSED_TEXTS)
    )


def _names_one_of(error: rex.ResponseError, words: tuple[str, ...]) -> bool:
    return any(word in str(error) for word in words)
