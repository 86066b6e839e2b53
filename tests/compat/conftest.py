"""A queue of each test's own: ours in this process, transfer_queue's in Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.compat.peer import IS_PEER, tq

Start = Callable[..., Any]


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """``start(**controller)``: call ``init`` with these settings of the controller."""

    def call(**controller: Any) -> Any:
        conf: dict[str, Any] = {"controller": controller}
        if not IS_PEER:
            conf["tq_redis"] = {
                "redis": {
                    "url": request.getfixturevalue("redis_url"),
                    "namespace": request.getfixturevalue("namespace"),
                },
                "data": {"backend": "memory"},
                "timeout_s": 20,
            }
        elif controller:
            tq.close()  # else the one that runs would be used, as it is
        return tq.init(conf)

    if IS_PEER:
        request.getfixturevalue("ray_session")
    yield call
    if not IS_PEER or not _is_shared(request):
        tq.close()


@pytest.fixture
def client(start: Start) -> Iterator[Any]:
    """The low-level client of a queue with default settings."""
    start()
    yield tq.get_client()
    if IS_PEER:  # starting one takes seconds: it is shared, and emptied
        for name in tq.get_client().get_partition_list():
            tq.get_client().clear_partition(name)


def _is_shared(request: pytest.FixtureRequest) -> bool:
    return "client" in request.fixturenames
