"""A caller is interrupted or cancelled at any moment: what it did not get can be claimed."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import torch

import tq_redis as tq
from tests.conftest import WaitUntil

# Modules of weak references, whose functions Python calls back at any time.
CALLED_BACK = ("_weakrefset.py", "weakref.py")
TIMES = 50
ROWS = 4 * TIMES
AT_MOST_S = 0.004


def put(client: tq.Client) -> None:
    client.put({"x": torch.arange(float(ROWS))}, partition_id="p")


def left(client: tq.Client, wait_until: WaitUntil, got: list[int]) -> None:
    """Wait until all samples but those that callers got can be claimed, and claim them."""
    missing = sorted(set(range(1, ROWS + 1)) - set(got))
    assert len(set(got)) == len(got)
    last: list[int] = []

    def all_are_back() -> bool:
        last[:] = client.get_meta(["x"], len(missing), "p", task_name="t", timeout=0).global_indexes
        return bool(last)

    wait_until(all_are_back, what=f"{len(missing)} samples can be claimed")
    assert last == missing


@pytest.mark.parametrize("lease", [None, 60.0])
def test_coroutines_that_are_cancelled(
    client: tq.Client, wait_until: WaitUntil, lease: float | None
) -> None:
    put(client)
    chance = random.Random(0)
    got: list[int] = []

    async def cancel_many() -> None:
        for _ in range(TIMES):
            call = asyncio.ensure_future(
                client.async_get_meta(["x"], 4, "p", task_name="t", lease=lease)
            )
            await asyncio.sleep(chance.uniform(0, AT_MOST_S))
            call.cancel()
            (found,) = await asyncio.gather(call, return_exceptions=True)
            if isinstance(found, tq.BatchMeta):
                got.extend(found.global_indexes)

    asyncio.run(cancel_many())
    left(client, wait_until, got)


@contextmanager
def interrupted_after(seconds: float) -> Generator[None]:
    """Ctrl-C, so many seconds after the body began; its handler raises KeyboardInterrupt."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if Path(frame.f_code.co_filename).name in CALLED_BACK:
            # Python drops what is raised here: a moment later, then.
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


@pytest.mark.parametrize("lease", [None, 60.0])
def test_blocking_calls_that_are_interrupted(
    client: tq.Client, wait_until: WaitUntil, lease: float | None
) -> None:
    assert threading.current_thread() is threading.main_thread()
    put(client)
    chance = random.Random(1)
    got: list[int] = []
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(TIMES):
            meta: tq.BatchMeta | None = None
            try:
                with interrupted_after(chance.uniform(0.0001, AT_MOST_S)):
                    meta = client.get_meta(["x"], 4, "p", task_name="t", lease=lease)
            except KeyboardInterrupt:
                pass
            if meta is not None:
                got.extend(meta.global_indexes)
    finally:
        signal.signal(signal.SIGALRM, before)
    left(client, wait_until, got)


def test_a_waiter_that_is_interrupted(client: tq.Client, wait_until: WaitUntil) -> None:
    """And the calls behind it get their own answers."""
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(10):
            with pytest.raises(KeyboardInterrupt), interrupted_after(0.02):
                client.get_meta(["x"], 4, "p", task_name="t")
    finally:
        signal.signal(signal.SIGALRM, before)
    put(client)
    left(client, wait_until, [])


def test_the_body_of_hold_is_interrupted(client: tq.Client) -> None:
    put(client)
    before = signal.signal(signal.SIGALRM, interrupt)
    meta = client.get_meta(["x"], ROWS, "p", task_name="t", lease=60)
    try:
        with pytest.raises(KeyboardInterrupt), client.hold(meta), interrupted_after(0.02):
            time.sleep(10)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert client.get_meta(["x"], ROWS, "p", task_name="t", timeout=0).size == ROWS
