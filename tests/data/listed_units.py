"""Storage units that enter themselves in Redis: in this process, or in one of their own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager

import redis

from tq_redis.config import Config
from tq_redis.control.keys import Keys
from tq_redis.control.shards import Shards
from tq_redis.control.units import UnitList
from tq_redis.deadline import Deadline
from tq_redis.storage_unit import StorageUnit
from tq_redis.store.units import Unit


class Listing:
    """What clients see of the units in Redis; a Directory."""

    def __init__(self, config: Config) -> None:
        self.connection = Shards(config.redis)
        self.list = UnitList(self.connection, Keys(config.redis.namespace))

    async def units(self, deadline: Deadline) -> dict[str, Unit]:
        return await self.list.units(deadline)

    async def until(self, *count: int) -> list[str]:
        """The ids of the units, once there are so many."""
        found: list[str] = []

        async def right() -> bool:
            found[:] = await self.units(Deadline(10))
            return len(found) in count

        await until(right)
        return found


def until_listed(config: Config) -> None:
    """Wait for a unit that imports torch: for minutes, where the machine is busy."""
    end = time.monotonic() + 150
    with redis.Redis.from_url(config.redis.urls[0]) as server:
        while not server.exists(Keys(config.redis.namespace).units):
            assert time.monotonic() < end, "no unit is listed"
            time.sleep(0.05)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again; fail the test when the answer stays no."""
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110 (other processes set no event of ours)
            await asyncio.sleep(0.05)


@asynccontextmanager
async def listing_of(config: Config) -> AsyncGenerator[Listing]:
    listing = Listing(config)
    try:
        yield listing
    finally:
        await listing.connection.close()


@asynccontextmanager
async def running(unit: StorageUnit) -> AsyncGenerator[asyncio.Task[None]]:
    """A unit of this process, from construction to its end in good order."""
    stop = asyncio.Event()
    task = asyncio.create_task(unit.run(stop))
    try:
        yield task
    finally:
        stop.set()
        await asyncio.wait([task])


@contextmanager
def unit_process(
    config: Config, capacity: int, *options: str
) -> Generator[subprocess.Popen[bytes]]:
    """``tq-redis storage-unit``, killed at the end if it still runs."""
    url = config.redis.urls[0]
    words = ["storage-unit", "--url", url, "--namespace", config.redis.namespace]
    program = "from tq_redis.cli import main; main()"
    gib = str(capacity / (1 << 30))
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words, "--capacity", gib, *options],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
