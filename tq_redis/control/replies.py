"""What the Lua verbs answer: typed, decoded from msgpack in one place."""

from __future__ import annotations

from typing import TypeVar

import msgspec


class Reply(msgspec.Struct, frozen=True):
    """Common part. ``code`` is ``ok`` or names what stood in the way.

    Attributes:
        ids: for a refusal, the rows concerned.
    """

    code: str
    ids: list[int] = []


class ProduceReply(Reply, frozen=True):
    """``ids`` are ranges when ``code`` is ``ok``."""

    freed: list[str] = []
    created: bool = False
    field: str = ""
    old: str = ""
    new: str = ""


class ClaimReply(Reply, frozen=True):
    schema: list[str] = []
    tags: list[tuple[str, list[str]]] = []
    ready: int = 0
    groups: int = 0
    event: str = "0-0"


class LocateReply(Reply, frozen=True):
    columns: list[int | list[int]] = []
    blocks: list[tuple[int, str]] = []
    field: str = ""


class DescribeReply(Reply, frozen=True):
    keys: list[str] = []
    tags: list[tuple[str, list[str]]] = []
    fields: list[tuple[str, str, str]] = []
    consumed: str = ""
    more: bool = False


class ClearSamplesReply(Reply, frozen=True):
    freed: list[str] = []
    cleared: int = 0
    done: int = 0


class ClearPartitionReply(Reply, frozen=True):
    trash: list[str] = []


class SwapOwnerReply(Reply, frozen=True):
    owner: str = ""


AnyReply = TypeVar("AnyReply", bound=Reply)


def decode(raw: bytes, kind: type[AnyReply]) -> AnyReply:
    """A reply from its msgpack form."""
    return msgspec.msgpack.decode(raw, type=kind)
