"""The command line, against a queue in use."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import torch
from click.testing import CliRunner, Result

import tq_redis as tq
from tests.conftest import WaitUntil
from tests.data.listed_units import listing_of
from tq_redis.cli import main
from tq_redis.config import Config, RedisConfig
from tq_redis.storage_unit import StorageUnit


def run(*words: str) -> Result:
    return CliRunner().invoke(main, list(words), env={"COLUMNS": "160"})


def test_status(client: tq.Client, redis_url: str, namespace: str, wait_until: WaitUntil) -> None:
    where = ("--url", redis_url, "--namespace", namespace)
    assert run("status", *where).output == f"Namespace {namespace} has no partition.\n"

    meta = client.put({"x": torch.zeros(4)}, partition_id="train_1")
    client.put({"y": torch.zeros(1)}, meta[:1])
    client.expect("train_1", 6)
    client.get_meta(["x"], 2, "train_1", task_name="actor", lease=60)
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(client.get_meta, ["y"], 2, "train_1", task_name="critic")
        wait_until(lambda: "critic" in client.get_standing("train_1").tasks)
        wait_until(lambda: client.get_standing("train_1").tasks["critic"].waiters)
        found = run("status", *where)
        client.put({"y": torch.zeros(1)}, meta[1:2])
        waiter.result(timeout=10)

    assert found.exit_code == 0, found.output
    lines = [line.split() for line in found.output.splitlines() if line]
    assert lines[0][:7] == ["train_1:", "4", "samples", "(4", "made", "of", "6"]
    assert ["x", "4", "0"] in lines
    assert ["y", "1", "3"] in lines
    assert ["actor", "x", "2", "2", "0", "0", "-"] in lines
    (critic,) = [line for line in lines if line[0] == "critic"]
    assert critic[1:6] == ["y", "1", "0", "0", "0"]
    assert critic[7:9] == ["for", "2,"]


def test_missing_fields_by_sample(client: tq.Client, redis_url: str, namespace: str) -> None:
    meta = client.put({"x": torch.zeros(30)}, partition_id="p")
    client.put({"y": torch.zeros(2)}, meta[:2])
    found = run("status", "p", "--missing", "--url", redis_url, "--namespace", namespace)
    assert ["3", "y"] in [line.split() for line in found.output.splitlines()]
    assert "and 8 more" in found.output


def test_what_is_wrong_is_said(client: tq.Client, redis_url: str, namespace: str) -> None:
    found = run("status", "nowhere", "--url", redis_url, "--namespace", namespace)
    assert found.exit_code == 1
    assert "Partition 'nowhere' does not exist" in found.output
    assert "Give --url or set TQ_REDIS_URL" in run("status").output
    found = run("status", "--url", "redis://127.0.0.1:1", "--timeout", "0.2")
    assert "No answer from Redis" in found.output


def test_names_are_shown_as_they_are(client: tq.Client, redis_url: str, namespace: str) -> None:
    name = "a [red]b[/] [/x] {c}:d"
    client.put({"[x]": torch.zeros(2)}, partition_id=name)
    client.get_meta(["[x]"], 1, name, task_name="[/t]")
    found = run("status", "--missing", "--url", redis_url, "--namespace", namespace)
    assert found.exit_code == 0, found.output
    assert f"{name}: 2 samples" in found.output
    assert ["[x]", "2", "0"] in [line.split() for line in found.output.splitlines()]
    assert ["[/t]", "[x]", "1", "0", "1", "0", "-"] in [
        line.split() for line in found.output.splitlines()
    ]


def test_limits_are_shown(client: tq.Client, redis_url: str, namespace: str) -> None:
    client.limit("p", "actor", 4, when_full="evict")
    for _ in range(2):
        client.put({"x": torch.zeros(3)}, partition_id="p")
    client.get_meta(["x"], 1, "p", task_name="actor")
    found = run("status", "--url", redis_url, "--namespace", namespace)
    lines = [line.split() for line in found.output.splitlines()]
    assert ["actor", "x", "3", "0", "1", "0", "-"] in lines
    assert ["actor", "3", "4", "evict", "2"] in lines


def test_bytes_are_shown_per_store(client: tq.Client, redis_url: str, namespace: str) -> None:
    for partition in ("train_1", "train_2"):
        client.put({"x": torch.zeros(2, 125_000), "y": torch.zeros(2)}, partition_id=partition)
    where = ("--url", redis_url, "--namespace", namespace)
    (used,) = client.get_store_usage()
    assert (used.blocks, used.used) == (2, 2 * 1_000_008)
    lines = [line.split() for line in run("status", *where).output.splitlines()]
    assert lines[-2] == ["store", "blocks", "MB", "may", "keep", "MB"]
    assert lines[-1] == ["memory", "2", "2.0", "-"]
    one = run("status", "train_2", *where).output.splitlines()[-1].split()
    assert one == ["memory", "1", "1.0", "-"]


def test_a_storage_unit_is_shown_with_what_it_may_keep(redis_url: str, namespace: str) -> None:
    config = Config(redis=RedisConfig(url=redis_url, namespace=namespace))
    unit = StorageUnit(config, host="127.0.0.1", capacity=1 << 29)

    async def entered(stop: asyncio.Event) -> list[str]:
        serving = asyncio.create_task(unit.run(stop))
        async with listing_of(config) as listing:
            await listing.until(1)
        where = ("--url", redis_url, "--namespace", namespace)
        found = await asyncio.to_thread(run, "status", *where)
        stop.set()
        await serving
        return found.output.splitlines()[-1].split()

    assert asyncio.run(entered(asyncio.Event())) == [f"zmq/{unit.id}", "0", "0.0", "536.9"]
