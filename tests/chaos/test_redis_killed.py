"""Redis is killed twenty times under load, and comes back from its append-only file.

The file is written with ``appendfsync always``, under which nothing is lost that was acknowledged.
With ``everysec``, the default, ``kill -9`` of the server alone loses nothing either (the operating
system has the bytes); a crash of the machine loses up to about two seconds of acknowledged calls.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import verdict
from tests.chaos.load import ANSWER_S, PARTITION, Consumer, Journal, Task
from tests.conftest import WaitUntil
from tests.control.build import write
from tests.control.conftest import IDLE_TTL_S, StartServer
from tests.control.restartable import Restartable
from tq_redis.config import RedisConfig
from tq_redis.control.connection import RedisConnection
from tq_redis.control.plane import ControlPlane
from tq_redis.deadline import Deadline

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]

TIMES = 20
CLIENTS = 12
# Samples that are consumed, or produced, between two kills.
PROGRESS = 100
MOST_S = 120.0
TASKS = (
    Task("leased", 0, 24, 3.0),
    Task("group", 4, 24, 3.0),
    Task("plain", 0, 24, None),
)


@pytest.fixture
def server(start: StartServer, wait_until: WaitUntil) -> Iterator[Restartable]:
    server = Restartable(start(appendonly="yes", appendfsync="always"), wait_until)
    yield server
    server.stop()


async def test_twenty_times_under_load(server: Restartable, namespace: str, tmp_path: Path) -> None:
    """Nothing acknowledged is lost, nothing is claimed twice; calls in flight wait for it."""
    chance = random.Random(3)
    planes = [
        ControlPlane(RedisConnection(server.url, RedisConfig()), namespace, IDLE_TTL_S)
        for _ in range(CLIENTS)
    ]
    key = planes[0].keys.summary(PARTITION)
    made: list[int] = []
    done = asyncio.Event()

    async def produce(plane: ControlPlane) -> None:
        while not done.is_set():
            groups = [f"g{len(made)}-{row // 4}" for row in range(4 * chance.randint(1, 8))]
            put = write(len(groups), groups=groups)
            made.extend((await plane.produce(PARTITION, put, Deadline(ANSWER_S))).ids)
        await plane.expect(PARTITION, None, Deadline(ANSWER_S))

    async def consume(plane: ControlPlane, place: int) -> None:
        journal = Journal(tmp_path / f"{place}.log")
        await Consumer(plane, f"life-{place}", chance, journal).live(list(TASKS), 10**6)
        journal.close()

    async def kill() -> None:
        for _ in range(TIMES):
            before = await progress()
            while await progress() < before + PROGRESS:  # noqa: ASYNC110 - it is Redis's state
                await asyncio.sleep(0.01)
            await asyncio.sleep(chance.uniform(0, 0.02))
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
        done.set()

    async def progress() -> int:
        summary = await planes[0].connection.command("HGETALL", key, deadline=Deadline(ANSWER_S))
        return sum(int(count) for name, count in summary.items() if name.startswith(b"consumed:"))

    finished = False
    with suppress(TimeoutError):  # what is wrong with which sample says more
        async with asyncio.timeout(MOST_S), asyncio.TaskGroup() as group:
            for place, plane in enumerate(planes):
                group.create_task(consume(plane, place))
            group.create_task(produce(planes[0]))
            group.create_task(kill())
        finished = True
    for plane in planes:
        await plane.close()
    admin: Any = server.admin
    assert set(admin.zrange(f"{key}:samples", 0, -1)) == set(map(str, made))
    journals = verdict.Journals(tmp_path)
    verdict.check(server.admin, key, [task.name for task in TASKS], len(made), journals)
    assert finished
