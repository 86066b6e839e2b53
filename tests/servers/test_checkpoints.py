"""Checkpoints on servers of all kinds, loaded into another kind, and over failovers and moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import redis
import torch
from redis.crc import key_slot

import tq_redis as tq
from tests.control.state import Partition
from tests.servers import topologies
from tests.servers.conftest import settings, unexpected_keys
from tests.servers.topologies import Admin, Cluster, Watched, until
from tq_redis.control import snapshots
from tq_redis.control.keys import Keys
from tq_redis.control.plane import ControlPlane

NAMES = ["train_1", "{a}", "a:b", "汉字", "val"]
ROWS = 2000


@dataclass(frozen=True)
class Place:
    """Where a queue may live; ``admins`` see all of its keys."""

    url: str | list[str]
    admins: list[Admin]


@pytest.fixture(scope="module")
def places(binary: str | None, cluster: Cluster) -> Iterator[dict[str, Place]]:
    with (
        topologies.servers(binary, 3, {}) as (single, *shards),
        topologies.sentinel(binary) as watched,
        redis.RedisCluster.from_url(
            f"redis://127.0.0.1:{cluster.primaries[0].port}", decode_responses=True
        ) as of_cluster,
    ):
        found = {
            "single": Place(_url(single.port), [single.admin]),
            "shards": Place([_url(each.port) for each in shards], [s.admin for s in shards]),
            "sentinel": Place(watched.url, [watched.primary.admin]),
            "cluster": Place(cluster.url, [cast(Admin, of_cluster)]),
        }
        yield found
        servers = (single, *shards, watched.primary)
        assert [key for server in servers for key in unexpected_keys(server.admin)] == []


def _url(port: int) -> str:
    return f"redis://127.0.0.1:{port}"


@pytest.fixture
def watched(binary: str | None) -> Iterator[Watched]:
    with topologies.sentinel(binary) as started:
        yield started


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ck"


def start(url: str | list[str], namespace: str) -> tq.Client:
    tq.init(settings(url, namespace))
    return tq.get_client()


def fill(client: tq.Client, name: str) -> tq.BatchMeta:
    """Rows of all kinds; four of them are consumed, two are held. Returns the latter."""
    number = float(NAMES.index(name))
    tags = [{"step": row, "of": name} for row in range(4)]
    client.kv_batch_put(list("abcd"), name, {"x": torch.arange(4) + number}, tags=tags)
    client.put(
        {"x": torch.arange(8) + number, "t": list("efghijkl")}, None, name, group_ids="gghhiijj"
    )
    client.kv_put("b", name, {"reward": torch.tensor(number)})
    client.get_meta(["x"], 1, name, task_name="t")
    draw(client, name)
    held = client.get_meta(["x"], 3, name, task_name="t", lease=60)
    client.ack(held[:1])
    client.expect(name, 20)
    return held[1:]


def draw(client: tq.Client, name: str) -> list[int]:
    config = {"dp_rank": 0, "batch_index": 0}
    meta = client.get_meta(["x"], 2, name, task_name="t", sampling_config=config, timeout=0)
    return meta.global_indexes


def seen(client: tq.Client, name: str) -> dict[str, Any]:
    """What a user sees of a partition, but for who holds what."""
    changes = ("claims", "claimed:", "generation", "expires_at")
    summary = client.get_summary(name)
    meta = client.get_meta(["x"], 1, name, mode="force_fetch")
    ids, produced = client.get_production_status(["x", "t", "reward"], name)
    return {
        "summary": {n: v for n, v in summary.items() if not n.startswith(changes)},
        "x": client.get_columns(meta)["x"].tolist(),
        "ids": ids.tolist(),
        "produced": produced.tolist(),
        "keys": client.kv_list(name),
        "reward": client.kv_batch_get(["b"], name, select_fields=["reward"])["reward"].tolist(),
        "consumed": client.get_consumption_status("t", name)[1].tolist(),
        "draw": draw(client, name),
    }


def check_keys(place: Place, namespace: str) -> None:
    """Fail where keys contradict each other, or a save or a load has left some."""
    keys = Keys(namespace)
    for name in tq.get_client().get_partition_list():
        key = keys.summary(name)
        (admin,) = (admin for admin in place.admins if admin.exists(key))
        Partition(admin, key).check()
    for admin in place.admins:
        assert list(admin.scan_iter(f"tq:{namespace}:*:load*", count=1000)) == []


# Kinds of servers


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("single", "cluster"),
        ("cluster", "shards"),
        ("shards", "single"),
        ("sentinel", "cluster"),
    ],
)
def test_there_and_back(
    places: dict[str, Place],
    namespace: str,
    folder: Path,
    closed_client: None,
    first: str,
    second: str,
) -> None:
    """Loaded where it was saved after changes, then elsewhere, saved there, and loaded at home."""
    client = start(places[first].url, namespace)
    held = {name: fill(client, name) for name in NAMES}
    before = {name: seen(client, name) for name in NAMES}
    client.save_checkpoint(folder, metadata={"step": 1})
    client.clear_partition(NAMES[0])
    client.put({"x": torch.zeros(3)}, None, NAMES[1])
    client.get_meta(["x"], 2, NAMES[2], task_name="t")
    client.put({"x": torch.zeros(3)}, None, "later")
    for place in (first, second, first):
        if places[place].url != client.config.redis.url:
            tq.close()
            client = start(places[place].url, namespace)
        assert client.load_checkpoint(folder) == {"step": 1}
        assert client.get_partition_list() == sorted(NAMES)
        check_keys(places[place], namespace)
        for name in NAMES:
            assert seen(client, name) == before[name]
            with pytest.raises(tq.LeaseLostError) as lost:
                client.ack(held[name])
            assert list(lost.value.rows) == held[name].global_indexes
        client.save_checkpoint(folder, metadata={"step": 1})
    new = client.put({"x": torch.zeros(1)}, None, NAMES[0]).global_indexes
    assert new[0] > 3_000_000_000


# Servers that change meanwhile


@pytest.fixture
def client(request: pytest.FixtureRequest, namespace: str, closed_client: None) -> tq.Client:
    """Of a queue on what the test uses, a cluster or a master that a Sentinel watches."""
    place: Cluster | Watched = request.getfixturevalue(request.param)
    return start(place.url, namespace)


def put_rows(client: tq.Client, value: float = 0.0) -> None:
    client.put({"x": torch.arange(ROWS) + value}, None, "p")


def has_rows(client: tq.Client, value: float = 0.0) -> None:
    meta = client.get_meta(["x"], 1, "p", mode="force_fetch", timeout=40)
    assert torch.equal(client.get_columns(meta)["x"], torch.arange(ROWS) + value)


def fail_over(watched: Watched) -> None:
    watched.primary.kill()
    until(lambda: has_taken_over(watched), "the replica took over")


def has_taken_over(watched: Watched) -> bool:
    return watched.replica.admin.role()[0] == "master"


@pytest.mark.parametrize("client", ["watched"], indirect=True)
def test_a_failover_between_save_and_load(
    watched: Watched, client: tq.Client, namespace: str, folder: Path
) -> None:
    fill(client, "val")
    before = seen(client, "val")
    client.save_checkpoint(folder)
    client.put({"x": torch.zeros(3)}, None, "val")
    fail_over(watched)
    client.load_checkpoint(folder, timeout=40)
    assert seen(client, "val") == before
    check_keys(Place(watched.url, [watched.replica.admin]), namespace)


def between_pages(patch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Have something happen while a save reads a large key."""
    snapshot = ControlPlane.snapshot

    async def pages(self: ControlPlane, *args: Any) -> AsyncIterator[Any]:
        count = 0
        async for page in snapshot(self, *args):
            yield page
            count += page[0] == "field:x"
            if count == 3:
                count += 1
                await asyncio.to_thread(happens)

    patch.setattr(ControlPlane, "snapshot", pages)
    patch.setattr(snapshots, "_ENTRIES_PER_PAGE", 100)


@pytest.mark.parametrize("client", ["cluster"], indirect=True)
def test_a_slot_moves_during_a_save(
    cluster: Cluster,
    client: tq.Client,
    namespace: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_rows(client)
    slot = key_slot(Keys(namespace).summary("p").encode())
    owner = cluster.owner_of(slot)
    other = next(node for node in cluster.primaries if node is not owner)
    between_pages(monkeypatch, lambda: cluster.move(slot, other))
    client.save_checkpoint(folder)
    client.clear_partition("p")
    client.load_checkpoint(folder)
    has_rows(client)
    cluster.move(slot, owner)


@pytest.mark.parametrize("client", ["watched"], indirect=True)
def test_a_failover_during_a_save(
    watched: Watched, client: tq.Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is right, or refused where the failover took too long; the next one is right."""
    put_rows(client)
    with monkeypatch.context() as patch, suppress(tq.CheckpointError):
        between_pages(patch, lambda: fail_over(watched))
        client.save_checkpoint(folder, timeout=40)
        client.clear_partition("p")
        client.load_checkpoint(folder)
        has_rows(client)
    put_rows(client, 0.5)
    client.save_checkpoint(folder)
    client.clear_partition("p")
    client.load_checkpoint(folder)


@pytest.mark.parametrize("client", ["watched"], indirect=True)
def test_a_failover_that_loses_a_part_of_a_load(
    watched: Watched,
    client: tq.Client,
    namespace: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was there is served as before; loading again helps."""
    monkeypatch.setattr(snapshots, "_ENTRIES_PER_PAGE", 100)
    put_rows(client)
    client.save_checkpoint(folder)
    client.clear_partition("p")
    put_rows(client, 0.5)
    assert watched.primary.admin.wait(1, 5000) == 1
    stage, count = ControlPlane.stage, 0

    async def cut(self: ControlPlane, *args: Any, **more: Any) -> bool:
        nonlocal count
        count += args[2] == "field:x"
        if count == 3:
            watched.replica.freeze()
            watched.primary.admin.execute_command("CLIENT", "KILL", "TYPE", "replica")
        elif count == 6:
            watched.primary.kill()
            watched.replica.thaw()
            await asyncio.to_thread(until, lambda: has_taken_over(watched), "the replica took over")
        return await stage(self, *args, **more)

    with monkeypatch.context() as patch, pytest.raises(tq.CheckpointError, match="load again"):
        patch.setattr(ControlPlane, "stage", cut)
        client.load_checkpoint(folder, timeout=40)
    has_rows(client, 0.5)
    client.load_checkpoint(folder)
    has_rows(client)
    check_keys(Place(watched.url, [watched.replica.admin]), namespace)
