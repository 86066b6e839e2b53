"""Redis is killed and comes back from its append-only file."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psutil
import pytest
import pytest_asyncio
import redis

from tests.conftest import WaitUntil
from tests.control.build import soon, write
from tests.control.conftest import IDLE_TTL_S, StartServer
from tests.control.state import Admin, Partition
from tq_redis.config import RedisConfig
from tq_redis.control.connection import RedisConnection
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Claimed
from tq_redis.deadline import Deadline
from tq_redis.redis_server import EmbeddedServer

pytestmark = pytest.mark.asyncio


class Restartable:
    """A server that keeps an append-only file, and that can be killed and started again."""

    def __init__(self, server: EmbeddedServer, wait_until: WaitUntil) -> None:
        self._wait_until = wait_until
        self.url = server.url
        self.admin: Admin = redis.Redis.from_url(server.url, decode_responses=True)
        info: Any = self.admin.info("server")
        self._process = psutil.Process(info["process_id"])
        names = ("dir", "port", "bind", "logfile", "appendonly", "save", "maxmemory-policy")
        values: Any = self.admin.config_get()
        options = (word for name in names for word in (f"--{name}", values[name]))
        self._command = [info["executable"], *options]
        self._again: subprocess.Popen[bytes] | None = None

    def kill(self) -> None:
        """Returns when it is dead; what started it waits for other things than its end."""
        self._process.send_signal(signal.SIGKILL)
        self._wait_until(lambda: self._process.status() == psutil.STATUS_ZOMBIE)

    def start(self) -> None:
        self._again = subprocess.Popen(self._command)

    def stop(self) -> None:
        self.admin.close()
        if self._again is not None:
            self._again.kill()
            self._again.wait()


@pytest.fixture
def server(start: StartServer, wait_until: WaitUntil) -> Iterator[Restartable]:
    server = Restartable(start(appendonly="yes", appendfsync="always"), wait_until)
    yield server
    server.stop()


@pytest_asyncio.fixture
async def plane(server: Restartable, namespace: str) -> AsyncIterator[ControlPlane]:
    connection = RedisConnection(server.url, RedisConfig())
    yield ControlPlane(connection, namespace, IDLE_TTL_S)
    await connection.close()


async def test_nothing_acknowledged_is_lost(plane: ControlPlane, server: Restartable) -> None:
    put = write(8, ["x"], keys=list("abcdefgh"), groups=list("gggghhhh"), tags=[{"t": 1}] * 8)
    ids = (await plane.produce("p", put, soon())).ids
    await plane.claim("p", "t", ["x"], 4, "me", soon(), group_size=4)
    server.kill()
    server.start()
    found = await plane.claim("p", "t", ["x"], 4, "me", soon(), group_size=4)
    assert isinstance(found, Claimed)
    assert found.ids == ids[4:]
    assert (await plane.describe("p", soon(), keys=["a", "h"])).ids == [ids[0], ids[7]]
    assert (await plane.produce("p", write(2, ["x"]), soon())).ids == [9, 10]
    Partition(server.admin, plane.keys.summary("p")).check()


async def test_calls_in_flight_wait_for_it(plane: ControlPlane, server: Restartable) -> None:
    """Every sample is there once and claimed once, whenever the kill hits."""

    async def get_one() -> int:
        deadline = Deadline(60)
        while True:
            found = await plane.claim("p", "t", ["x"], 1, "me", soon())
            if isinstance(found, Claimed):
                return found.ids[0]
            await plane.wait("p", found.event, deadline)

    async def put_one(number: int) -> int:
        await asyncio.sleep(number / 400)
        return (await plane.produce("p", write(1, ["x"]), soon())).ids[0]

    async def restart() -> None:
        for action in actions:
            await asyncio.sleep(0.1)
            await asyncio.to_thread(action)

    actions: list[Callable[[], None]] = [server.kill, server.start]
    moved: list[Any] = await asyncio.gather(
        *(put_one(number) for number in range(100)), *(get_one() for _ in range(100)), restart()
    )
    assert sorted(moved[:100]) == sorted(moved[100:200])
    assert len(set(moved[:200])) == 100
    summary = await plane.summary("p", soon())
    assert [summary[name] for name in ("samples", "produced:x", "consumed:t")] == [100] * 3
    Partition(server.admin, plane.keys.summary("p")).check()
