"""A consumer is frozen for longer than its lease, and goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tq_redis as tq

ROOT = Path(__file__).resolve().parents[2]
LEASE_S = 0.5

_CONSUMER = f"""
import asyncio, sys
from tq_redis.config import RedisConfig
from tq_redis.control.connection import RedisConnection
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Wanted
from tq_redis.deadline import Deadline

async def main(url, namespace):
    plane = ControlPlane(RedisConnection(url, RedisConfig()), namespace, 1000)
    found = await plane.claim("p", Wanted("t", ["x"], 4, lease_s={LEASE_S}), "frozen", Deadline(20))
    print(*found.ids, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print(*await plane.ack("p", found.claims[0], found.ids, Deadline(20)), flush=True)
    print(await plane.renew("p", found.claims[0], None, Deadline(20)), flush=True)
    await plane.close()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("done", [True, False])
def test_it_learns_that_its_samples_are_lost(
    client: tq.Client, redis_url: str, namespace: str, done: bool
) -> None:
    """Whether the consumer that has them now is still at work or has done it."""
    ids = client.put({"x": torch.zeros(4)}, partition_id="p").global_indexes
    frozen = subprocess.Popen(
        [sys.executable, "-c", _CONSUMER, redis_url, namespace],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with frozen:
        assert frozen.stdin is not None
        assert frozen.stdout is not None
        assert frozen.stdout.readline().split() == list(map(str, ids))
        os.kill(frozen.pid, signal.SIGSTOP)
        mine = client.get_meta(["x"], 4, "p", task_name="t", lease=60)  # waits for the lease's end
        assert mine.global_indexes == ids
        if done:
            client.ack(mine)
        frozen.stdin.write("go on\n")
        frozen.stdin.flush()
        os.kill(frozen.pid, signal.SIGCONT)
        assert frozen.stdout.readline().split() == list(map(str, ids))
        assert frozen.stdout.readline() == "None\n"
    assert frozen.returncode == 0
    assert client.get_summary("p").get("consumed:t", 0) == 4 * done
    client.ack(mine)
    assert client.get_summary("p")["consumed:t"] == 4
