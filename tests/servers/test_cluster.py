"""Redis Cluster: every verb stays in one slot, and calls outlive moves, failovers and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import redis.exceptions as rex
import torch
from redis.crc import key_slot

import tq_redis as tq
from tests.control.build import soon, write
from tests.servers import topologies
from tests.servers.conftest import OpenPlane, settings, unexpected_keys
from tests.servers.scenario import clear, use_everything, verbs_not_run
from tests.servers.topologies import Cluster, Server, until
from tq_redis.control.addresses import parse_address
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Claimed, Wanted
from tq_redis.control.rights import rules
from tq_redis.control.topologies import open_topology
from tq_redis.deadline import Deadline
from tq_redis.errors import AuthenticationError

pytestmark = pytest.mark.asyncio

NAMES = ["train_1", "{a}", "a{b}c", "}{", "a:b", "two words", "{", "}", "{}", "汉字", "p" * 300]


async def test_every_verb_whatever_the_name(cluster: Cluster, open_plane: OpenPlane) -> None:
    plane = open_plane(cluster.url)
    await plane.connection.check_server(soon(), namespace=plane.keys.namespace)
    for node in cluster.primaries:
        node.admin.script_flush()
    seen: list[int] = []
    for name in NAMES:
        seen += await use_everything(plane, name)
    assert verbs_not_run(*(node.admin for node in cluster.primaries)) == []
    assert len(set(seen)) == 8 * len(NAMES), "an id was given out twice"
    slots = {key_slot(plane.keys.summary(name).encode()) // 5462 for name in NAMES}
    assert len(slots) == 3, "the names do not cover all nodes"


async def test_a_user_with_the_least_rights(cluster: Cluster, open_plane: OpenPlane) -> None:
    plane = open_plane(cluster.url.replace("//", "//tq:pw@"))
    allowed = rules(plane.keys.namespace, cluster=True)
    for node in cluster.primaries:
        node.admin.execute_command("ACL", "SETUSER", "tq", "reset", "on", ">pw", *allowed)
        node.admin.acl_log_reset()
    await plane.connection.check_server(soon(), namespace=plane.keys.namespace)
    waiting = asyncio.create_task(plane.wait("p", "0-0", Deadline(20)))
    await plane.produce("p", write(1, ["x"]), soon())
    await asyncio.wait_for(waiting, 4)
    await clear(plane, "p")
    for name in NAMES:
        await use_everything(plane, name)
    assert [node.admin.acl_log() for node in cluster.primaries] == [[], [], []]
    cluster.primaries[1].admin.execute_command("ACL", "SETUSER", "tq", "-hset")
    with pytest.raises(AuthenticationError, match=r"\+hset"):
        await plane.connection.check_server(soon(), namespace=plane.keys.namespace)
    for node in cluster.primaries:
        node.admin.execute_command("ACL", "DELUSER", "tq")


async def test_one_address_is_enough(cluster: Cluster, open_plane: OpenPlane) -> None:
    first = cluster.primaries[0]
    plane = open_plane(f"redis+cluster://127.0.0.1:{first.port}")
    await use_everything(plane, "p")
    gone = topologies.free_port()
    plane = open_plane(f"redis+cluster://127.0.0.1:{gone},127.0.0.1:{first.port}")
    await use_everything(plane, "p")


async def test_commands_of_several_slots_at_once(cluster: Cluster, open_plane: OpenPlane) -> None:
    """The list of partitions, the counter of ids and the partitions lie on different nodes."""
    plane = open_plane(cluster.url)
    names = [f"p{number}" for number in range(20)]
    await asyncio.gather(*(plane.produce(name, write(2, ["x"]), soon()) for name in names))
    assert await plane.partitions(soon()) == sorted(names)
    await asyncio.gather(*(clear(plane, name) for name in names))
    assert await plane.partitions(soon()) == []


async def test_waiters_do_not_hold_up_others(cluster: Cluster, open_plane: OpenPlane) -> None:
    plane = open_plane(cluster.url, max_connections=2)
    waiting = [asyncio.create_task(plane.wait(name, "0-0", Deadline(20))) for name in NAMES]
    for name in NAMES:
        await plane.produce(name, write(1, ["x"]), soon())
    await asyncio.wait_for(asyncio.gather(*waiting), 4)
    await clear(plane, *NAMES)


async def test_a_slot_that_moves(cluster: Cluster, open_plane: OpenPlane) -> None:
    """MOVED, ASK and TRYAGAIN: calls go on while the keys of a partition travel."""
    plane = open_plane(cluster.url)
    slot = key_slot(plane.keys.summary("p").encode())
    owner = cluster.owner_of(slot)
    other = next(node for node in cluster.primaries if node is not owner)
    put = write(64, ["x"])
    ids = (await plane.produce("p", put, soon())).ids
    moving = asyncio.create_task(asyncio.to_thread(cluster.move, slot, other))
    got: list[int] = []
    while len(got) < len(ids):
        found = await plane.claim("p", Wanted("t", ["x"], 1), "me", soon())
        assert isinstance(found, Claimed)
        got += found.ids
    await moving
    assert got == ids
    assert (await plane.summary("p", soon()))["consumed:t"] == 64
    await clear(plane, "p")
    cluster.move(slot, owner)


# A client, and a failover


@pytest.fixture
def failing(binary: str | None) -> Iterator[Cluster]:
    with topologies.cluster(binary, replica=True) as started:
        yield started


@pytest.mark.parametrize("end", [Server.kill, Server.freeze], ids=["killed", "frozen"])
async def test_a_primary_goes_while_consumers_wait(
    failing: Cluster, open_plane: OpenPlane, end: Callable[[Server], None]
) -> None:
    plane = open_plane(failing.url)
    dying = failing.primaries[0]
    assert failing.replica is not None
    name = next(f"p{n}" for n in range(1000) if _lives_on_first(plane, f"p{n}"))
    await plane.produce(name, write(2, ["x"]), soon())
    until(lambda: failing.replica and _same_keys(dying, failing.replica), "the replica has it")
    wanted = Wanted("t", ["x"], 4)

    async def consume() -> list[int]:
        deadline = Deadline(30)
        while True:
            found = await plane.claim(name, wanted, "me", deadline)
            if isinstance(found, Claimed):
                return found.ids
            await plane.wait(name, found.event, deadline)

    consuming = asyncio.create_task(consume())
    await asyncio.to_thread(until, lambda: _blocked_clients(dying), "the consumer waits in Redis")
    await asyncio.to_thread(end, dying)
    start = asyncio.get_running_loop().time()
    await plane.produce(name, write(2, ["x"]), Deadline(30))
    assert len(await asyncio.wait_for(consuming, 15)) == 4
    assert asyncio.get_running_loop().time() - start < 15
    await use_everything(plane, name + "{new}")
    await clear(plane, name)


async def test_clients_do_not_ask_a_frozen_node_where_slots_are(failing: Cluster) -> None:
    """Any of the four nodes could be the first that a client asks, so there are many clients."""
    frozen, replica = failing.primaries[0], failing.replica
    assert replica is not None
    key = next(f"k{n}" for n in range(1000) if key_slot(f"k{n}".encode()) <= 5460)
    async with AsyncExitStack() as opened:
        clients = [open_topology(parse_address(failing.url), timeout_s=1.0) for _ in range(24)]
        for client in clients:
            opened.push_async_callback(client.aclose)
            await client.execute("GET", key)
        before = _connections(frozen)
        frozen.freeze()
        opened.callback(frozen.thaw)
        calls = [client.execute("GET", key) for client in clients]
        failures = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(failure) for failure in failures} == {rex.TimeoutError}
        await asyncio.to_thread(until, lambda: _is_primary(replica), "the replica took over")
        for client in clients:
            client.forget()
            await client.primaries()  # one by one: each is 60 ms of Python, of 2 s allowed
    assert _connections(frozen) == before


def _connections(node: Server) -> int:
    """How many it has accepted, those included that came while it was frozen."""
    node.admin.ping()
    info: Any = node.admin.info("stats")
    return info["total_connections_received"]


def _is_primary(node: Server) -> bool:
    info: Any = node.admin.info("replication")
    return info["role"] == "master"


def _blocked_clients(node: Server) -> int:
    info: Any = node.admin.info("clients")
    return info["blocked_clients"]


def _lives_on_first(plane: ControlPlane, name: str) -> bool:
    return key_slot(plane.keys.summary(name).encode()) <= 5460


def _same_keys(one: Server, other: Server) -> bool:
    return one.admin.dbsize() == other.admin.dbsize() > 0


async def test_a_client_on_a_cluster(cluster: Cluster, namespace: str, closed_client: None) -> None:
    await asyncio.to_thread(tq.init, settings(cluster.url, namespace))
    client = tq.get_client()
    for name in NAMES:
        meta = await client.async_put({"x": torch.arange(4.0)}, partition_id=name)
        taken = await client.async_get_meta(["x"], 4, name, task_name="t")
        assert taken.global_indexes == meta.global_indexes
        assert torch.equal((await client.async_get_columns(taken))["x"], torch.arange(4.0))
    assert await client.async_get_partition_list() == sorted(NAMES)
    await asyncio.to_thread(tq.close)
    assert [key for node in cluster.primaries for key in unexpected_keys(node.admin)] == []
