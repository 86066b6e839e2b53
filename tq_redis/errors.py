"""Every error that tq_redis raises.

::

    TQError
    ├── ConfigError (ValueError)            a setting is unknown or out of range
    ├── InputError (ValueError)             an argument cannot be right; nothing was written
    │   └── SchemaConflictError             a field would change dtype or kind in rows that have it
    ├── NotFoundError (KeyError)
    │   ├── PartitionNotFoundError
    │   ├── FieldNotFoundError
    │   ├── SampleNotFoundError             stale metadata: the rows were cleared
    │   └── KeyNotFoundError                a user key that no sample has
    ├── NotReadyError (RuntimeError)        rows exist, but some fields are not produced yet
    ├── PartitionEndedError (RuntimeError)  no more samples may be made in a partition
    ├── EndOfStreamError (EOFError)         a task has consumed all samples that there will be
    ├── CannotFillError (RuntimeError)      fewer samples can still come than a batch needs
    ├── LeaseLostError (RuntimeError)       samples are no longer held by the claim
    ├── DeadlineError (TimeoutError)        the call's deadline passed
    │   ├── StoreFullError                  the object store had no room until then
    │   └── PartitionFullError              a task had not consumed enough until then
    ├── NotInitializedError (RuntimeError)  no client in this process and none to attach to
    ├── ClosedError (RuntimeError)          the client was closed
    ├── ServerError (ConnectionError)       Redis cannot be used
    │   ├── ServerUnavailableError          no answer at that address
    │   ├── AuthenticationError             wrong user or password
    │   ├── ServerPolicyError               the server would evict keys, or is too old
    │   └── ServerFullError                 the server is at its memory limit
    ├── DataLostError (RuntimeError)        bytes that Redis names are gone
    ├── ParserError (RuntimeError)          a data_parser failed in a storage unit
    └── CheckpointError (RuntimeError)      a checkpoint cannot be written, read or trusted

Errors carry what they are about as attributes (``partition``, ``fields``, ``rows``,
``deadline``) and say what to do next. They survive pickling, so that they look the same when a
Ray worker raises them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_SHOWN = 8


def shorten(values: Sequence[object]) -> str:
    """The first few of many values, for a message: ``[1, 2, 3, ... 97 more]``."""
    shown = ", ".join(repr(value) for value in values[:_SHOWN])
    more = f", ... {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return f"[{shown}{more}]"


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that names the known word most like ``name``, or the known ones."""
    words = sorted(known)
    close = difflib.get_close_matches(name, words, n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Known: {shorten(words)}." if words else "None is known yet."


class TQError(Exception):
    """Root of the tree.

    Attributes:
        partition: the partition concerned, or None.
        fields: the fields concerned.
        rows: the sample ids concerned (for a put without ids: positions in the put).
        deadline: the deadline that passed, in seconds, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        partition: str | None = None,
        fields: Iterable[str] = (),
        rows: Iterable[int] = (),
        deadline: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.partition = partition
        self.fields = tuple(fields)
        self.rows = tuple(rows)
        self.deadline = deadline

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Callable[..., TQError], tuple[Any, ...]]:
        return _rebuild, (type(self), self.message, self.__dict__)


def _rebuild(kind: type[TQError], message: str, state: dict[str, Any]) -> TQError:
    error = kind(message)
    error.__dict__.update(state)
    return error


class ConfigError(TQError, ValueError):
    """A setting is unknown or out of range."""


class InputError(TQError, ValueError):
    """An argument cannot be right. Nothing was written."""


class SchemaConflictError(InputError):
    """A field would change dtype or kind in rows that already have it. Nothing was written."""


class NotFoundError(TQError, KeyError):
    """Something named in the call does not exist."""


class PartitionNotFoundError(NotFoundError):
    """No such partition in this namespace."""


class FieldNotFoundError(NotFoundError):
    """No sample of the partition has such a field."""


class SampleNotFoundError(NotFoundError):
    """Stale metadata: the rows were cleared. Sample ids are never given out again."""


class KeyNotFoundError(NotFoundError):
    """No sample of the partition has such a user key."""


class NotReadyError(TQError, RuntimeError):
    """The rows exist, but some of the fields are not produced yet."""


class PartitionEndedError(TQError, RuntimeError):
    """No more samples may be made in the partition. Nothing was written."""


class EndOfStreamError(TQError, EOFError):
    """The task has consumed every sample of the partition, and no more will be made."""


class CannotFillError(TQError, RuntimeError):
    """Fewer samples can still come than the batch needs. Nothing was claimed.

    Attributes:
        left: how many can still come, those included that other consumers hold with a lease.
    """

    def __init__(self, message: str, *, left: int = 0, **context: Any) -> None:
        super().__init__(message, **context)
        self.left = left


class LeaseLostError(TQError, RuntimeError):
    """The lease ran out, or consumption was reset: other consumers may have got the samples."""


class DeadlineError(TQError, TimeoutError):
    """The call's deadline passed. The message says what was missing."""


class StoreFullError(DeadlineError):
    """The node's object store had no room for a put until its deadline. Nothing was written;
    consume or clear, then retry."""


class PartitionFullError(DeadlineError):
    """A task's limit left no room for new samples until the deadline. Nothing was written.

    Attributes:
        task: the task that has a limit.
        limit: how many samples it may leave unconsumed.
        unconsumed: how many it has left, those included that it holds with a lease.
    """

    def __init__(
        self, message: str, *, task: str = "", limit: int = 0, unconsumed: int = 0, **context: Any
    ) -> None:
        super().__init__(message, **context)
        self.task = task
        self.limit = limit
        self.unconsumed = unconsumed


class NotInitializedError(TQError, RuntimeError):
    """This process has no client, and there is no running instance to attach to."""


class ClosedError(TQError, RuntimeError):
    """The client was closed; ``init`` makes a new one."""


class ServerError(TQError, ConnectionError):
    """Redis cannot be used."""


class ServerUnavailableError(ServerError):
    """No answer from Redis at that address within the deadline."""


class AuthenticationError(ServerError):
    """Redis refused the user or the password."""


class ServerPolicyError(ServerError):
    """The server is not safe to keep state in: it evicts keys, or it is too old."""


class ServerFullError(ServerError):
    """Redis is at ``maxmemory``. Nothing was written; consume or clear, then retry."""


class DataLostError(TQError, RuntimeError):
    """Bytes that Redis names are gone, with the store that kept them.

    Attributes:
        handles: the blocks concerned.
    """

    def __init__(self, message: str, *, handles: Iterable[str] = (), **context: Any) -> None:
        super().__init__(message, **context)
        self.handles = tuple(handles)


class ParserError(TQError, RuntimeError):
    """A ``data_parser`` failed in a storage unit, or the unit ended meanwhile. Nothing was written.

    The message has the type and the text of what was raised there; the unit's log says where.
    """


class CheckpointError(TQError, RuntimeError):
    """A checkpoint cannot be written, read or trusted. The queue is as it was before.

    Attributes:
        path: the file or directory concerned.
    """

    def __init__(self, message: str, *, path: str = "", **context: Any) -> None:
        super().__init__(message, **context)
        self.path = path
