"""Planes and clients on servers of all kinds."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import tq_redis as tq
from tests.conftest import KEYS_WITH_A_LIFETIME, server_binary
from tests.servers import topologies
from tests.servers.topologies import Admin, Certificates, Cluster
from tq_redis.config import RedisConfig
from tq_redis.control.plane import ControlPlane
from tq_redis.control.shards import Shards

IDLE_TTL_S = 1000

OpenPlane = Callable[..., ControlPlane]


@pytest.fixture(scope="session")
def binary() -> str | None:
    """The server under test; one that runs already cannot be mistreated, any other will do."""
    if os.environ.get("TQ_TEST_REDIS_URL"):
        return None
    return server_binary(os.environ.get("TQ_TEST_SERVER", "valkey9"))


@pytest.fixture(scope="package")
def cluster(binary: str | None) -> Iterator[Cluster]:
    """Three nodes, for tests that leave them as they are."""
    with topologies.cluster(binary) as started:
        yield started
        left = [key for node in started.primaries for key in unexpected_keys(node.admin)]
        assert left == []


@pytest.fixture(scope="package")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return topologies.make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def socket_directory() -> Iterator[Path]:
    directory = topologies.short_directory()
    yield directory
    shutil.rmtree(directory)


@pytest_asyncio.fixture
async def open_plane(namespace: str) -> AsyncIterator[OpenPlane]:
    """``open_plane(url, ...)``: a control plane in the test's namespace, closed at the end."""
    async with AsyncExitStack() as opened:

        def open_one(*urls: str, **config: Any) -> ControlPlane:
            connection = Shards(RedisConfig(url=urls, **config))
            plane = ControlPlane(connection, namespace, IDLE_TTL_S)
            opened.push_async_callback(plane.close)
            return plane

        yield open_one


@pytest.fixture
def closed_client() -> Iterator[None]:
    """Ends the client of this process after the test."""
    yield
    tq.close()


def settings(url: str | list[str], namespace: str, **more: Any) -> dict[str, Any]:
    redis = {"url": url, "namespace": namespace, **more}
    return {"redis": redis, "data": {"backend": "memory"}, "timeout_s": 20}


def unexpected_keys(admin: Admin) -> list[str]:
    """Keys that a run which has ended should not have left."""
    return [
        key
        for key in admin.scan_iter(count=1000)
        if not any(re.fullmatch(pattern, key, re.DOTALL) for pattern in KEYS_WITH_A_LIFETIME)
        or admin.ttl(key) == -1
    ]
