"""Saving while others work: nobody fails, and what is saved is of one moment."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.conftest import check_partitions
from tests.control.state import Admin
from tests.data.units import held_blocks
from tq_redis import Client, DeadlineError
from tq_redis.control.freeze import HOLD_S, Freeze
from tq_redis.data import DataPlane
from tq_redis.deadline import Deadline


class Crowd:
    """Threads that each repeat something until they are told to stop."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(16)
        self._running: list[Future[int]] = []

    def add(self, step: Callable[[], object]) -> None:
        def repeat() -> int:
            count = 0
            while not self._stop.is_set():
                step()
                count += 1
            return count

        self._running.append(self._threads.submit(repeat))

    def stop(self) -> list[int]:
        """How often each did it. Raises what one of them raised."""
        self._stop.set()
        self._threads.shutdown()
        return [future.result() for future in self._running]


def test_four_writers_and_four_consumers(
    client: Client, folder: Path, admin: Admin, namespace: str
) -> None:
    """Writers put a row into A, then the same number into B; consumers copy rows from A to C, with
    a lease. In a checkpoint of one moment all rows of B are in A, and those that were acknowledged
    are in C."""
    client.put({"n": torch.zeros(1), "big": torch.zeros(1, 9)}, partition_id="A")
    numbers = iter(range(1, 1_000_000))
    lock = threading.Lock()

    def write() -> None:
        with lock:
            value = torch.full((1,), float(next(numbers)))
        client.put({"n": value}, partition_id="A")
        client.put({"n": value}, partition_id="B")

    def consume() -> None:
        try:
            claimed = client.get_meta(["n"], 1, "A", task_name="t", lease=2.0, timeout=5)
        except DeadlineError:
            return
        client.put({"n": client.get_data(claimed)["n"]}, partition_id="C")
        client.ack(claimed)

    crowd = Crowd()
    for _ in range(4):
        crowd.add(write)
        crowd.add(consume)
    for step in range(4):
        client.save_checkpoint(folder, metadata={"step": step})
    steps = crowd.stop()
    assert all(steps), "somebody never got through"
    assert client.load_checkpoint(folder) == {"step": 3}
    check_partitions(admin, namespace)

    def values(partition: str) -> set[float]:
        if partition not in client.get_partition_list():
            return set()
        meta = client.get_meta(["n"], 1, partition, mode="force_fetch")
        return set(client.get_data(meta)["n"].tolist())

    assert values("B") <= values("A")
    ids, consumed = client.get_consumption_status("t", "A")
    done = client.get_meta(["n"], 1, "A", mode="force_fetch").select_samples(
        [row for row, flag in enumerate(consumed.tolist()) if flag]
    )
    assert set(client.get_data(done)["n"].tolist()) <= values("C")
    assert values("C") <= values("A")
    open_rows = len(ids) - done.size
    if open_rows:
        client.get_meta(["n"], open_rows, "A", task_name="t")


class Gate:
    """Lets a save stop at its first copy of bytes, until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        read_blocks = DataPlane.read_blocks

        async def wait(plane: DataPlane, *args: Any) -> Any:
            self.reached.set()
            await asyncio.to_thread(self.opened.wait, 20)
            return await read_blocks(plane, *args)

        patch.setattr(DataPlane, "read_blocks", wait)


@pytest.mark.parametrize("change", ["clear the partition", "clear samples", "write again"])
def test_a_change_while_bytes_are_copied_is_not_in_the_checkpoint(
    client: Client,
    folder: Path,
    admin: Admin,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    """All as before: the change happens at once, and its bytes stay until they are copied."""
    metas = [client.put({"x": torch.full((4,), 1.0)}, partition_id=name) for name in "pq"]
    gate = Gate(monkeypatch)
    with ThreadPoolExecutor(1) as thread:
        saving = thread.submit(client.save_checkpoint, folder)
        assert gate.reached.wait(10)
        for meta in metas:
            if change == "clear the partition":
                client.clear_partition(meta.partition_ids[0], timeout=2)
            elif change == "clear samples":
                client.clear_samples(meta, timeout=2)
            else:
                client.put({"x": torch.zeros(4)}, metadata=meta, timeout=2)
        assert not saving.done()
        gate.opened.set()
        saving.result()
    assert len(held_blocks(namespace)) == (2 if change == "write again" else 0)
    client.load_checkpoint(folder)
    check_partitions(admin, namespace)
    for meta in metas:
        assert client.get_data(meta)["x"].tolist() == [1.0] * 4


def test_a_save_that_is_cancelled_or_late_frees_what_was_cleared(
    client: Client, folder: Path, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = client.put({"x": torch.ones(4)}, partition_id="p")
    gate = Gate(monkeypatch)
    with ThreadPoolExecutor(1) as thread:
        saving = thread.submit(client.save_checkpoint, folder, timeout=0.5)
        assert gate.reached.wait(10)
        client.clear_samples(meta, timeout=2)
        time.sleep(0.6)
        gate.opened.set()
        with pytest.raises(DeadlineError):
            saving.result()
    assert held_blocks(namespace) == set()
    assert not folder.exists()


SAVER = """
import asyncio, sys
from tq_redis.client.kv import AsyncKVClient
from tq_redis.config import load_config
from tq_redis.control.freeze import Freeze
from tq_redis.control.plane import ControlPlane
from tq_redis.control.shards import Shards
from tq_redis.control.units import UnitList
from tq_redis.data import DataPlane, open_data_plane

url, namespace, folder, step = sys.argv[1:]

async def stop(*args):
    print("there", flush=True)
    await asyncio.sleep(60)

async def main():
    redis = {"url": url, "namespace": namespace}
    config = load_config({"redis": redis, "data": {"backend": "memory"}})
    control = ControlPlane(Shards(config.redis), namespace, config.idle_ttl_s)
    data = open_data_plane(config, UnitList(control.connection, control.keys))
    await AsyncKVClient(config, control, data, "saver").save_checkpoint(folder)

setattr(*{"all": (Freeze, "keep", stop), "keep": (DataPlane, "read_blocks", stop)}[step])
asyncio.run(main())
"""


@pytest.mark.parametrize("step", ["all", "keep"])
def test_a_saver_that_is_killed_holds_up_nobody_for_long(
    client: Client, redis_url: str, namespace: str, folder: Path, step: str
) -> None:
    meta = client.put({"x": torch.ones(4)}, partition_id="p")
    held = client.get_meta(["x"], 2, "p", task_name="t", lease=60)
    command = [sys.executable, "-c", SAVER, redis_url, namespace, str(folder), step]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as saver:
        assert saver.stdout is not None
        assert saver.stdout.readline() == "there\n"
        if step == "keep":
            client.put({"x": torch.zeros(4)}, metadata=meta, timeout=2)
        saver.send_signal(signal.SIGKILL)
    start = time.monotonic()
    client.ack(held, timeout=20)
    assert time.monotonic() - start < HOLD_S + 3
    client.put({"y": torch.ones(4)}, metadata=meta, timeout=2)
    client.save_checkpoint(folder)  # removes what the other had written
    assert [path.name for path in folder.parent.iterdir()] == ["ck"]
    client.clear_partition("p")
    assert held_blocks(namespace) == set()


def test_a_save_that_is_done_leaves_bytes_to_one_that_copies_them(
    client: Client, namespace: str
) -> None:
    meta = client.put({"x": torch.ones(4)}, partition_id="p")
    core = client._core

    async def of_both() -> None:
        deadline = Deadline(20)
        async with Freeze(core.control) as freeze:
            await freeze.all(deadline)
            await freeze.keep("p", deadline)
            await core.clear_samples(meta)
            await core.free_kept("p", deadline)  # as the other does at its end
            assert len(held_blocks(namespace)) == 1
            await freeze.release("p", deadline)
            await core.free_kept("p", deadline)
            assert held_blocks(namespace) == set()

    client._portal.run(of_both())


def test_two_saves_at_once(client: Client, folder: Path, tmp_path: Path) -> None:
    client.put({"x": torch.ones(4)}, partition_id="p")
    client.put({"x": torch.ones(4)}, partition_id="q")
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(client.save_checkpoint, [folder, tmp_path / "b", folder, tmp_path / "b"]))
    for path in (folder, tmp_path / "b"):
        client.load_checkpoint(path)
    assert client.get_partition_list() == ["p", "q"]
