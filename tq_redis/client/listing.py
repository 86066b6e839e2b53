"""What a client knows of the keys of partitions, kept up to date by what has changed."""

from __future__ import annotations

import asyncio
import copy
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Changes, Version
from tq_redis.deadline import Deadline
from tq_redis.errors import InputError, PartitionNotFoundError

# Partitions that are remembered: those that were asked for last.
_REMEMBERED = 8


def text_of(version: Version) -> str:
    """A version as users hold it."""
    return f"{version.generation}-{version.number}"


def version_of(text: str | None) -> Version | None:
    """Inverse of :func:`text_of`.

    Raises:
        InputError: it is none.
    """
    if text is None:
        return None
    generation, _, number = text.partition("-")
    if not (generation.isdecimal() and number.isdecimal()):
        raise InputError(f"since must be the version of an earlier result, got {text!r}")
    return Version(generation, int(number))


class _Row(NamedTuple):
    sample: int
    tags: dict[str, Any]
    plain: bool

    @classmethod
    def of(cls, sample: int, tags: dict[str, Any]) -> _Row:
        return cls(sample, tags, not any(isinstance(value, dict | list) for value in tags.values()))

    def copy(self) -> dict[str, Any]:
        return self.tags.copy() if self.plain else copy.deepcopy(self.tags)


@dataclass
class _Listing:
    """One partition: its keys in the order of their samples."""

    version: Version | None = None
    rows: dict[str, _Row] = field(default_factory=dict[str, _Row])
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def update(self, changes: Changes) -> None:
        self.version = changes.version
        if changes.whole:
            self.rows.clear()
        last = next(reversed(self.rows.values())).sample if self.rows else 0
        sort = False
        for key, (sample, tags) in changes.rows.items():
            known = self.rows.get(key)
            if known is not None and known.sample != sample:  # its place is another one
                del self.rows[key]
                known = None
            if sample:
                self.rows[key] = _Row.of(sample, tags)
                if known is None:
                    sort = sort or sample < last
                    last = sample
        if sort:
            self.rows = dict(sorted(self.rows.items(), key=lambda item: item[1].sample))


class Listings:
    """The partitions that were listed last."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._known: OrderedDict[str, _Listing] = OrderedDict()

    async def tags(self, partition: str, deadline: Deadline) -> dict[str, dict[str, Any]]:
        """Key -> tags, in the order of the samples; the caller's to change.

        Raises:
            PartitionNotFoundError
        """
        listing = self._known.setdefault(partition, _Listing())
        self._known.move_to_end(partition)
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        async with listing.lock:
            try:
                changes = await self._control.changes(partition, listing.version, deadline)
            except PartitionNotFoundError:
                self._known.pop(partition, None)
                raise
            listing.update(changes)
            return {key: row.copy() for key, row in listing.rows.items()}
