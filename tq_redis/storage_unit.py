"""A storage unit: a store that is a process of its own, for clients in and outside Ray."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping

from tq_redis.config import Config
from tq_redis.control.keys import Keys
from tq_redis.control.shards import Shards
from tq_redis.control.units import RENEW_S, UnitList
from tq_redis.deadline import Deadline
from tq_redis.errors import ConfigError, ServerError
from tq_redis.store.parsers import BlockParser
from tq_redis.store.server import StoreServer
from tq_redis.store.shelf import Shelf

_log = logging.getLogger(__name__)

_CONTACT_S = 10.0
_WILDCARDS = ("0.0.0.0", "::", "[::]", "*")


class StorageUnit:
    """Listens from construction on, and is found by clients while :meth:`run` runs.

    Args:
        config: ``redis`` says where it enters itself.
        host: the address of this machine to listen at.
        port: 0: one that is free.
        advertise: this machine's name for clients, if it is another one than ``host``.
        capacity: bytes that it may keep.
        curve: encrypt what travels.
        parsers: what it offers to run, by name.

    Attributes:
        id: its name in handles and in the list of units.

    Raises:
        ConfigError: it cannot listen there, or clients could not find it.
    """

    def __init__(
        self,
        config: Config,
        *,
        host: str,
        port: int = 0,
        advertise: str | None = None,
        capacity: int,
        curve: bool = False,
        parsers: Mapping[str, BlockParser] | None = None,
    ) -> None:
        if (advertise or host) in _WILDCARDS:
            raise ConfigError(
                f"Clients cannot connect to {advertise or host}: say by which name or address of "
                f"this machine they reach it (advertise)."
            )
        if config.redis.url is None:
            raise ConfigError("Which Redis? Set redis.url, give --url, or set TQ_REDIS_URL.")
        self.id = uuid.uuid4().hex[:12]
        self.shelf = Shelf(capacity)
        self.server = StoreServer(
            self.shelf, host, port, advertise=advertise, curve=curve, parsers=parsers
        )
        self._config = config
        self._capacity = capacity
        self._parsers = tuple(parsers or ())

    async def run(self, stop: asyncio.Event) -> None:
        """Be a unit until ``stop`` is set, or nobody has called for ``idle_ttl_s``.

        Raises:
            ServerUnavailableError, AuthenticationError: Redis cannot be used at the start. Later on
                it may go and come again.
        """
        connection = Shards(self._config.redis)
        keys = Keys(self._config.redis.namespace)
        units = UnitList(connection, keys)
        try:
            await connection.learn(keys, Deadline(_CONTACT_S))
            await self._strike_predecessor(units)
            await self._enter(units, Deadline(_CONTACT_S))
            while not stop.is_set() and not self._idle():
                try:
                    async with asyncio.timeout(RENEW_S):
                        await stop.wait()
                except TimeoutError:
                    await self._renew(units)
            await self._strike(units)
        finally:
            self.server.stop()
            await connection.close()

    def _idle(self) -> bool:
        return time.monotonic() - self.server.last_call > self._config.idle_ttl_s

    async def _strike_predecessor(self, units: UnitList) -> None:
        """A unit that was killed, and listened at the same port, is gone. Readers of its blocks
        cannot see it: they are not refused there."""
        endpoint = self.server.address.endpoint
        for unit in (await units.units(Deadline(_CONTACT_S))).values():
            if unit.address.endpoint == endpoint and unit.id != self.id:
                await units.strike(unit.id, Deadline(_CONTACT_S))

    async def _enter(self, units: UnitList, deadline: Deadline) -> None:
        await units.enter(
            self.id, self.server.address, self._capacity, deadline, parsers=self._parsers
        )

    async def _renew(self, units: UnitList) -> None:
        try:
            await self._enter(units, Deadline(RENEW_S))
        except ServerError as error:
            _log.warning("Storage unit %s could not renew its entry: %s", self.id, error)

    async def _strike(self, units: UnitList) -> None:
        try:
            await units.strike(self.id, Deadline(_CONTACT_S))
        except ServerError as error:
            _log.warning("Storage unit %s could not remove its entry: %s", self.id, error)
