"""A queue of this process alone, on the real server under test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tq_redis as tq


@pytest.fixture
def client(redis_url: str, namespace: str) -> Iterator[tq.Client]:
    """The client of an instance that is started and ended around the test."""
    tq.init(
        {
            "redis": {"url": redis_url, "namespace": namespace},
            "data": {"backend": "memory"},
            "timeout_s": 20,
        }
    )
    yield tq.get_client()
    tq.close()
