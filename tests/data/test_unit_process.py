"""The command ``tq-redis storage-unit``, whose process is frozen, killed or ended."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.data.columns import random
from tests.data.listed_units import Listing, listing_of, unit_process, until
from tests.data.runs import all_rows
from tests.data.same import assert_same
from tests.data.units import closing
from tq_redis.config import Config, DataConfig, RedisConfig
from tq_redis.data import open_data_plane
from tq_redis.deadline import Deadline
from tq_redis.errors import DataLostError, DeadlineError, StoreFullError

BLOCK = 128 << 10

pytestmark = pytest.mark.asyncio


def soon() -> Deadline:
    return Deadline(30)


@pytest.fixture
def config(redis_url: str, namespace: str) -> Config:
    return Config(
        redis=RedisConfig(url=redis_url, namespace=namespace),
        data=DataConfig(backend="zmq", block_bytes=BLOCK),
    )


@pytest_asyncio.fixture
async def listing(config: Config) -> AsyncIterator[Listing]:
    async with listing_of(config) as listing:
        yield listing
        for name in await listing.units(soon()):  # of units that were killed
            await listing.list.strike(name, soon())


async def test_a_frozen_unit_is_not_taken_for_a_dead_one(config: Config, listing: Listing) -> None:
    column = random((8, BLOCK // 4))
    with unit_process(config, 64 * BLOCK) as process:
        await listing.until(1)
        async with closing(open_data_plane(config, listing)) as plane:
            blocks = await plane.put("p", {"x": column}, soon())
            process.send_signal(signal.SIGSTOP)
            async with closing(open_data_plane(config, listing)) as other:
                for reader in (plane, other):
                    started = time.monotonic()
                    with pytest.raises(DeadlineError, match="did not answer"):
                        await reader.get(all_rows(blocks), Deadline(1.5))
                    with pytest.raises(DeadlineError):
                        await reader.put("p", {"x": column}, Deadline(1.5))
                    assert time.monotonic() - started < 5
                reading = asyncio.create_task(other.get(all_rows(blocks), soon()))
                await asyncio.wait([reading], timeout=0.2)
                process.send_signal(signal.SIGCONT)
                assert_same((await reading)["x"], column)
            assert_same((await plane.get(all_rows(blocks), soon()))["x"], column)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 20) == 0
        assert await listing.units(soon()) == {}


async def test_a_unit_killed_in_the_middle_of_a_put(config: Config, listing: Listing) -> None:
    """Half of the blocks are held, the others wait for room."""
    column = random((12, BLOCK // 4))
    with unit_process(config, 4 * BLOCK) as first, unit_process(config, 4 * BLOCK) as second:
        await listing.until(2)
        async with closing(open_data_plane(config, listing)) as plane:

            async def all_full() -> bool:
                return all(usage.used == usage.capacity for usage in await plane.usage(soon()))

            started = time.monotonic()
            putting = asyncio.create_task(plane.put("p", {"x": column}, Deadline(3)))
            await until(all_full)
            first.kill()
            with pytest.raises(StoreFullError):
                await putting
            assert time.monotonic() - started < 5
            (usage,) = await plane.usage(soon())
            assert (usage.used, usage.blocks) == (0, 0)

            (held,) = await plane.put("p", {"x": column[:1]}, soon())
            putting = asyncio.create_task(plane.put("p", {"x": column[:4]}, soon()))
            await until(all_full)
            second.kill()
            with unit_process(config, 4 * BLOCK):
                blocks = await putting
                with pytest.raises(DataLostError) as raised:
                    await plane.get({**all_rows(blocks), "y": [(held.handle, 0, 1)]}, Deadline(20))
                assert held.handle in raised.value.handles
                assert 0 < len(raised.value.handles) <= len(blocks)
                kept = [block for block in blocks if block.handle not in raised.value.handles]
                for block in kept:
                    rows = column[block.first_row : block.first_row + block.rows]
                    assert_same((await plane.get(all_rows([block]), soon()))["x"], rows)
