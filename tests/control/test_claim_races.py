"""Many clients at once, each with connections of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.control.build import claim, handle, soon, write
from tests.control.conftest import IDLE_TTL_S
from tests.control.state import Admin, Partition
from tq_redis.config import RedisConfig
from tq_redis.control.connection import RedisConnection
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Claimed, Write
from tq_redis.deadline import Deadline
from tq_redis.errors import PartitionNotFoundError, SampleNotFoundError

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def planes(redis_url: str, plane: ControlPlane) -> AsyncIterator[list[ControlPlane]]:
    """The same namespace as eight clients see it."""
    connections = [RedisConnection(redis_url, RedisConfig(max_connections=2)) for _ in range(8)]
    yield [ControlPlane(each, plane.keys.namespace, IDLE_TTL_S) for each in connections]
    for connection in connections:
        await connection.close()


async def consume(
    plane: ControlPlane, task: str, fields: str, step: int, left: list[int], group_size: int = 0
) -> list[list[int]]:
    """Claims of ``step`` samples until ``left[0]``, which all consumers share, are taken."""
    claims: list[list[int]] = []
    while left[0] >= step:
        left[0] -= step
        deadline = Deadline(60)
        while True:
            found = await claim(plane, step, task=task, fields=fields, group_size=group_size)
            if isinstance(found, Claimed):
                claims.append(found.ids)
                break
            await plane.wait("p", found.event, deadline)
    return claims


async def test_every_sample_once_per_task(planes: list[ControlPlane]) -> None:
    """Samples become ready field by field while two tasks take them in batches of all sizes."""
    chance = random.Random(0)

    async def produce(plane: ControlPlane) -> None:
        for _ in range(15):
            count = chance.randint(1, 17)
            first, second = chance.sample(["x", "y"], 2)
            ids = (await plane.produce("p", write(count, [first]), soon())).ids
            counts.append(count)
            chance.shuffle(ids)
            await plane.produce("p", write(count, [second], ids=ids), soon())

    counts: list[int] = []
    producers = asyncio.gather(*map(produce, planes[:4]))
    consumers = asyncio.gather(
        *(
            consume(plane, task, fields, step, left)
            for task, fields, left in (("t", "xy", [400]), ("u", "x", [400]))
            for plane, step in zip(planes, [1, 2, 3, 5, 7, 11, 1, 4], strict=True)
        )
    )
    await producers
    missing = 400 - sum(counts)
    if missing > 0:
        await planes[0].produce("p", write(missing, ["x", "y"]), soon())
    claims = await consumers
    for taken in (claims[:8], claims[8:]):
        ids = [sample for mine in taken for batch in mine for sample in batch]
        assert len(ids) == len(set(ids)) > 400 - 12


async def test_groups_stay_whole(planes: list[ControlPlane]) -> None:
    """Their rows come in any order, from several producers."""
    chance = random.Random(1)
    rows = [(f"g{group}", row) for group in range(48) for row in range(4)]
    chance.shuffle(rows)
    group_of: dict[int, str] = {}

    async def produce(plane: ControlPlane, mine: list[tuple[str, int]]) -> None:
        for first in range(0, len(mine), 3):
            part = [group for group, _ in mine[first : first + 3]]
            ids = (await plane.produce("p", write(len(part), ["x"], groups=part), soon())).ids
            group_of.update(zip(ids, part, strict=True))

    left = [len(rows)]
    results: list[Any] = await asyncio.gather(
        *(produce(plane, rows[i::4]) for i, plane in enumerate(planes[:4])),
        asyncio.gather(
            *(
                consume(plane, "t", "x", step, left, group_size=4)
                for plane, step in zip(planes, [4, 8, 4, 12, 4, 8, 4, 4], strict=True)
            )
        ),
    )
    batches = [batch for mine in results[-1] for batch in mine]
    ids = [sample for batch in batches for sample in batch]
    assert sorted(ids) == sorted(group_of)
    for batch in batches:
        for first in range(0, len(batch), 4):
            assert len({group_of[sample] for sample in batch[first : first + 4]}) == 1


async def test_no_write_is_lost(planes: list[ControlPlane], admin: Admin) -> None:
    """Fields in any order from many writers, while the partition and its index grow."""
    chance = random.Random(2)

    async def put(plane: ControlPlane) -> int:
        count = chance.randint(1, 17)
        fields = chance.sample(["a", "b", "c"], 3)
        ids = (await plane.produce("p", write(count, fields[:1]), soon())).ids
        for field in fields[1:]:
            await plane.produce("p", write(count, [field], ids=ids), soon())
        return count

    async def put_many(plane: ControlPlane) -> int:
        return sum([await put(plane) for _ in range(6)])

    await claim(planes[0], 1, fields="abc")
    total = sum(await asyncio.gather(*(put_many(plane) for plane in planes * 4)))
    rows = await planes[0].describe("p", soon())
    assert len(rows.ids) == total
    assert rows.produced == {name: [True] * total for name in ("a", "b", "c")}
    summary = await planes[0].summary("p", soon())
    assert [summary[f"produced:{name}"] for name in "abc"] == [total] * 3
    Partition(admin, planes[0].keys.summary("p")).check()


async def test_upserts_of_the_same_keys(planes: list[ControlPlane]) -> None:
    """A key names one sample, whoever comes first."""
    keys = [f"k{i}" for i in range(10)]
    written = await asyncio.gather(
        *(
            plane.produce("p", write(10, ["x"], keys=keys, tags=[{f"t{i}": i}] * 10), soon())
            for i, plane in enumerate(planes)
        )
    )
    assert len({tuple(each.ids) for each in written}) == 1
    rows = await planes[0].describe("p", soon(), keys=keys)
    assert rows.ids == written[0].ids
    assert rows.tags == [{f"t{i}": i for i in range(8)}] * 10
    assert sum(len(each.freed) for each in written) == 7


async def test_clearing_while_others_write_loses_no_block(
    planes: list[ControlPlane], admin: Admin
) -> None:
    """A late write is refused or lands in the new generation; all bytes are freed in the end."""
    named: set[str] = set()
    freed: list[str] = []
    refused = 0
    done = asyncio.Event()

    async def put(plane: ControlPlane, count: int, ids: list[int] | None = None) -> list[int]:
        entry: Write = write(count, ["x" if ids is None else "y"], ids=ids)
        written = await plane.produce("p", entry, soon())
        named.add(handle(entry))
        freed.extend(written.freed)
        return written.ids

    async def write_on(plane: ControlPlane) -> None:
        nonlocal refused
        for _ in range(25):
            ids = await put(plane, 3)
            try:
                await put(plane, 2, ids[1:])
                freed.extend(await plane.clear_samples("p", ids[:1], soon()))
                await put(plane, 2, ids[1:])
            except (SampleNotFoundError, PartitionNotFoundError):
                refused += 1

    async def clear(plane: ControlPlane) -> None:
        while not done.is_set():
            for generation in await plane.clear_partition("p", soon()):
                freed.extend(await plane.trash("p", generation, soon()))
                await plane.empty_trash("p", generation, soon())
            await asyncio.sleep(0.01)

    clearing = asyncio.gather(*map(clear, planes[6:]))
    try:
        await asyncio.gather(*map(write_on, planes[:6]))
    finally:
        done.set()
        await clearing
    for generation in await planes[0].clear_partition("p", soon()):
        freed.extend(await planes[0].trash("p", generation, soon()))
        await planes[0].empty_trash("p", generation, soon())
    assert set(freed) == named
    assert refused > 0
    assert not list(admin.scan_iter(f"{planes[0].keys.summary('p')}:[^r]*"))
    assert await planes[0].partitions(soon()) == []
