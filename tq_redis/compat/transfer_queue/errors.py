"""What the calls raise: each error is one of :mod:`tq_redis.errors`, and also of the class that
code written for transfer_queue catches."""

from __future__ import annotations

from tq_redis.errors import (
    CheckpointError,
    ConfigError,
    DeadlineError,
    InputError,
    KeyNotFoundError,
    NotInitializedError,
    NotReadyError,
    PartitionNotFoundError,
    SampleNotFoundError,
)


class StorageKeyNotFoundError(SampleNotFoundError):
    """Stale metadata: the rows were cleared. A KeyError."""


class NotConnectedError(NotInitializedError, AssertionError):
    """This process has no client, and there is no running instance to attach to."""


class KeyTypeError(InputError, TypeError):
    """A key is not a string. Nothing was written."""


class KeysNotFoundError(KeyNotFoundError, ValueError):
    """None of the keys is there."""


class FieldsNotReadyError(NotReadyError, ValueError):
    """The rows have no field in common."""


class KeyLookupError(KeyNotFoundError, RuntimeError):
    """A key is not in the batch, or a row has none."""


class RequestError(InputError, RuntimeError):
    """A request for metadata that cannot be right. Nothing was claimed."""


class RequestPartitionError(PartitionNotFoundError, RuntimeError):
    """Metadata of a partition that does not exist was asked for."""


class RequestTimeoutError(DeadlineError, RuntimeError):
    """Not enough samples came. Nothing was claimed."""


class SamplerNotFoundError(ConfigError):
    """No sampler has this name. A ValueError."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at that place."""
