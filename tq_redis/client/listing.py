"""What a client knows of the keys of partitions, kept up to date by what has changed."""

from __future__ import annotations

import asyncio
import copy
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from operator import gt, itemgetter
from typing import Any

from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Changes, Version
from tq_redis.deadline import Deadline
from tq_redis.errors import InputError, PartitionNotFoundError

# Partitions that are remembered: those that were asked for last.
_REMEMBERED = 8
# Types that JSON has for what holds other values.
_NESTED = frozenset({dict, list})


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


@dataclass
class _Listing:
    """One partition: its keys in the order of their samples.

    Dicts of plain values, and none of tuples: Python's collector would look at each of a hundred
    thousand tuples, several times while they are read.

    Attributes:
        samples, tags: by key.
        nested: keys with a tag that holds other values.
    """

    version: Version | None = None
    samples: dict[str, int] = field(default_factory=dict[str, int])
    tags: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    nested: set[str] = field(default_factory=set[str])
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def update(self, changes: Changes) -> None:
        self.version = changes.version
        if changes.whole:
            self.samples, self.tags, self.nested = changes.samples, changes.tags, set()
        else:
            self._merge(changes)
        self._sort()
        for key, row in changes.tags.items():
            if not _NESTED.isdisjoint(map(type, row.values())):
                self.nested.add(key)

    def copy(self) -> dict[str, dict[str, Any]]:
        """Key -> tags that are the caller's own."""
        listed = {key: row.copy() for key, row in self.tags.items()}
        for key in self.nested:
            listed[key] = copy.deepcopy(self.tags[key])
        return listed

    def _merge(self, changes: Changes) -> None:
        self.nested.difference_update(changes.samples)
        for key, sample in changes.samples.items():
            if self.samples.get(key, sample) != sample:  # its place is another one
                del self.samples[key], self.tags[key]
            if sample:
                self.samples[key], self.tags[key] = sample, changes.tags[key]

    def _sort(self) -> None:
        """A key that was cleared and made again while it was listed stands at its old place."""
        numbers = self.samples.values()
        if any(map(gt, numbers, islice(numbers, 1, None))):
            self.samples = dict(sorted(self.samples.items(), key=itemgetter(1)))
            self.tags = {key: self.tags[key] for key in self.samples}


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
            return listing.copy()
