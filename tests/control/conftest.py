"""A control plane on a real server. What a test leaves in it must be consistent."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import pytest_asyncio
import redis

from tests.conftest import ServerUnderTest, server_binary
from tests.control.build import soon
from tests.control.state import Admin, Partition
from tq_redis.config import RedisConfig
from tq_redis.control.connection import RedisConnection
from tq_redis.control.plane import ControlPlane
from tq_redis.redis_server import EMBEDDED_OPTIONS, EmbeddedServer, start_server

IDLE_TTL_S = 1000

StartServer = Callable[..., EmbeddedServer]


@pytest.fixture
def admin(redis_url: str) -> Iterator[Admin]:
    """A plain client of the server under test."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest_asyncio.fixture
async def connection(redis_url: str) -> AsyncIterator[RedisConnection]:
    connection = RedisConnection(redis_url, RedisConfig())
    yield connection
    await connection.close()


@pytest_asyncio.fixture
async def plane(
    connection: RedisConnection, namespace: str, admin: Admin
) -> AsyncIterator[ControlPlane]:
    """A namespace of its own; checked and cleared at the end."""
    plane = ControlPlane(connection, namespace, IDLE_TTL_S)
    yield plane
    await check_and_clear(plane, admin)


async def check_and_clear(plane: ControlPlane, admin: Admin) -> None:
    """Check every partition of a namespace, clear them, and check what that leaves.

    Replies would stay for a minute, and slow down whoever looks through the server's keys.
    """
    for name in await plane.partitions(soon()):
        Partition(admin, plane.keys.summary(name)).check()
        await plane.clear_partition(name, soon())
    left = list(admin.scan_iter(f"tq:{plane.keys.namespace}:*", count=1000))
    kinds = r"tq:[^:]+:(next_sample|counted_by|\{[^}]*\}:(req|trash)(:.*)?)"
    assert [key for key in left if not re.fullmatch(kinds, key)] == []
    for key in left:
        admin.unlink(key)


@pytest.fixture
def start(redis_server: ServerUnderTest) -> Iterator[StartServer]:
    """Start a server like the one under test, for tests that mistreat it."""
    # One that runs already has no binary here; any other will do.
    binary = None if redis_server.kind == "external" else server_binary(redis_server.kind)
    with ExitStack() as servers:

        def start_one(**options: Any) -> EmbeddedServer:
            settings = {name.replace("_", "-"): value for name, value in options.items()}
            server = start_server(binary=binary, options={**EMBEDDED_OPTIONS, **settings})
            return servers.enter_context(server)

        yield start_one
