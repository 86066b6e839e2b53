"""What is known of storage units, and where they are listed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tq_redis.deadline import Deadline
from tq_redis.store.server import Address


@dataclass(frozen=True, slots=True)
class Unit:
    """A storage unit, as it is listed.

    Attributes:
        id: unique; a unit that is started again is another one.
        address: for clients.
        capacity: bytes that it may keep.
        parsers: the names of those that it offers.
        fresh: it has renewed its entry lately. One that has not may still answer: it may be Redis
            that was away.
    """

    id: str
    address: Address
    capacity: int
    fresh: bool
    parsers: tuple[str, ...] = ()


class Directory(Protocol):
    """Where storage units are listed."""

    async def units(self, deadline: Deadline) -> dict[str, Unit]:
        """The units by id; those that have ended are not among them."""
        ...
