"""The list of storage units: each enters itself, and clients look there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec

from tq_redis.control.keys import Keys
from tq_redis.control.shards import Connection
from tq_redis.deadline import Deadline
from tq_redis.store.server import Address
from tq_redis.store.units import Unit

RENEW_S = 2.0
"""Every so often a unit renews its entry."""

# An entry outlives its unit for so long, so that readers of blocks that are gone can be told so
# by the host of the unit, at once.
_LIFETIME_S = 24 * 3600
_FRESH_S = 3 * RENEW_S


class _Entry(msgspec.Struct, frozen=True):
    address: Address
    capacity: int
    parsers: tuple[str, ...] = ()


class UnitList:
    """The storage units of one namespace.

    Args:
        connection: to the servers that hold the namespace.
    """

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys

    async def units(self, deadline: Deadline) -> dict[str, Unit]:
        """The units by id; those that have ended are not among them."""
        members = await self._connection.command("SMEMBERS", self._keys.units, deadline=deadline)
        names = sorted(member.decode() for member in members)
        found = await asyncio.gather(*(self._unit(name, deadline) for name in names))
        return {unit.id: unit for unit in found if unit is not None}

    async def _unit(self, name: str, deadline: Deadline) -> Unit | None:
        key = self._keys.unit(name)
        text, left = await self._connection.commands(("GET", key), ("TTL", key), deadline=deadline)
        if text is None:
            await self._connection.command("SREM", self._keys.units, name, deadline=deadline)
            return None
        entry = msgspec.json.decode(text, type=_Entry)
        fresh = left >= _LIFETIME_S - _FRESH_S
        return Unit(name, entry.address, entry.capacity, fresh, entry.parsers)

    async def enter(
        self,
        name: str,
        address: Address,
        capacity: int,
        deadline: Deadline,
        *,
        parsers: Iterable[str] = (),
    ) -> None:
        """Write the entry of a unit, or renew it."""
        entry = msgspec.json.encode(_Entry(address, capacity, tuple(parsers)))
        key, names = self._keys.unit(name), self._keys.units
        await self._connection.command("SET", key, entry, "EX", _LIFETIME_S, deadline=deadline)
        await self._connection.commands(
            ("SADD", names, name), ("EXPIRE", names, 2 * _LIFETIME_S), deadline=deadline
        )

    async def strike(self, name: str, deadline: Deadline) -> None:
        """Remove the entry of a unit: it has ended, and its blocks with it."""
        await self._connection.command("DEL", self._keys.unit(name), deadline=deadline)
        await self._connection.command("SREM", self._keys.units, name, deadline=deadline)
