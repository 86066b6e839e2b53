"""The client can be called from anywhere: threads, running loops, one loop after the other."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import tq_redis as tq
from tq_redis.client.portal import Portal

ROOT = Path(__file__).resolve().parents[2]


def test_sync_calls_inside_a_running_loop(client: tq.Client) -> None:
    async def trainer() -> int:
        return client.put({"x": torch.zeros(2)}, partition_id="p").size

    assert asyncio.run(trainer()) == 2


def test_async_calls_from_one_loop_after_the_other(client: tq.Client) -> None:
    for _ in range(3):
        asyncio.run(client.async_put({"x": torch.zeros(2)}, partition_id="p"))
    assert client.get_summary("p")["samples"] == 6


def test_a_caller_that_blocks_its_loop_still_gets_its_answer(client: tq.Client) -> None:
    async def stall() -> tq.BatchMeta:
        put = asyncio.ensure_future(
            client.async_put({"x": torch.zeros(2)}, partition_id="p", timeout=1)
        )
        await asyncio.sleep(0)
        time.sleep(2)  # noqa: ASYNC251 - the point of the test: longer than the call's deadline
        return await put

    assert asyncio.run(stall()).size == 2
    assert client.get_summary("p")["samples"] == 2


def test_cancelled_waiters_leave_later_answers_right(client: tq.Client) -> None:
    async def cancel_many() -> list[tq.BatchMeta]:
        for _ in range(50):
            waiter = asyncio.ensure_future(
                client.async_get_meta(["x"], 10**6, "p", task_name="never")
            )
            await asyncio.sleep(0.002)
            waiter.cancel()
        return await asyncio.gather(
            *(client.async_put({"x": torch.full((1,), n)}, partition_id="p") for n in range(50))
        )

    metas = asyncio.run(cancel_many())
    for n, meta in enumerate(metas):
        assert client.get_columns(meta)["x"].tolist() == [n]


def test_sixteen_threads_share_one_client(client: tq.Client) -> None:
    failures: list[str] = []

    def work(thread: int) -> None:
        for n in range(10):
            value = thread * 100 + n
            columns = {
                "i": torch.full((3,), value),
                "h": torch.full((3, 5), value, dtype=torch.float16),
                "b": torch.tensor([True, False, True]),
                "u": torch.full((3, 7), value % 256, dtype=torch.uint8),
            }
            got = client.get_columns(client.put(columns, partition_id=f"p{thread}"))
            failures.extend(name for name in columns if not torch.equal(columns[name], got[name]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_closed_client_says_so(client: tq.Client) -> None:
    tq.close()
    with pytest.raises(tq.ClosedError, match="init"):
        client.get_partition_list()


def test_a_portal_does_not_wait_for_itself() -> None:
    portal = Portal()

    async def inner() -> int:
        return 1

    async def outer() -> int:
        return portal.run(inner())

    with pytest.raises(RuntimeError, match="await its async_ form"):
        portal.run(outer())
    portal.stop()
    portal.stop()


def test_a_forked_child_starts_without_a_client(client: tq.Client) -> None:
    child = os.fork()
    if child == 0:
        try:
            tq.get_client()
        except tq.NotInitializedError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert client.get_partition_list() == []


def test_generated_code_is_up_to_date() -> None:
    command = [sys.executable, "tools/gen_sync.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
