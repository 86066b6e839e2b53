"""Blocks in storage units: processes that keep them in their memory, for clients in and outside
Ray. Each block goes to one unit.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence

from tq_redis.config import Config
from tq_redis.data.base import (
    Backend,
    Column,
    Content,
    EncodedBlock,
    Parser,
    StoreUsage,
    WrittenBlock,
)
from tq_redis.data.calls import in_thread, together
from tq_redis.data.unit_parsers import load_parsers
from tq_redis.data.zmq_parse import Parsing
from tq_redis.data.zmq_placing import Placing
from tq_redis.data.zmq_units import UnitGoneError, Units, pause
from tq_redis.deadline import Deadline
from tq_redis.errors import DataLostError, shorten
from tq_redis.store import messages as m
from tq_redis.store.units import Directory

SMALL_BYTES = 64 << 10
"""A put of up to so many bytes goes to one unit, and for such blocks no room is asked first."""

# For undoing a put. A unit that takes longer does it nevertheless, when it comes to it.
_UNDO_S = 0.5


class ZmqBackend(Backend):
    """One process's way to the storage units of an instance.

    Args:
        directory: where the units are listed.
    """

    def __init__(self, config: Config, directory: Directory) -> None:
        self._config = config
        self._units = Units(directory)
        self._placing = Placing(self._units, config.redis.namespace)

    async def start(self, deadline: Deadline) -> None:
        """Starts the units that the settings ask for; others start by themselves."""
        if self._config.data.units:
            from tq_redis.unit_actors import start_units  # with Ray, which others need not have

            started = await in_thread(
                deadline,
                "Ray did not start the storage units",
                lambda: start_units(self._config, deadline.remaining, load_parsers),
            )
            while not set(started) <= set(await self._units.listed(deadline, anew=True)):
                await pause(deadline, f"Storage units {started} did not enter themselves")

    async def write(
        self, partition: str, blocks: Sequence[EncodedBlock], deadline: Deadline
    ) -> list[str]:
        names = [secrets.token_hex(8) for _ in blocks]
        keep = self._placing.keep
        try:
            if sum(block.nbytes for block in blocks) <= SMALL_BYTES:
                unit = await keep(partition, names, blocks, deadline, small=True)
                units = [unit] * len(names)
            else:
                units = await together(
                    keep(partition, [name], [block], deadline, small=block.nbytes <= SMALL_BYTES)
                    for name, block in zip(names, blocks, strict=True)
                )
        except BaseException:
            # Some may be held, and room be reserved for others.
            await self._units.ask_all(self._units.in_use, m.Drop(names), Deadline(_UNDO_S))
            raise
        return [f"zmq/{unit}/{name}" for unit, name in zip(units, names, strict=True)]

    async def parse(
        self,
        partition: str,
        columns: Mapping[str, Column],
        parser: Parser | str,
        deadline: Deadline,
    ) -> list[WrittenBlock] | None:
        """In a unit that offers a parser of this name. Functions cannot travel there."""
        if not isinstance(parser, str):
            return None
        return await Parsing(
            self._units,
            self._placing,
            partition,
            columns,
            parser,
            self._config.data.block_bytes,
            deadline,
        ).write()

    async def read(self, handles: Sequence[str], deadline: Deadline) -> dict[str, Content]:
        found: dict[str, Content] = {}
        missing: list[str] = []
        gone: set[str] = set()

        async def of_unit(unit: str, names: list[str]) -> None:
            try:
                reply, buffers = await self._units.ask(unit, m.Find(names), (), deadline)
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
            from tq_redis.unit_actors import end_units

            await in_thread(
                deadline,
                "Ray did not end the storage units",
                lambda: end_units(self._config, deadline.remaining),
            )

    async def close(self) -> None:
        self._units.close()

    async def _tell(
        self, handles: Iterable[str], request: Callable[[list[str]], m.Request], deadline: Deadline
    ) -> None:
        """Tell the units of these handles; those that have ended have nothing to do."""

        async def tell(unit: str, names: list[str]) -> None:
            try:
                await self._units.ask(unit, request(names), (), deadline)
            except UnitGoneError:
                return

        await together([tell(*item) for item in _by_unit(handles).items()])

    async def _ask_all(self, request: m.Request, deadline: Deadline) -> dict[str, m.Reply]:
        return await self._units.ask_all(await self._units.listed(deadline), request, deadline)


def _by_unit(handles: Iterable[str]) -> dict[str, list[str]]:
    units: dict[str, list[str]] = {}
    for handle in handles:
        unit, _, name = handle.removeprefix("zmq/").partition("/")
        units.setdefault(unit, []).append(name)
    return units
