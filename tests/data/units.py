"""Data planes for tests, and storage units that run in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager

from tq_redis.config import Config
from tq_redis.data import DataPlane, memory, open_data_plane
from tq_redis.deadline import Deadline
from tq_redis.store.parsers import BlockParser
from tq_redis.store.server import StoreServer
from tq_redis.store.shelf import Shelf
from tq_redis.store.units import Unit


class Units:
    """Storage units, listed here and not in Redis; a Directory."""

    def __init__(self) -> None:
        self.servers: dict[str, StoreServer] = {}
        self.shelves: dict[str, Shelf] = {}
        self.capacity = 1 << 30
        self.stale: set[str] = set()
        self.parsers: Mapping[str, BlockParser] = {}

    def start(self, *, curve: bool = False, host: str = "127.0.0.1") -> str:
        name = f"unit{len(self.shelves)}"
        self.shelves[name] = Shelf(self.capacity)
        self.servers[name] = StoreServer(
            self.shelves[name], host, curve=curve, parsers=self.parsers
        )
        return name

    def stop(self, name: str, *, strike: bool = False) -> None:
        """End a unit: killed some time ago, or in good order."""
        self.servers[name].stop()
        if strike:
            del self.servers[name]
        else:
            self.stale.add(name)

    async def units(self, deadline: Deadline) -> dict[str, Unit]:
        offered = tuple(self.parsers)
        return {
            name: Unit(name, server.address, self.capacity, name not in self.stale, offered)
            for name, server in self.servers.items()
        }


@contextmanager
def running_units(count: int = 0, *, curve: bool = False) -> Generator[Units]:
    units = Units()
    try:
        for _ in range(count):
            units.start(curve=curve)
        yield units
    finally:
        for server in units.servers.values():
            server.stop()


def open_plane(config: Config, units: Units | None = None) -> DataPlane:
    return open_data_plane(config, units or Units())


def held_blocks(namespace: str) -> set[str]:
    """The blocks that the memory backend keeps for an instance of this process."""
    return set(memory._shelves[namespace]._blocks)


@asynccontextmanager
async def closing(plane: DataPlane) -> AsyncGenerator[DataPlane]:
    try:
        yield plane
    finally:
        await plane.close()
