from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from tests.control.build import soon
from tests.control.state import Admin
from tq_redis.control.connection import RedisConnection
from tq_redis.control.keys import Keys
from tq_redis.control.owner import LIFETIME_S, RENEW_S, OwnerRecord, Ownership
from tq_redis.errors import ConfigError

pytestmark = pytest.mark.asyncio


@pytest.fixture
def ownership(connection: RedisConnection, namespace: str, admin: Admin) -> Iterator[Ownership]:
    keys = Keys(namespace)
    yield Ownership(connection, keys)
    admin.unlink(keys.owner)


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of this machine, alive."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.communicate()


def hold(admin: Admin, ownership: Ownership, record: OwnerRecord) -> None:
    admin.set(ownership.keys.owner, msgspec.json.encode(record), ex=LIFETIME_S)


def holder(admin: Admin, ownership: Ownership) -> OwnerRecord | None:
    held = admin.get(ownership.keys.owner)
    return None if held is None else msgspec.json.decode(held, type=OwnerRecord)


async def test_taking_renewing_giving_up(ownership: Ownership, admin: Admin) -> None:
    await ownership.take(soon())
    await ownership.take(soon())
    assert holder(admin, ownership) == OwnerRecord.of(os.getpid())
    admin.expire(ownership.keys.owner, 5)
    await ownership.renew(soon())
    assert 5 < admin.ttl(ownership.keys.owner) <= LIFETIME_S
    assert LIFETIME_S > 2 * RENEW_S
    await ownership.give_up(soon())
    assert holder(admin, ownership) is None
    await ownership.give_up(soon())


async def test_a_living_owner_is_respected(
    ownership: Ownership, admin: Admin, other: subprocess.Popen[bytes]
) -> None:
    record = OwnerRecord.of(other.pid)
    hold(admin, ownership, record)
    with pytest.raises(ConfigError, match=rf"in use by process {other.pid}.*redis\.namespace"):
        await ownership.take(soon())
    assert holder(admin, ownership) == record


@pytest.mark.parametrize(
    ("mine", "theirs", "same"),
    [("a/1", "a/1", True), ("a/1", "a/2", False), ("", "a/1", True), ("a/1", "", True)],
)
async def test_only_a_process_of_another_run_is_refused(
    ownership: Ownership,
    admin: Admin,
    other: subprocess.Popen[bytes],
    mine: str,
    theirs: str,
    same: bool,
) -> None:
    """Of a process outside Ray it cannot be told."""
    record = OwnerRecord.of(other.pid, theirs)
    hold(admin, ownership, record)
    this = Ownership(ownership.connection, ownership.keys, mine)
    if same:
        assert not await this.take_or_follow(soon())
    else:
        with pytest.raises(ConfigError, match=rf"in use by process {other.pid}"):
            await this.take_or_follow(soon())
    assert holder(admin, ownership) == record
    other.communicate()
    assert await this.take_or_follow(soon())
    assert holder(admin, ownership) == OwnerRecord.of(os.getpid(), mine)


async def test_a_dead_owner_is_replaced_at_once(
    ownership: Ownership, admin: Admin, other: subprocess.Popen[bytes]
) -> None:
    hold(admin, ownership, OwnerRecord.of(other.pid))
    other.communicate()
    await ownership.take(soon())
    assert holder(admin, ownership) == OwnerRecord.of(os.getpid())


async def test_a_zombie_is_dead(
    ownership: Ownership, admin: Admin, other: subprocess.Popen[bytes]
) -> None:
    record = OwnerRecord.of(other.pid)
    assert not record.is_dead()
    assert other.stdin is not None
    other.stdin.close()
    await asyncio.to_thread(os.waitid, os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert record.is_dead()


async def test_a_pid_that_was_given_out_again_is_dead(ownership: Ownership, admin: Admin) -> None:
    mine = OwnerRecord.of(os.getpid())
    hold(admin, ownership, msgspec.structs.replace(mine, started="1"))
    await ownership.take(soon())
    assert holder(admin, ownership) == mine


@pytest.mark.parametrize("where", [{"host": "elsewhere"}, {"space": "pid:[1]"}])
async def test_owners_that_cannot_be_seen_from_here_live(
    ownership: Ownership, admin: Admin, where: dict[str, str]
) -> None:
    """On another machine, or in another container of this one."""
    record = msgspec.structs.replace(OwnerRecord(
        OwnerRecord.of(1).host, 2**22 + 1, "1", OwnerRecord.of(1).space
    ), **where)  # fmt: skip
    hold(admin, ownership, record)
    with pytest.raises(ConfigError, match=f"{LIFETIME_S} s after its death"):
        await ownership.take(soon())


async def test_a_late_owner_does_not_push_its_successor_out(
    ownership: Ownership, admin: Admin, other: subprocess.Popen[bytes]
) -> None:
    await ownership.take(soon())
    hold(admin, ownership, OwnerRecord.of(other.pid))
    with pytest.raises(ConfigError, match="in use"):
        await ownership.renew(soon())
    await ownership.give_up(soon())
    assert holder(admin, ownership) == OwnerRecord.of(other.pid)


async def test_a_claim_that_expired_is_renewed(ownership: Ownership, admin: Admin) -> None:
    await ownership.take(soon())
    admin.delete(ownership.keys.owner)
    await ownership.renew(soon())
    assert holder(admin, ownership) == OwnerRecord.of(os.getpid())


async def test_of_two_that_find_a_dead_owner_one_succeeds(
    ownership: Ownership,
    admin: Admin,
    other: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slower one must not throw out the faster one with what it saw before."""
    successor = OwnerRecord.of(other.pid)
    hold(admin, ownership, msgspec.structs.replace(OwnerRecord.of(os.getpid()), started="1"))
    judge = OwnerRecord.is_dead

    def judge_slowly(record: OwnerRecord) -> bool:
        dead = judge(record)
        if dead:
            hold(admin, ownership, successor)
        return dead

    monkeypatch.setattr(OwnerRecord, "is_dead", judge_slowly)
    with pytest.raises(ConfigError, match=str(other.pid)):
        await ownership.take(soon())
    assert holder(admin, ownership) == successor


async def test_many_at_once(connection: RedisConnection, ownership: Ownership) -> None:
    await asyncio.gather(*(ownership.take(soon()) for _ in range(20)))
