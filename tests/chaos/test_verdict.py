"""What the soak finds: a verdict that nothing can fail says nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import redis

from tests.chaos import verdict
from tests.control.build import claimed, soon, write
from tests.control.conftest import IDLE_TTL_S, check_and_clear
from tq_redis.config import RedisConfig
from tq_redis.control.connection import RedisConnection
from tq_redis.control.plane import ControlPlane

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def plane(redis_url: str, namespace: str) -> AsyncIterator[ControlPlane]:
    """Four samples, consumed by life ``a`` in one claim and by life ``b`` in another."""
    plane = ControlPlane(RedisConnection(redis_url, RedisConfig()), namespace, IDLE_TTL_S)
    await plane.produce("p", write(4, ["x"]), soon())
    for life in "ab":
        await claimed(plane, 2, consumer=life)
    yield plane
    with redis.Redis.from_url(redis_url, decode_responses=True) as admin:
        await check_and_clear(plane, admin)
    await plane.close()


A = {"task": "t", "life": "a", "claim": 1, "ids": [1, 2]}
B = {"task": "t", "life": "b", "claim": 2, "ids": [3, 2]}


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ([A, B, {"end": "a"}, {"end": "b"}], None),
        ([A, {"end": "a"}], None),  # b was killed before it wrote down what it was told
        ([A, {"end": "a"}, {"end": "b"}], "b lives, but was not told"),
        ([A, B, {**B, "ids": [2, 1]}], "sample 2: it was acknowledged more than once"),
        ([A, {**B, "claim": 3}], "sample 3: Redis has it as consumed by another claim"),
        ([A, B, A], "sample 1: it was acknowledged more than once"),
    ],
)
async def test_what_is_found(
    plane: ControlPlane,
    redis_url: str,
    tmp_path: Path,
    entries: list[dict[str, object]],
    fault: str | None,
) -> None:
    lines = [json.dumps(entry) for entry in ({"life": "a"}, {"life": "b"}, *entries)]
    (tmp_path / "one.log").write_text("\n".join(lines))
    journals = verdict.Journals(tmp_path)
    with redis.Redis.from_url(redis_url, decode_responses=True) as admin:
        key = plane.keys.summary("p")
        if fault is None:
            verdict.check(admin, key, ["t"], 4, journals)
            with pytest.raises(AssertionError, match="sample 1: it is open"):
                verdict.check(admin, key, ["u"], 4, journals)
        else:
            with pytest.raises(AssertionError, match=f"(?s){fault}.*the latest events"):
                verdict.check(admin, key, ["t"], 4, journals)
