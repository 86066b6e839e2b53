"""Blocks in storage units: processes that keep them in their memory, for clients in and outside
Ray. Each block goes to one unit, each put begins with another one.

A request that gets no answer is made again; all are safe to repeat. Whether a unit is gone, and
its blocks with it, is asked of the host that it ran on: as long as the unit may be alive, a read
fails at its deadline, and nothing is given up.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import zmq.asyncio

from tq_redis.config import Config
from tq_redis.data.base import Backend, Content, EncodedBlock, StoreUsage
from tq_redis.data.together import together
from tq_redis.deadline import Deadline
from tq_redis.errors import DataLostError, DeadlineError, InputError, StoreFullError, shorten
from tq_redis.store import messages as m
from tq_redis.store.connection import StoreConnection
from tq_redis.store.units import Directory, Unit

SMALL_BYTES = 64 << 10
"""A put of up to so many bytes goes to one unit, without asking for room first."""

# How long the first answer is waited for, before the unit is asked again.
_ANSWER_S = 2.0
# How long the list of units is good for.
_LISTED_S = 2.0
# A host that is there says within this time that nobody listens at a port.
_PROBE_S = 1.0
_PAUSE_S = 0.25
# A unit keeps room this much longer than the call may take that asked for it.
_KEEP_S = 5.0

T = TypeVar("T")
Answer = tuple[m.Reply, list[Any]]


class UnitGoneError(Exception):
    """The unit has ended, and its blocks with it."""


class ZmqBackend(Backend):
    """One process's way to the storage units of an instance.

    Args:
        directory: where the units are listed.
    """

    name = "zmq"

    def __init__(self, config: Config, directory: Directory) -> None:
        self._config = config
        self._directory = directory
        self._context = zmq.asyncio.Context()
        self._connections: dict[str, StoreConnection] = {}
        self._listed: dict[str, Unit] = {}
        self._listed_until = Deadline(0)
        self._turn = itertools.count(random.randrange(1 << 16))

    async def start(self, deadline: Deadline) -> None:
        """Starts the units that the settings ask for; others start by themselves."""
        if self._config.data.units:
            from tq_redis.data.zmq_actors import start_units  # with Ray, which others need not have

            started = await self._in_thread(deadline, start_units)
            while not set(started) <= set(await self._directory.units(deadline)):
                await self._look_again(
                    deadline, f"Storage units {started} did not enter themselves"
                )

    async def write(
        self, partition: str, blocks: Sequence[EncodedBlock], deadline: Deadline
    ) -> list[str]:
        names = [secrets.token_hex(8) for _ in blocks]
        if sum(block.nbytes for block in blocks) <= SMALL_BYTES:
            unit = await self._keep(partition, names, blocks, deadline)
            return [f"zmq/{unit}/{name}" for name in names]
        calls = [
            self._keep(partition, [name], [block], deadline)
            for name, block in zip(names, blocks, strict=True)
        ]
        units = await together(calls)
        return [f"zmq/{unit}/{name}" for unit, name in zip(units, names, strict=True)]

    async def read(self, handles: Sequence[str], deadline: Deadline) -> dict[str, Content]:
        found: dict[str, Content] = {}
        missing: list[str] = []
        gone: set[str] = set()

        async def of_unit(unit: str, names: list[str]) -> None:
            try:
                reply, buffers = await self._ask(unit, m.Find(names), (), deadline)
            except UnitGoneError:
                gone.add(unit)
                missing.extend(f"zmq/{unit}/{name}" for name in names)
                return
            assert isinstance(reply, m.Found)
            for name, content in zip(names, m.unpack(reply.parcels, buffers), strict=True):
                if content is None:
                    missing.append(f"zmq/{unit}/{name}")
                else:
                    found[f"zmq/{unit}/{name}"] = content

        await together([of_unit(*item) for item in _by_unit(handles).items()])
        if missing:
            ended = f"; storage units {sorted(gone)} have ended" if gone else ""
            raise DataLostError(f"Blocks are gone: {shorten(missing)}{ended}", handles=missing)
        return found

    async def delete(self, handles: Iterable[str], deadline: Deadline) -> None:
        await self._tell(handles, m.Drop, deadline)

    async def confirm(self, handles: Iterable[str], deadline: Deadline) -> None:
        await self._tell(handles, m.Confirm, deadline)

    async def unconfirmed(self, older_than: float, deadline: Deadline) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for unit, reply in (await self._ask_all(m.ListUnconfirmed(older_than), deadline)).items():
            assert isinstance(reply, m.Unconfirmed)
            for partition, names in reply.names.items():
                found.setdefault(partition, []).extend(f"zmq/{unit}/{name}" for name in names)
        return found

    async def usage(self, deadline: Deadline) -> list[StoreUsage]:
        found: list[StoreUsage] = []
        for unit, reply in (await self._ask_all(m.Measure(), deadline)).items():
            assert isinstance(reply, m.Usage)
            found.append(StoreUsage(f"zmq/{unit}", reply.blocks, reply.used, reply.capacity))
        return found

    async def shutdown(self, deadline: Deadline) -> None:
        """Frees all blocks, and ends the units that :meth:`start` started. The others serve the
        next run."""
        await self._ask_all(m.Drop(), deadline)
        if self._config.data.units:
            from tq_redis.data.zmq_actors import end_units

            await self._in_thread(deadline, end_units)

    async def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._context.term()

    # Where blocks go

    async def _keep(
        self, partition: str, names: list[str], blocks: Sequence[EncodedBlock], deadline: Deadline
    ) -> str:
        """Hand blocks to one unit that has room, and return its id."""
        parcels, buffers = m.pack(block.content for block in blocks)
        nbytes = sum(block.nbytes for block in blocks)
        full: m.Full | None = None
        while True:
            units = await self._in_turn(nbytes, partition, deadline)
            for unit in units:
                # The last one is waited for: it tells as soon as it has room.
                patience = _patience(deadline) if unit is units[-1] else 0.0
                try:
                    ticket = 0
                    if nbytes > SMALL_BYTES or full is not None:
                        request = m.Reserve(nbytes, patience, deadline.remaining + _KEEP_S)
                        reply, _ = await self._ask(unit, request, (), deadline, patience)
                        if isinstance(reply, m.Full):
                            full = reply
                            continue
                        assert isinstance(reply, m.Ticket)
                        ticket = reply.number
                    hold = m.Hold(partition, names, parcels, ticket)
                    reply, _ = await self._ask(unit, hold, buffers, deadline)
                except UnitGoneError:
                    continue
                if isinstance(reply, m.Done):
                    return unit
                assert isinstance(reply, m.Full)
                full = reply
            if _patience(deadline) == 0 and full is not None:
                raise StoreFullError(
                    f"All {len(units)} storage units are full (the last one has {full.used} of "
                    f"{full.capacity} bytes), and nothing was freed within the deadline of "
                    f"{deadline.seconds:g} s. Consume or clear, then retry, or start more units",
                    partition=partition,
                    deadline=deadline.seconds,
                )

    async def _in_turn(self, nbytes: int, partition: str, deadline: Deadline) -> list[str]:
        """The units that may keep so many bytes, another one first each time.

        Raises:
            InputError: none ever can.
            DeadlineError: there is none.
        """
        while True:
            units = [unit for unit in (await self._units(deadline)).values() if unit.fresh]
            large = [unit.id for unit in units if nbytes <= unit.capacity]
            if large:
                first = next(self._turn) % len(large)
                return large[first:] + large[:first]
            if units:
                raise InputError(
                    f"A block of {nbytes} bytes is more than any storage unit may keep "
                    f"({max(unit.capacity for unit in units)}). Put fewer rows at once, or start "
                    f"units with more --capacity",
                    partition=partition,
                )
            namespace = self._config.redis.namespace
            await self._look_again(
                deadline,
                f"No storage unit runs in namespace {namespace!r}. Start one with tq-redis "
                f"storage-unit, or let init() start some (data.units)",
            )

    async def _look_again(self, deadline: Deadline, what_is_wrong: str) -> None:
        if deadline.passed:
            raise DeadlineError(what_is_wrong, deadline=deadline.seconds)
        self._listed_until = Deadline(0)
        await asyncio.sleep(min(_PAUSE_S, deadline.remaining))

    async def _in_thread(self, deadline: Deadline, call: Callable[[Config], T]) -> T:
        try:
            async with asyncio.timeout(deadline.remaining):
                return await asyncio.to_thread(call, self._config)
        except TimeoutError:
            raise DeadlineError(
                f"Ray did not start or end the storage units within {deadline.seconds:g} s",
                deadline=deadline.seconds,
            ) from None

    # Talking to units

    async def _units(self, deadline: Deadline) -> dict[str, Unit]:
        if self._listed_until.passed:
            self._listed = await self._directory.units(Deadline(max(deadline.remaining, _PROBE_S)))
            self._listed_until = Deadline(_LISTED_S)
        return self._listed

    async def _connection(self, unit: str, deadline: Deadline) -> StoreConnection:
        """Raises:
        UnitGoneError: it is not listed any more.
        """
        if unit not in self._connections:
            if unit not in self._listed:
                self._listed_until = Deadline(0)
            units = await self._units(deadline)
            if unit not in units:
                raise UnitGoneError
            if unit not in self._connections:  # another call may have been faster
                address = units[unit].address
                self._connections[unit] = StoreConnection(self._context, address)
        return self._connections[unit]

    async def _ask(
        self,
        unit: str,
        request: m.Request,
        buffers: Sequence[Any],
        deadline: Deadline,
        patience: float = 0.0,
    ) -> Answer:
        """The answer of a unit, which may take ``patience`` seconds for it by itself.

        Raises:
            UnitGoneError: it has ended.
            DeadlineError: it did not answer in time.
        """
        pause = _ANSWER_S
        while True:
            connection = await self._connection(unit, deadline)
            try:
                wait_s = min(patience + pause, deadline.remaining)
                return await connection.ask(request, buffers, wait_s=wait_s)
            except TimeoutError:
                if await self._is_gone(unit, connection):
                    raise UnitGoneError from None
                if deadline.passed:
                    raise DeadlineError(
                        f"Storage unit {unit} at {connection.address.endpoint} did not answer "
                        f"within the deadline of {deadline.seconds:g} s",
                        deadline=deadline.seconds,
                    ) from None
            pause *= 2

    async def _is_gone(self, unit: str, connection: StoreConnection) -> bool:
        """Whether a unit that does not answer has ended for certain: its host says that nobody
        listens there any more, or it has struck its own entry."""
        where = urlsplit(connection.address.endpoint)
        try:
            async with asyncio.timeout(_PROBE_S):
                _, writer = await asyncio.open_connection(where.hostname, where.port)
            writer.close()
            gone = False
        except ConnectionRefusedError:
            gone = True
        except (OSError, TimeoutError):
            units = await self._directory.units(Deadline(_PROBE_S))
            gone = unit not in units
        if gone:
            self._listed.pop(unit, None)
            if self._connections.get(unit) is connection:
                del self._connections[unit]
                connection.close()
        return gone

    async def _tell(
        self, handles: Iterable[str], request: Callable[[list[str]], m.Request], deadline: Deadline
    ) -> None:
        """Tell the units of these handles; those that have ended have nothing to do."""

        async def tell(unit: str, names: list[str]) -> None:
            try:
                await self._ask(unit, request(names), (), deadline)
            except UnitGoneError:
                return

        await together([tell(*item) for item in _by_unit(handles).items()])

    async def _ask_all(self, request: m.Request, deadline: Deadline) -> dict[str, m.Reply]:
        """The answers of all units; those that have ended, or do not answer, are left out."""
        answers: dict[str, m.Reply] = {}

        async def ask(unit: str) -> None:
            try:
                wait = Deadline(min(_ANSWER_S, deadline.remaining))
                answers[unit], _ = await self._ask(unit, request, (), wait)
            except (UnitGoneError, DeadlineError):
                return

        await together([ask(unit) for unit in await self._units(deadline)])
        return answers


def _patience(deadline: Deadline) -> float:
    """Seconds that a unit may wait for room, so that its answer still arrives in time."""
    return max(0.0, deadline.remaining - max(0.5, 0.1 * deadline.remaining))


def _by_unit(handles: Iterable[str]) -> dict[str, list[str]]:
    units: dict[str, list[str]] = {}
    for handle in handles:
        unit, _, name = handle.removeprefix("zmq/").partition("/")
        units.setdefault(unit, []).append(name)
    return units
