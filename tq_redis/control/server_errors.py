"""The one edge at which errors of redis-py become ours."""

from __future__ import annotations

import re
import ssl
from collections.abc import Generator
from contextlib import contextmanager

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
    rex.SlotNotCoveredError,
    TimeoutError,
)
_REFUSED = (rex.AuthenticationError, rex.AuthorizationError, rex.NoPermissionError)

# What redis-py has no class for, and what goes wrong inside a script, which Redis 6.2 quotes.
# NOREPLICAS: min-replicas-to-write, on a primary that was replaced, and on its successor until it
# has one. UNBLOCKED: the server was demoted while a call waited in it.
_PASSING_TEXT = re.compile(
    r"\b(BUSY|LOADING|READONLY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|NOREPLICAS|UNBLOCKED) "
)
# What a cluster's client says while servers come and go; other errors of its are for good.
_PASSING_CLUSTER = re.compile(
    r"cannot be connected|slots are not covered|could not agree|TTL exhausted"
)
_REFUSED_TEXTS = ("ACL failure", "NOPERM", "The user executing the script")
# The primary lives, and another attempt needs the same connection as before.
_HERE = re.compile(r"\b(BUSY|LOADING|TRYAGAIN) ")

_CLUSTER_ERRORS = (rex.RedisClusterException, rex.ClusterError)


def may_pass(error: BaseException) -> bool:
    """Whether another attempt may succeed.

    Every mutating verb carries a request id under which Redis keeps its reply, and the others
    change nothing, so what may pass may also be sent again.
    """
    cause = _cause(error)
    # redis-py files a refused password and an untrusted certificate under ConnectionError.
    if _is_refusal(cause) or _is_untrusted(cause) or _is_no_cluster(cause):
        return False
    if isinstance(error, _CLUSTER_ERRORS) and _PASSING_CLUSTER.search(str(error)):
        return True
    if isinstance(error, rex.ResponseError) and _PASSING_TEXT.search(str(error)):
        return True
    return isinstance(error, _PASSING)


def is_elsewhere(error: BaseException) -> bool:
    """Whether the primary may be another server by now."""
    return not (
        isinstance(error, (rex.BusyLoadingError, rex.TryAgainError)) or _HERE.search(str(error))
    )


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
    except (rex.RedisError, rex.RedisClusterException, TimeoutError) as error:
        raise _ours(error, url, deadline) from error


def _ours(error: BaseException, url: str, deadline: Deadline) -> ServerError:
    cause = _cause(error)
    if _is_refusal(cause):
        return AuthenticationError(
            f"Redis at {url} refused this user: {cause}. "
            f"Check the user, the password and the ACL in the address."
        )
    if _is_untrusted(cause):
        return ServerError(
            f"The certificate of Redis at {url} is not trusted: {cause}. "
            f"Name its authority in the address: ?ssl_ca_certs=/path/ca.pem."
        )
    if _is_no_cluster(cause):
        return ServerError(
            f"Redis at {url} is no cluster ({cause}). A single server's address starts with "
            f"redis:// or rediss://."
        )
    if isinstance(error, rex.MovedError):
        return ServerError(
            f"Redis at {url} is a node of a Redis Cluster. The address of one starts with "
            f"redis+cluster:// or rediss+cluster://."
        )
    if may_pass(error):
        why = f" ({type(error).__name__}: {error})" if str(error) else ""
        return ServerUnavailableError(
            f"No answer from Redis at {url} within {deadline.seconds:g} s{why}. "
            f"Is the server running and reachable?",
            deadline=deadline.seconds,
        )
    if isinstance(error, rex.OutOfMemoryError) or "OOM command not allowed" in str(error):
        return ServerFullError(
            f"Redis at {url} is at maxmemory; nothing was written. "
            f"Clear finished partitions or raise maxmemory, then retry."
        )
    return ServerError(f"Redis at {url} failed: {error}")


def _cause(error: BaseException) -> BaseException:
    """What a cluster's client failed for: it wraps the first node's error."""
    cause: BaseException | None = error
    while isinstance(cause, rex.RedisClusterException):
        error, cause = cause, cause.__cause__ or cause.__context__
    return error if cause is None else cause


def _is_refusal(error: BaseException) -> bool:
    return isinstance(error, _REFUSED) or (
        isinstance(error, rex.ResponseError) and any(word in str(error) for word in _REFUSED_TEXTS)
    )


def _is_untrusted(error: BaseException) -> bool:
    return isinstance(error, rex.ConnectionError) and isinstance(
        error.__cause__ or error.__context__, ssl.SSLCertVerificationError
    )


def _is_no_cluster(error: BaseException) -> bool:
    return isinstance(error, rex.ResponseError) and "cluster support disabled" in str(error)
