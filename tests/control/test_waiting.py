from __future__ import annotations

import asyncio
import time

import pytest

from tests.conftest import WaitUntil
from tests.control.build import claim, soon, write
from tests.control.state import Admin
from tq_redis.control import connection as connection_module
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Claimed, NotEnough
from tq_redis.deadline import Deadline
from tq_redis.errors import AuthenticationError

pytestmark = pytest.mark.asyncio

# Waiters look again after ten seconds anyway; woken ones are back long before.
WOKEN_S = 4.0


async def get(plane: ControlPlane, count: int, *, task: str = "t", group_size: int = 0) -> Claimed:
    """Wait for a claim as the client does."""
    deadline = Deadline(60)
    while True:
        found = await claim(plane, count, task=task, group_size=group_size)
        if isinstance(found, Claimed):
            return found
        await plane.wait("p", found.event, deadline)


async def short(plane: ControlPlane) -> str:
    found = await claim(plane, 99)
    assert isinstance(found, NotEnough)
    return found.event


async def test_a_waiter_holds_up_nobody_and_a_put_wakes_it(plane: ControlPlane) -> None:
    await plane.produce("p", write(8, ["x"]), soon())
    waiter = asyncio.create_task(get(plane, 64))
    start = time.monotonic()
    assert len((await get(plane, 8, task="other")).ids) == 8
    assert not waiter.done()
    await plane.produce("p", write(56, ["x"]), soon())
    found = await asyncio.wait_for(waiter, WOKEN_S)
    assert len(found.ids) == 64
    assert time.monotonic() - start < WOKEN_S


async def test_a_partition_that_does_not_exist_can_be_waited_for(plane: ControlPlane) -> None:
    waiter = asyncio.create_task(get(plane, 2, group_size=2))
    await plane.produce("q", write(2, ["x"], groups=["g", "g"]), soon())
    await plane.produce("p", write(2, ["x"], groups=["g", "g"]), soon())
    assert len((await asyncio.wait_for(waiter, WOKEN_S)).ids) == 2


async def test_a_partition_may_be_cleared_and_made_anew_meanwhile(plane: ControlPlane) -> None:
    await plane.produce("p", write(1, ["x"]), soon())
    waiter = asyncio.create_task(get(plane, 3))
    await plane.clear_partition("p", soon())
    new = await plane.produce("p", write(3, ["x"]), soon())
    assert (await asyncio.wait_for(waiter, WOKEN_S)).ids == new.ids


async def test_a_put_between_refusal_and_wait_is_not_missed(plane: ControlPlane) -> None:
    event = await short(plane)
    for _ in range(3):
        await plane.produce("p", write(1, ["x"]), soon())
        start = time.monotonic()
        await plane.wait("p", event, soon())
        assert time.monotonic() - start < WOKEN_S
        event = await short(plane)


async def test_no_wake_up_is_lost_in_many_rounds(plane: ControlPlane) -> None:
    """A producer and a consumer that pass one sample at a time back and forth."""

    async def produce() -> None:
        for _ in range(30):
            await plane.produce("p", write(1, ["x"]), soon())

    start = time.monotonic()
    consumer = asyncio.gather(*(get(plane, 1) for _ in range(30)))
    await produce()
    got = await asyncio.wait_for(consumer, 30)
    assert len({found.ids[0] for found in got}) == 30
    assert time.monotonic() - start < 30


async def test_more_events_than_are_kept(plane: ControlPlane) -> None:
    event = await short(plane)
    for _ in range(600):
        await plane.produce("p", write(1, ["x"]), soon())
        await claim(plane, 1, task="other")
    start = time.monotonic()
    await plane.wait("p", event, soon())
    assert time.monotonic() - start < WOKEN_S


async def test_claims_of_others_do_not_wake(plane: ControlPlane) -> None:
    """Nor does what was put before the refusal."""
    await plane.produce("p", write(20, ["x"]), soon())
    event = await short(plane)
    start = time.monotonic()
    waiter = asyncio.create_task(plane.wait("p", event, Deadline(0.4)))
    for _ in range(5):
        await claim(plane, 2)
    await waiter
    assert time.monotonic() - start > 0.3

    waiter = asyncio.create_task(plane.wait("p", event, soon()))
    await plane.clear_samples("p", [1], soon())
    await asyncio.wait_for(waiter, WOKEN_S)


async def test_the_deadline_ends_it(plane: ControlPlane) -> None:
    start = time.monotonic()
    await plane.wait("p", "0-0", Deadline(0.2))
    assert 0.15 < time.monotonic() - start < WOKEN_S
    await plane.wait("p", "0-0", Deadline(0))


async def test_a_waiter_looks_again_now_and_then(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may have come back with its clock set back: new events seem to be old ones."""
    monkeypatch.setattr(connection_module, "_BLOCK_S", 0.2)
    await plane.produce("p", write(1, ["x"]), soon())
    start = time.monotonic()
    await plane.wait("p", "99999999999999-0", Deadline(60))
    assert time.monotonic() - start < WOKEN_S


async def blocked(admin: Admin, count: int, wait_until: WaitUntil) -> None:
    """Return when so many clients wait in the server."""
    await asyncio.to_thread(
        wait_until, lambda: admin.info("clients")["blocked_clients"] == count, 20.0
    )


async def test_many_waiters_do_not_ask_again_and_again(
    plane: ControlPlane, admin: Admin, wait_until: WaitUntil
) -> None:
    """More of them than redis-py allows connections by default."""
    before = admin.info("commandstats").get("cmdstat_xread", {"calls": 0})["calls"]
    waiting = [asyncio.create_task(plane.wait("p", "0-0", Deadline(60))) for _ in range(150)]

    await blocked(admin, 150, wait_until)
    await plane.produce("p", write(1, ["x"]), soon())
    await asyncio.wait_for(asyncio.gather(*waiting), 20)
    after = admin.info("commandstats")["cmdstat_xread"]["calls"]
    assert after - before <= 300


async def test_a_wait_that_fails_does_not_spin(
    plane: ControlPlane, admin: Admin, wait_until: WaitUntil
) -> None:
    await plane.wait("p", "0-0", Deadline(0.01))
    waiter = asyncio.create_task(plane.wait("p", "0-0", Deadline(60)))
    await blocked(admin, 1, wait_until)
    start = time.monotonic()
    admin.client_kill_filter(_type="normal", skipme=True)
    await asyncio.wait_for(waiter, WOKEN_S)
    assert time.monotonic() - start > 0.05


async def test_a_wait_that_can_never_succeed_fails(plane: ControlPlane, admin: Admin) -> None:
    admin.execute_command("ACL", "SETUSER", "default", "-xread")
    try:
        with pytest.raises(AuthenticationError, match="refused this user"):
            await plane.wait("p", "0-0", Deadline(60))
    finally:
        admin.execute_command("ACL", "SETUSER", "default", "+xread")
