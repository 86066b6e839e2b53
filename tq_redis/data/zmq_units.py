"""How one process talks to the storage units of an instance.

A request that was cut off is made again: all are safe to repeat. A unit is gone, and its blocks
with it, if it has struck its entry, or has not renewed it for a while and refuses connections. As
long as it may be alive, it is waited for until the deadline, and nothing is given up.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from tq_redis.data.calls import together
from tq_redis.deadline import Deadline
from tq_redis.errors import DeadlineError, ServerError
from tq_redis.store import messages as m
from tq_redis.store.connection import Answer, StoreConnection
from tq_redis.store.units import Directory, Unit
from tq_redis.store.zmq_connection import ZmqConnection

ANSWER_S = 2.0
"""A unit answers in a fraction of a millisecond, if it need not wait and the answer is small."""

# How long the list of units is good for.
_LISTED_S = 2.0
# A host that is there says within this time that nobody listens at a port.
_PROBE_S = 1.0
_LOOK_S = 0.25
# For so long nothing new is offered to a unit that refused.
_REFUSED_S = 1.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


class UnitGoneError(Exception):
    """The unit has ended, and its blocks with it."""


class Units:
    """The storage units that are listed, and the connections to them.

    Args:
        directory: where they are listed.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._connections: dict[str, StoreConnection] = {}
        self._listed: dict[str, Unit] = {}
        self._listed_until = Deadline(0)
        self._gone: set[str] = set()
        self._refusing: dict[str, Deadline] = {}

    def close(self) -> None:
        """Let go of all connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    async def listed(self, deadline: Deadline, *, anew: bool = False) -> dict[str, Unit]:
        """The units by id, without those that are known to have ended."""
        if anew or self._listed_until.passed:
            listed = await self._directory.units(deadline)
            self._listed = {name: unit for name, unit in listed.items() if name not in self._gone}
            self._listed_until = Deadline(_LISTED_S)
        return self._listed

    def refuses(self, unit: str) -> bool:
        """Whether nobody listened where the unit should, a moment ago."""
        return unit in self._refusing and not self._refusing[unit].passed

    async def ask(
        self,
        unit: str,
        request: m.Request,
        buffers: Sequence[Any],
        deadline: Deadline,
        *,
        patient: bool = True,
    ) -> Answer:
        """The answer of a unit.

        Args:
            patient: ask again if nobody listens there; others can do without this unit.

        Raises:
            UnitGoneError: it has ended.
            ConnectionRefusedError: nobody listens there, although it may be alive.
            DeadlineError: it did not answer in time.
        """
        pause = _FIRST_PAUSE_S
        while True:
            connection = await self._connection(unit, deadline)
            try:
                return await connection.ask(request, buffers, wait_s=deadline.remaining)
            except TimeoutError:
                pass
            except ConnectionError:
                if await self._is_gone(unit, connection, deadline):
                    raise UnitGoneError from None
                if not patient and self.refuses(unit):
                    raise ConnectionRefusedError(connection.address.endpoint) from None
                await asyncio.sleep(min(pause, deadline.remaining))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            if deadline.passed:
                raise DeadlineError(
                    f"Storage unit {unit} at {connection.address.endpoint} did not answer within "
                    f"the deadline of {deadline.seconds:g} s",
                    deadline=deadline.seconds,
                )

    async def ask_all(
        self, units: Iterable[str], request: m.Request, deadline: Deadline
    ) -> dict[str, m.Reply]:
        """The answers of units; those that have ended, or do not answer soon, are left out."""
        answers: dict[str, m.Reply] = {}

        async def ask(unit: str) -> None:
            try:
                soon = Deadline(min(ANSWER_S, deadline.remaining))
                answers[unit], _ = await self.ask(unit, request, (), soon)
            except (UnitGoneError, DeadlineError):
                return

        await together([ask(unit) for unit in units])
        return answers

    @property
    def in_use(self) -> list[str]:
        """The units that this process has talked to, and that have not ended."""
        return list(self._connections)

    async def _connection(self, unit: str, deadline: Deadline) -> StoreConnection:
        """Raises:
        UnitGoneError: it is not listed any more.
        """
        if unit not in self._connections:
            if unit in self._gone:
                raise UnitGoneError
            if unit not in self._listed and unit not in await self.listed(deadline, anew=True):
                raise UnitGoneError
            if unit not in self._connections:  # another call may have been faster
                self._connections[unit] = ZmqConnection(self._listed[unit].address)
        return self._connections[unit]

    async def _is_gone(self, unit: str, connection: StoreConnection, deadline: Deadline) -> bool:
        """Whether a unit that cannot be reached has ended for certain. A refusal alone may be a
        firewall's, or that of another machine which has the same address here."""
        try:
            async with asyncio.timeout(min(_PROBE_S, deadline.remaining)):
                refused = await _nobody_listens(connection.address.endpoint)
        except (OSError, TimeoutError):
            refused = False
        if refused:
            self._refusing[unit] = Deadline(_REFUSED_S)
        try:
            entry = (await self._directory.units(deadline)).get(unit)
        except (ServerError, DeadlineError):  # then nobody knows
            return False
        gone = entry is None or (refused and not entry.fresh)
        if gone:
            self._gone.add(unit)
            self._listed.pop(unit, None)
            self._refusing.pop(unit, None)
            if self._connections.get(unit) is connection:
                del self._connections[unit]
                connection.close()
        return gone


async def pause(deadline: Deadline, what_is_wrong: str) -> None:
    """Before one looks again for what is not there yet.

    Raises:
        DeadlineError: there is no time left; the message says what is wrong.
    """
    if deadline.passed:
        raise DeadlineError(what_is_wrong, deadline=deadline.seconds)
    await asyncio.sleep(min(_LOOK_S, deadline.remaining))


async def _nobody_listens(endpoint: str) -> bool:
    """Whether every address of a host refuses connections at that port."""
    where = urlsplit(endpoint)
    found = await asyncio.get_running_loop().getaddrinfo(
        where.hostname, where.port, type=socket.SOCK_STREAM
    )
    for _, _, _, _, address in found:
        try:
            _, writer = await asyncio.open_connection(str(address[0]), where.port)
        except ConnectionRefusedError:
            continue
        writer.close()
        return False
    return True
