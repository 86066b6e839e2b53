"""Sentinel: the primary is killed, frozen or demoted while calls run and consumers wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import tq_redis as tq
from tests.control.build import soon, write
from tests.servers import topologies
from tests.servers.conftest import OpenPlane, settings, unexpected_keys
from tests.servers.scenario import clear, use_everything
from tests.servers.topologies import Watched, until
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Claimed, Wanted
from tq_redis.deadline import Deadline
from tq_redis.errors import SampleNotFoundError, ServerUnavailableError

pytestmark = pytest.mark.asyncio

GO_ON_S = 15  # waiting consumers have what is put on the new primary by then
CONSUMERS = 3


@pytest.fixture
def watched(binary: str | None, request: pytest.FixtureRequest) -> Iterator[Watched]:
    options: dict[str, str] = getattr(request, "param", {})
    with topologies.sentinel(binary, **options) as started:
        yield started


async def test_everything_on_the_master_of_a_service(
    watched: Watched, open_plane: OpenPlane, namespace: str
) -> None:
    plane = open_plane(watched.url)
    await plane.connection.check_server(soon(), namespace=namespace)
    await use_everything(plane, "p")
    assert watched.primary.admin.exists(plane.keys.next_sample)
    with pytest.raises(ServerUnavailableError, match=r"No master found for 'other'"):
        unknown = open_plane(watched.url.replace("/queue", "/other"))
        await unknown.connection.command("GET", "a", deadline=Deadline(0.5))


def fail(watched: Watched) -> None:
    watched.primary.kill()


def freeze(watched: Watched) -> None:
    watched.primary.freeze()


def demote(watched: Watched) -> None:
    """As an operator does it, for an upgrade of the primary."""
    watched.sentinel.execute_command("SENTINEL", "FAILOVER", "queue")


# Sentinel tells the old primary late that it is none; without this it would take writes till then.
ONE_REPLICA = {"min-replicas-to-write": "1", "min-replicas-max-lag": "3"}


@pytest.mark.parametrize(
    ("happens", "watched"),
    [(fail, {}), (freeze, {}), (demote, ONE_REPLICA)],
    ids=["killed", "frozen", "demoted"],
    indirect=["watched"],
)
async def test_waiting_consumers_go_on(
    watched: Watched, open_plane: OpenPlane, happens: Callable[[Watched], None]
) -> None:
    plane = open_plane(watched.url)
    before = (await plane.produce("p", write(2, ["x"]), soon())).ids
    until(lambda: watched.replica.admin.exists(plane.keys.summary("p")), "the replica has it")
    consuming = [asyncio.create_task(consume(plane, f"t{n}")) for n in range(CONSUMERS)]
    await all_wait(watched, CONSUMERS)
    start = time.monotonic()
    await asyncio.to_thread(happens, watched)
    await asyncio.to_thread(until, lambda: role(watched) == "master", "the replica took over")
    after = (await plane.produce("p", write(2, ["x"]), Deadline(30))).ids
    got = await asyncio.wait_for(asyncio.gather(*consuming), 30)
    assert time.monotonic() - start < GO_ON_S
    assert got == [before + after] * CONSUMERS
    assert watched.replica.admin.hget(plane.keys.summary("p"), "samples") == "4"
    if happens is freeze:
        watched.primary.thaw()  # and it takes itself for the primary for a while
    await use_everything(plane, "q")
    await clear(plane, "p")


async def consume(plane: ControlPlane, task: str) -> list[int]:
    deadline = Deadline(40)
    while True:
        found = await plane.claim("p", Wanted(task, ["x"], 4), task, deadline)
        if isinstance(found, Claimed):
            return found.ids
        await plane.wait("p", found.event, deadline)


async def all_wait(watched: Watched, count: int) -> None:
    def blocked() -> bool:
        info: dict[str, int] = watched.primary.admin.info("clients")
        return info["blocked_clients"] == count

    await asyncio.to_thread(until, blocked, "the consumers wait in Redis")


def role(watched: Watched) -> str:
    info: dict[str, str] = watched.replica.admin.info("replication")
    return info["role"]


async def test_ids_of_lost_writes_are_not_given_out_again(
    watched: Watched, open_plane: OpenPlane
) -> None:
    """What the replica had not got is gone; metadata of it must not read the samples of others."""
    plane = open_plane(watched.url)
    kept = (await plane.produce("p", write(2, ["x"]), soon())).ids
    until(lambda: watched.replica.admin.exists(plane.keys.summary("p")), "the replica has it")
    watched.replica.freeze()
    watched.primary.admin.execute_command("CLIENT", "KILL", "TYPE", "replica")
    lost = (await plane.produce("p", write(20, ["x"]), soon())).ids
    await asyncio.to_thread(watched.primary.kill)
    watched.replica.thaw()
    for process in (plane, open_plane(watched.url)):  # one that saw it, and a new one
        new = (await process.produce("p", write(2, ["x"]), Deadline(30))).ids
        assert not set(new) & set(kept + lost)
        with pytest.raises(SampleNotFoundError):
            await process.locate("p", lost, ["x"], soon())
    rows = await plane.describe("p", soon())
    assert len(rows.ids) == 6
    await clear(plane, "p")


async def test_calls_in_flight_end_within_their_deadline(
    watched: Watched, open_plane: OpenPlane
) -> None:
    """No primary at all: typed, and in time."""
    plane = open_plane(watched.url)
    await plane.produce("p", write(2, ["x"]), soon())
    watched.replica.freeze()
    watched.primary.freeze()
    start = time.monotonic()
    with pytest.raises(ServerUnavailableError, match="queue.*within 1.5 s"):
        await plane.produce("p", write(2, ["x"]), Deadline(1.5))
    assert time.monotonic() - start < 4
    watched.primary.thaw()
    watched.replica.thaw()
    await plane.produce("p", write(2, ["x"]), Deadline(30))
    await clear(plane, "p")


async def test_a_client_over_a_failover(
    watched: Watched, namespace: str, closed_client: None
) -> None:
    await asyncio.to_thread(tq.init, settings(watched.url, namespace))
    client = tq.get_client()
    first = await client.async_put({"x": torch.arange(4.0)}, partition_id="p")
    until(lambda: watched.replica.admin.exists(f"tq:{namespace}:{{p}}"), "the replica has it")
    waiting = asyncio.create_task(client.async_get_meta(["x"], 8, "p", task_name="t", timeout=30))
    await all_wait(watched, 1)
    await asyncio.to_thread(watched.primary.kill)
    second = await client.async_put({"x": torch.arange(4.0, 8.0)}, partition_id="p", timeout=30)
    taken = await asyncio.wait_for(waiting, GO_ON_S)
    assert taken.global_indexes == first.global_indexes + second.global_indexes
    values = (await client.async_get_columns(taken))["x"]
    assert torch.equal(values, torch.arange(8.0))
    assert str(watched.replica.port) in await asyncio.to_thread(tq.progress_command, "p")
    await asyncio.to_thread(tq.close)
    assert unexpected_keys(watched.replica.admin) == []
