from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.control.build import soon
from tests.control.state import Admin
from tq_redis.control.connection import RedisConnection
from tq_redis.control.keys import Keys
from tq_redis.control.packing import arguments
from tq_redis.control.replies import SwapOwnerReply, decode

pytestmark = pytest.mark.asyncio


@pytest.fixture
def key(namespace: str, admin: Admin) -> Iterator[str]:
    key = Keys(namespace).owner
    yield key
    admin.unlink(key)


async def swap(connection: RedisConnection, key: str, seen: str, owner: str) -> SwapOwnerReply:
    packed = arguments({"seen": seen, "owner": owner, "lifetime": 50})
    return decode(await connection.run("swap_owner", key, packed, soon()), SwapOwnerReply)


@pytest.mark.parametrize(
    ("held", "seen", "owner"),
    list(itertools.product(["", "a", "b"], ["", "a"], ["", "a", "b"])),
)
async def test_only_what_was_seen_is_replaced(
    connection: RedisConnection, admin: Admin, key: str, held: str, seen: str, owner: str
) -> None:
    if held:
        admin.set(key, held, ex=10)
    reply = await swap(connection, key, seen, owner)
    if held in (seen, owner):
        assert reply == SwapOwnerReply("ok")
        assert admin.get(key) == (owner or None)
        assert admin.ttl(key) == (50 if owner else -2)
        assert await swap(connection, key, seen, owner) == reply
    else:
        assert reply == SwapOwnerReply("held", owner=held)
        assert admin.get(key) == (held or None)
