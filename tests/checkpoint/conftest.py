"""A queue to save, another one to load into, and a look at what both hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

import tq_redis
from tests.control.state import Admin, Partition
from tq_redis.control.keys import Keys


@pytest.fixture
def admin(redis_url: str) -> Iterator[Admin]:
    """A plain client of the server under test."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a checkpoint goes."""
    return tmp_path / "ck"


@pytest.fixture(autouse=True)
def _nothing_beside(tmp_path: Path) -> Iterator[None]:
    """Fail the test that leaves half a checkpoint."""
    yield
    assert [path.name for path in tmp_path.iterdir() if ".tmp-" in path.name] == []
    assert not (tmp_path / "ck.replaced").exists()


def check_partitions(admin: Admin, namespace: str) -> None:
    """Fail where keys of a queue contradict each other, or a load or save has left some."""
    client = tq_redis.get_client()
    keys = Keys(namespace)
    for name in client.get_partition_list():
        Partition(admin, keys.summary(name)).check()
    left = list(admin.scan_iter(f"tq:{namespace}:*:load*", count=1000))
    assert left == []
