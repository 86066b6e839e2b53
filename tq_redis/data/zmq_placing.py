"""Which storage unit keeps a block: each put begins with another one, and goes where there is room.

Large blocks come after room was reserved for them, so that a full unit does not receive them in
vain. Where all are full, the first that has room again is taken.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from typing import Any

from tq_redis.data.base import EncodedBlock
from tq_redis.data.zmq_units import ANSWER_S, UnitGoneError, Units, pause
from tq_redis.deadline import Deadline
from tq_redis.errors import DeadlineError, InputError, StoreFullError, nearest
from tq_redis.store import messages as m
from tq_redis.store.units import Unit

# For so long a put waits for room in the units that there are, before it looks for new ones.
_ROUND_S = 10.0
# Room is kept this much longer than the call may take that asked for it.
_KEEP_S = 5.0


class Placing:
    """Finds units for blocks.

    Args:
        namespace: of the instance, for messages.
    """

    def __init__(self, units: Units, namespace: str) -> None:
        self._units = units
        self._namespace = namespace
        self._turn = itertools.count(random.randrange(1 << 16))

    async def keep(
        self,
        partition: str,
        names: list[str],
        blocks: Sequence[EncodedBlock],
        deadline: Deadline,
        *,
        small: bool,
    ) -> str:
        """Hand blocks to one unit that has room, and return its id.

        Args:
            small: try it without asking for room first.
        """
        parcels, buffers = m.pack(block.content for block in blocks)
        hold = m.Hold(partition, names, parcels)
        nbytes = sum(block.nbytes for block in blocks)
        if small:
            unit = (await self._in_turn(nbytes, partition, deadline))[0]
            reply = await self._try(unit, hold, buffers, 0.0, deadline)
            if isinstance(reply, m.Done):
                return unit
        while True:
            units = await self._in_turn(nbytes, partition, deadline)
            unit = await self._find_room(units, names[0], nbytes, partition, deadline)
            if unit is not None:
                try:
                    reply, _ = await self._units.ask(unit, hold, buffers, deadline, patient=False)
                except (UnitGoneError, ConnectionRefusedError):
                    continue
                if isinstance(reply, m.Done):
                    return unit

    async def with_parser(self, parser: str, partition: str, deadline: Deadline) -> str:
        """A unit that offers a parser and answers; one that is not full, if there is one.

        Raises:
            InputError: none offers it.
            DeadlineError: none answers.
        """
        while True:
            units = await self._in_turn(0, partition, deadline, parser)
            full: list[str] = []
            for unit in units:
                usage = await self._try(unit, m.Measure(), (), 0.0, deadline)
                if isinstance(usage, m.Usage):
                    if usage.capacity is None or usage.used < usage.capacity:
                        return unit
                    full.append(unit)
            if full:
                return full[0]
            await pause(deadline, f"None of the storage units {units} answered")

    async def _find_room(
        self, units: list[str], name: str, nbytes: int, partition: str, deadline: Deadline
    ) -> str | None:
        """A unit that keeps room for blocks of which the first has this name; None: none in this
        round, but there is time for another one.

        Raises:
            StoreFullError, DeadlineError: there is no time left.
        """
        keep_s = min(deadline.remaining + _KEEP_S, m.LONGEST_S)
        request = m.Reserve(name, nbytes, 0.0, keep_s)
        if isinstance(await self._try(units[0], request, (), 0.0, deadline), m.Done):
            return units[0]
        wait_s = min(_patience(deadline), _ROUND_S)
        request = m.Reserve(name, nbytes, wait_s, keep_s)

        async def ask(unit: str) -> tuple[str, m.Reply | None]:
            return unit, await self._try(unit, request, (), wait_s, deadline)

        full: m.Full | None = None
        asked = [asyncio.ensure_future(ask(unit)) for unit in units]
        try:
            for answered in asyncio.as_completed(asked):
                match await answered:
                    case unit, m.Done():
                        others = [other for other in units if other != unit]
                        await self._units.ask_all(others, m.Drop([name]), deadline)
                        return unit
                    case _, m.Full() as full:
                        pass
                    case _:
                        pass  # it has ended, or does not answer
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if _patience(deadline) > 0:
            return None
        if full is None:
            raise DeadlineError(
                f"None of the storage units {units} answered within {deadline.seconds:g} s",
                partition=partition,
                deadline=deadline.seconds,
            )
        raise StoreFullError(
            f"All {len(units)} storage units are full (the last one has {full.used} of "
            f"{full.capacity} bytes), and nothing was freed within the deadline of "
            f"{deadline.seconds:g} s. Consume or clear, then retry, or start more units",
            partition=partition,
            deadline=deadline.seconds,
        )

    async def _try(
        self,
        unit: str,
        request: m.Request,
        buffers: Sequence[Any],
        wait_s: float,
        deadline: Deadline,
    ) -> m.Reply | None:
        """What a unit answers, which may take ``wait_s`` seconds; None: it cannot be reached."""
        until = Deadline(min(wait_s + ANSWER_S, deadline.remaining))
        try:
            reply, _ = await self._units.ask(unit, request, buffers, until, patient=False)
        except (UnitGoneError, ConnectionRefusedError, DeadlineError):
            return None
        return reply

    async def _in_turn(
        self, nbytes: int, partition: str, deadline: Deadline, parser: str | None = None
    ) -> list[str]:
        """The units that may keep so many bytes, and offer a parser, another one first each time.

        Raises:
            InputError: none ever can, or does.
            DeadlineError: there is none.
        """
        listed = await self._units.listed(deadline, anew=parser is not None)
        while True:
            fresh = [unit for unit in listed.values() if unit.fresh]
            if parser is not None:
                fresh = _offering(fresh, parser, partition)
            units = [unit for unit in fresh if not self._units.refuses(unit.id)]
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
            silent = f"; {[unit.id for unit in fresh]} refuse connections" if fresh else ""
            await pause(
                deadline,
                f"No storage unit runs in namespace {self._namespace!r}{silent}. Start one with "
                f"tq-redis storage-unit, or let init() start some (data.units)",
            )
            listed = await self._units.listed(deadline, anew=True)


def _offering(units: list[Unit], parser: str, partition: str) -> list[Unit]:
    """Those that offer a parser.

    Raises:
        InputError: there are units, and none does.
    """
    found = [unit for unit in units if parser in unit.parsers]
    if units and not found:
        offered = sorted({name for unit in units for name in unit.parsers})
        raise InputError(
            f"No storage unit offers data_parser {parser!r}. {nearest(parser, offered)} Start one "
            f"with tq-redis storage-unit --parser {parser}=package.module:function, or name it in "
            f"data.parsers",
            partition=partition,
        )
    return found


def _patience(deadline: Deadline) -> float:
    """Seconds that a unit may wait for room, so that its answer still arrives in time."""
    return max(0.0, deadline.remaining - max(0.5, 0.1 * deadline.remaining))
