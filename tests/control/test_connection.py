from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import redis

from tests.conftest import WaitUntil
from tests.control.build import soon, write
from tests.control.conftest import IDLE_TTL_S, StartServer
from tests.control.proxy import CuttingProxy
from tests.control.state import Admin
from tq_redis.config import RedisConfig
from tq_redis.control import connection as connection_module
from tq_redis.control.addresses import hide_password
from tq_redis.control.connection import RedisConnection
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Claimed, Wanted
from tq_redis.deadline import Deadline
from tq_redis.errors import (
    AuthenticationError,
    ConfigError,
    ServerError,
    ServerPolicyError,
    ServerUnavailableError,
)

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def connected(url: str, **config: object) -> AsyncGenerator[RedisConnection]:
    connection = RedisConnection(url, RedisConfig(**config))  # type: ignore[arg-type]
    try:
        yield connection
    finally:
        await connection.close()


@pytest.fixture
def own(start: StartServer) -> Iterator[Admin]:
    """A server of its own."""
    with redis.Redis.from_url(start().url, decode_responses=True) as client:
        yield client


def url_of(admin: Admin, user: str = "") -> str:
    port = admin.connection_pool.connection_kwargs["port"]
    return f"redis://{user}127.0.0.1:{port}/0"


# No server, or one that refuses


async def test_no_server_is_told_within_the_deadline() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"redis://me:secret@127.0.0.1:{unused.getsockname()[1]}/0"
        async with connected(url) as connection:
            start = time.monotonic()
            with pytest.raises(ServerUnavailableError) as caught:
                await connection.command("PING", deadline=Deadline(0.5))
            assert time.monotonic() - start < 3
    message = str(caught.value)
    assert url.replace("secret", "***") in message
    assert "0.5 s" in message
    assert "secret" not in message
    assert caught.value.deadline == 0.5


async def test_a_server_that_does_not_answer_is_told_within_the_deadline(own: Admin) -> None:
    async with connected(url_of(own)) as connection:
        assert await connection.command("ECHO", "a", deadline=soon()) == b"a"
        own.client_pause(1500)
        start = time.monotonic()
        with pytest.raises(ServerUnavailableError, match="within 0.3 s"):
            await connection.command("ECHO", "b", deadline=Deadline(0.3))
        assert time.monotonic() - start < 1.4
        assert await connection.command("ECHO", "c", deadline=soon()) == b"c"


async def test_the_error_tells_what_an_earlier_attempt_failed_for(own: Admin) -> None:
    """The deadline may cut the last attempt short, which by itself explains nothing."""
    async with CuttingProxy(url_of(own), b"ECHO") as proxy, connected(proxy.url) as connection:
        assert await connection.command("ECHO", "a", deadline=soon()) == b"a"
        proxy.cuts, proxy.slow_s = 1, 30
        with pytest.raises(ServerUnavailableError, match=r"within 2 s \(ConnectionError: \w+"):
            await connection.command("ECHO", "b", deadline=Deadline(2))
        assert proxy.lost == 1


@pytest.mark.parametrize("user", ["", ":wrong@", "nobody:secret@"])
async def test_a_wrong_password_is_told_at_once(own: Admin, user: str) -> None:
    own.config_set("requirepass", "secret")
    async with connected(url_of(own, user)) as connection:
        start = time.monotonic()
        with pytest.raises(AuthenticationError) as caught:
            await connection.command("PING", deadline=soon())
        with pytest.raises(AuthenticationError):
            await connection.check_server(soon())
        assert time.monotonic() - start < 5
    assert "wrong" not in str(caught.value)
    async with connected(url_of(own, ":secret@")) as connection:
        await connection.check_server(soon())


@pytest.mark.parametrize("rights", ["-evalsha", "-hset", "-xadd"])
async def test_a_user_without_the_rights(own: Admin, namespace: str, rights: str) -> None:
    own.execute_command("ACL", "SETUSER", "half", "on", ">pw", "~*", "+@all", rights)
    async with connected(url_of(own, "half:pw@")) as connection:
        plane = ControlPlane(connection, namespace, IDLE_TTL_S)
        start = time.monotonic()
        with pytest.raises(AuthenticationError, match="refused this user"):
            await plane.produce("p", write(1, ["x"]), soon())
        assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "url", ["http://host:6379", "redis://me:secret@[::1", "redis://me:secret@host:port/0", "host"]
)
async def test_a_bad_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="Bad Redis address") as caught:
        RedisConnection(url, RedisConfig())
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://:pw@host:6379/0", "redis://:***@host:6379/0"),
        ("rediss://me:p%40w@[::1]:6379", "rediss://me:***@[::1]:6379"),
        ("unix:///tmp/s.sock?db=1&password=pw", "unix:///tmp/s.sock?db=1&password=***"),
        ("redis+cluster://u:p@ss@a:1,b:2,[::1]:3", "redis+cluster://u:***@a:1,b:2,[::1]:3"),
        (
            "rediss+sentinel://:pw@a,b/s/0?sentinel_password=pw&ssl_password=pw",
            "rediss+sentinel://:***@a,b/s/0?sentinel_password=***&ssl_password=***",
        ),
    ],
)
async def test_passwords_are_not_shown(url: str, shown: str) -> None:
    assert hide_password(url) == shown


# Checks of the server


async def test_a_server_that_evicts_is_refused(own: Admin) -> None:
    async with connected(url_of(own)) as connection:
        for policy in ("allkeys-lru", "volatile-ttl"):
            own.config_set("maxmemory-policy", policy)
            with pytest.raises(ServerPolicyError, match=f"{policy}.*Set maxmemory-policy"):
                await connection.check_server(soon())
    async with connected(url_of(own), allow_eviction=True) as connection:
        await connection.check_server(soon())


async def test_an_old_server_is_refused(
    connection: RedisConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_OLDEST_SERVER", (99, 0))
    with pytest.raises(ServerPolicyError, match="newer is needed"):
        await connection.check_server(soon())


async def test_what_a_restart_would_lose_is_said(
    own: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(url_of(own)) as connection:
        await connection.check_server(soon(), own=True)
        assert caplog.messages == []
        await connection.check_server(soon())
        assert "no append-only file" in caplog.text
        caplog.clear()
        own.config_set("appendonly", "yes")
        await connection.check_server(soon())
        assert caplog.messages == []


async def test_a_user_who_may_not_look_gets_a_warning(
    own: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    own.execute_command("ACL", "SETUSER", "half", "on", ">pw", "~*", "+@all", "-info")
    async with connected(url_of(own, "half:pw@")) as connection:
        with caplog.at_level(logging.WARNING):
            await connection.check_server(soon())
    assert "make sure" in caplog.text


# What may pass is tried again


async def _later(action: Callable[[], object]) -> None:
    """Do it when the call that runs meanwhile has been refused, most likely more than once."""
    await asyncio.sleep(0.3)
    await asyncio.to_thread(action)


async def test_a_server_that_is_a_replica_for_a_moment(own: Admin, namespace: str) -> None:
    """As during a failover: writes wait for a master."""
    async with connected(url_of(own)) as connection:
        plane = ControlPlane(connection, namespace, IDLE_TTL_S)
        ids = (await plane.produce("p", write(2, ["x"]), soon())).ids
        own.replicaof("127.0.0.1", "1")
        put = plane.produce("p", write(2, ["y"], ids=ids), soon())
        written, _ = await asyncio.gather(put, _later(lambda: own.replicaof("NO", "ONE")))
        assert written.ids == ids


def _is_busy(admin: Admin) -> bool:
    try:
        return not admin.ping()
    except redis.ResponseError as error:
        return str(error).startswith("BUSY")


async def test_a_server_that_is_busy_with_a_script(own: Admin, wait_until: WaitUntil) -> None:
    own.config_set("lua-time-limit", 20)
    async with connected(url_of(own)) as connection:
        await connection.command("PING", deadline=soon())

        def loop() -> None:
            killed = pytest.raises(redis.ResponseError, match="(?i)kill")
            with redis.Redis.from_url(url_of(own)) as other, killed:
                other.eval("while true do end", 0)

        looping = asyncio.create_task(asyncio.to_thread(loop))
        await asyncio.to_thread(wait_until, lambda: _is_busy(own))
        answer = connection.command("ECHO", "a", deadline=soon())
        reply, _ = await asyncio.gather(answer, _later(own.script_kill))
        assert reply == b"a"
        await looping


async def test_an_error_of_the_server_is_ours(connection: RedisConnection) -> None:
    with pytest.raises(ServerError, match="unknown command") as caught:
        await connection.command("NOSUCH", deadline=soon())
    assert type(caught.value) is ServerError
    with pytest.raises(ServerError, match="unknown command"):
        await connection.commands(("PING",), ("NOSUCH",), deadline=soon())


# Sharing connections


async def test_cancelled_commands_leave_no_reply_behind(redis_url: str) -> None:
    """Else the next call on the connection gets the reply of an earlier one."""
    chance = random.Random(0)
    async with connected(redis_url, max_connections=2) as connection:
        for attempt in range(50):
            call = asyncio.create_task(
                connection.command("ECHO", f"cancelled {attempt}", deadline=soon())
            )
            for _ in range(chance.randrange(12)):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        words = [f"{number}".encode() for number in range(50)]
        calls = (connection.command("ECHO", word, deadline=soon()) for word in words)
        assert await asyncio.gather(*calls) == words


async def test_cancelled_scripts_leave_no_reply_behind(plane: ControlPlane) -> None:
    chance = random.Random(1)
    await plane.produce("p", write(50, ["x"], keys=[f"k{i}" for i in range(50)]), soon())
    for _ in range(50):
        call = asyncio.create_task(plane.describe("p", soon(), keys=["k1", "k2"]))
        await asyncio.sleep(chance.random() * 0.003)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    rows = await asyncio.gather(
        *(plane.describe("p", soon(), keys=[f"k{i}"], fields=()) for i in range(50))
    )
    assert [found.keys for found in rows] == [[f"k{i}"] for i in range(50)]


async def test_many_callers_and_waiters_share_few_connections(
    redis_url: str, admin: Admin, plane: ControlPlane
) -> None:
    async with connected(redis_url, max_connections=4) as connection:
        few = ControlPlane(connection, plane.keys.namespace, IDLE_TTL_S)
        waiting = [asyncio.create_task(few.wait("later", "0-0", Deadline(30))) for _ in range(8)]
        before = len(admin.client_list())

        async def put_and_claim(number: int) -> list[int]:
            name = f"p{number % 5}"
            await few.produce(name, write(1, ["x"]), soon())
            found = await few.claim(name, Wanted("t", ["x"], 1), "me", soon())
            assert isinstance(found, Claimed)
            return found.ids

        got = await asyncio.gather(*(put_and_claim(number) for number in range(200)))
        assert len({sample for ids in got for sample in ids}) == 200
        assert len(admin.client_list()) <= before + 4 + 8
        await few.produce("later", write(1, ["x"]), soon())
        await asyncio.wait_for(asyncio.gather(*waiting), 5)
