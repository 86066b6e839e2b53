"""What the Lua verbs answer: typed, decoded from msgpack in one place."""

from __future__ import annotations

from typing import TypeVar

import msgspec


class Reply(msgspec.Struct, frozen=True):
    """Common part. ``code`` is ``ok`` or names what stood in the way.

    Attributes:
        ids: for a refusal, the rows concerned.
        frozen: a save holds the partition still: the entry of its stream ``thaws`` to wait behind,
            and milliseconds after which the hold ends in any case.
    """

    code: str
    ids: list[int] = []
    frozen: tuple[str, float] | None = None


class ProduceReply(Reply, frozen=True):
    """``ids`` are ranges when ``code`` is ``ok``."""

    blocks: list[int] = []
    freed: list[str] = []
    created: bool = False
    field: str = ""
    old: str = ""
    new: str = ""
    made: int = 0
    expected: int = 0
    more: int = 0


class AsideReply(Reply, frozen=True):
    """``aside``: rows that the call has set aside."""

    aside: list[int] = []


class ShortReply(AsideReply, frozen=True):
    """``left``, ``retry`` and ``limit`` are -1 where nothing is known or there is nothing."""

    ready: int = 0
    groups: int = 0
    event: str = "0-0"
    left: int = -1
    complete: bool = False
    retry: int = -1
    limit: int = -1
    missing: list[str] = []


class ClaimReply(ShortReply, frozen=True):
    claim: int = 0
    field: str = ""
    schema: list[str] = []
    tags: list[tuple[str, str, str]] = []


class RecallReply(ClaimReply, frozen=True):
    parts: int = 1
    by: str = ""
    waits: bool = False


class ListReadyReply(ShortReply, frozen=True):
    tags: list[tuple[str, str, str]] = []
    more: bool = False
    group_of: list[str] = []


class RenewReply(Reply, frozen=True):
    lease: int = 0


class ResetReply(Reply, frozen=True):
    after: int = 0
    upto: int = 0
    done: bool = False
    rows: int = 0


class ExpectReply(Reply, frozen=True):
    created: bool = False
    made: int = 0


class LimitReply(Reply, frozen=True):
    """``count`` and ``consumer``: who waits for more samples than a task might leave."""

    created: bool = False
    count: int = 0
    consumer: str = ""


class AdmitReply(ProduceReply, frozen=True):
    """``evicted``: by task, with how many it lost so far. ``retry`` is -1 where no room comes back
    by itself."""

    evicted: list[tuple[str, list[int], int]] = []
    task: str = ""
    limit: int = 0
    unconsumed: int = 0
    held: int = 0
    event: str = "0-0"
    retry: int = -1


class LocateReply(Reply, frozen=True):
    columns: list[int | list[int]] = []
    blocks: list[tuple[int, str]] = []
    field: str = ""


class DescribeReply(Reply, frozen=True):
    keys: list[str] = []
    tags: list[tuple[str, str, str]] = []
    fields: list[tuple[str, str, str]] = []
    states: str = ""
    groups: list[str] = []
    more: bool = False


class ListChangesReply(Reply, frozen=True):
    """``whole``: all keys are to be listed; ``ids`` are 0 for keys that are gone."""

    generation: str = ""
    upto: int = 0
    whole: bool = False
    keys: list[str] = []
    tags: list[tuple[str, str, str]] = []
    more: bool = False


class MarkLostReply(Reply, frozen=True):
    lost: list[tuple[str, list[int]]] = []
    tasks: list[tuple[str, list[int]]] = []
    left: list[int] = []
    freed: list[str] = []
    done: int = 0


class ClearSamplesReply(Reply, frozen=True):
    freed: list[str] = []
    cleared: int = 0
    done: int = 0


class ClearPartitionReply(Reply, frozen=True):
    trash: list[str] = []


class SnapshotReply(Reply, frozen=True):
    """``items`` stay packed: they go into a file as they are."""

    keys: list[tuple[str, str]] = []
    cursor: str = "0"
    items: msgspec.Raw = msgspec.Raw(b"\x90")


class ActivateReply(Reply, frozen=True):
    trash: list[str] = []


class SwapOwnerReply(Reply, frozen=True):
    owner: str = ""


AnyReply = TypeVar("AnyReply", bound=Reply)


def decode(raw: bytes, kind: type[AnyReply]) -> AnyReply:
    """A reply from its msgpack form."""
    return msgspec.msgpack.decode(raw, type=kind)
