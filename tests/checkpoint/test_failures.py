"""What goes wrong is said, and the queue is as it was before."""

from __future__ import annotations

import json
import os
import resource
import stat
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.checkpoint.conftest import check_partitions
from tests.control.state import Admin, dump
from tests.data.units import held_blocks
from tq_redis import (
    BatchMeta,
    CheckpointError,
    Client,
    DataLostError,
    DeadlineError,
    ServerError,
    StoreFullError,
)
from tq_redis.checkpoint.files import Writer
from tq_redis.client import load
from tq_redis.control.plane import ControlPlane
from tq_redis.data import DataPlane, memory


@pytest.fixture
def meta(client: Client) -> BatchMeta:
    """Samples of a partition, with some of them consumed and some held."""
    meta = client.put({"x": torch.arange(8.0), "t": list("abcdefgh")}, partition_id="p")
    client.get_meta(["x"], 2, "p", task_name="t")
    client.get_meta(["x"], 2, "p", task_name="t", lease=60)
    return meta


def still_works(client: Client, meta: BatchMeta) -> None:
    """The queue answers, and nothing is frozen."""
    assert client.get_data(meta)["x"].tolist() == [float(number) for number in range(8)]
    client.put({"y": torch.ones(8)}, metadata=meta, timeout=2)
    made = client.put({"x": torch.ones(1)}, partition_id="p", timeout=2)
    client.clear_samples(made, timeout=2)


@contextmanager
def as_nobody() -> Generator[None]:
    """Root may write everywhere, so a superuser is somebody else for a moment."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


# Saving


def test_a_directory_that_is_read_only(client: Client, tmp_path: Path, meta: BatchMeta) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    parent.chmod(stat.S_IRUSR | stat.S_IXUSR | stat.S_IROTH | stat.S_IXOTH)
    for path in [tmp_path, *tmp_path.parents]:
        if path.stat().st_uid == os.getuid() and path != Path("/tmp"):
            path.chmod(path.stat().st_mode | stat.S_IXOTH | stat.S_IROTH)
    with as_nobody(), pytest.raises(CheckpointError, match="Permission denied") as caught:
        client.save_checkpoint(parent / "ck")
    assert str(parent) in caught.value.path
    still_works(client, meta)


def test_a_parent_directory_that_is_not_there(client: Client, folder: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        client.save_checkpoint(folder / "deeper")


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_something_else_in_its_place_is_not_replaced(
    client: Client, folder: Path, meta: BatchMeta, kind: str
) -> None:
    if kind == "file":
        folder.write_text("mine")
    else:
        folder.mkdir()
        (folder / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="no checkpoint") as caught:
        client.save_checkpoint(folder)
    assert caught.value.path == str(folder)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        client.load_checkpoint(folder)
    assert (folder if kind == "file" else folder / "mine").read_text() == "mine"
    still_works(client, meta)


def test_an_empty_directory_is_taken(client: Client, folder: Path, meta: BatchMeta) -> None:
    folder.mkdir()
    client.save_checkpoint(folder)
    client.load_checkpoint(folder)
    still_works(client, meta)


def test_a_disk_that_is_full(client: Client, folder: Path, meta: BatchMeta) -> None:
    """The checkpoint that was there stays."""
    client.save_checkpoint(folder, metadata={"step": 1})
    large = client.put({"large": torch.zeros(1, 1 << 20)}, partition_id="q")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            client.save_checkpoint(folder, metadata={"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    client.clear_samples(large, timeout=2)
    still_works(client, meta)
    assert client.load_checkpoint(folder) == {"step": 1}


def test_bytes_that_are_gone(client: Client, folder: Path, namespace: str, meta: BatchMeta) -> None:
    lost = client.put({"x": torch.ones(1)}, partition_id="lost")
    shelf = memory._shelves[namespace]
    shelf.drop([name for name, block in shelf._blocks.items() if block.partition == "lost"])
    with pytest.raises(DataLostError, match="'lost' cannot be saved; clear the samples") as caught:
        client.save_checkpoint(folder)
    assert caught.value.partition == "lost"
    assert not folder.exists()
    still_works(client, meta)
    client.clear_samples(lost)
    client.save_checkpoint(folder)


@pytest.mark.parametrize("step", ["open", "close"])
def test_a_save_that_is_too_slow(
    client: Client, folder: Path, meta: BatchMeta, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    client.save_checkpoint(folder, metadata={"step": 1})
    do = getattr(Writer, step)

    def slow(writer: Writer) -> Any:
        time.sleep(0.6)
        return do(writer)

    with monkeypatch.context() as patch, pytest.raises((DeadlineError, ServerError)):
        patch.setattr(Writer, step, slow)
        client.save_checkpoint(folder, metadata={"step": 2}, timeout=0.5)
    still_works(client, meta)
    assert client.load_checkpoint(folder) == {"step": 1}


# Loading


def cut_short(folder: Path) -> None:
    path = folder / "partition-0000.blocks"
    os.truncate(path, path.stat().st_size - 1)


def change_a_bit(folder: Path) -> None:
    path = folder / "partition-0000.state"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def remove_a_file(folder: Path) -> None:
    (folder / "partition-0000.blocks").unlink()


def change_the_manifest(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))

    return damage


DAMAGE: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "cut short": (cut_short, "partition-0000.blocks", "bytes instead of"),
    "a bit": (change_a_bit, "partition-0000.state", "was changed: its SHA-256"),
    "a file is missing": (remove_a_file, "partition-0000.blocks", "No such file"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "ck", "has no manifest.json"),
    "half a manifest": (
        lambda f: os.truncate(f / "manifest.json", 99), "manifest.json", "is no manifest",
    ),
    "metadata": (
        change_the_manifest(lambda m: m.update(metadata={"step": 9})),
        "manifest.json",
        "checksum is wrong",
    ),
    "version": (
        change_the_manifest(lambda m: m.update(version=3)), "manifest.json", "version 3; this",
    ),
    "format": (
        change_the_manifest(lambda m: m.update(format="other")), "manifest.json", "'other'",
    ),
    "an unknown field": (
        change_the_manifest(lambda m: m.update(more=1)), "manifest.json", "unknown field",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_checkpoint_that_is_not_whole(
    client: Client, folder: Path, admin: Admin, namespace: str, meta: BatchMeta, name: str
) -> None:
    damage, file, reason = DAMAGE[name]
    client.save_checkpoint(folder)
    client.put({"z": torch.ones(8)}, metadata=meta)
    damage(folder)
    before = dump(admin, namespace)
    with pytest.raises(CheckpointError, match=reason) as caught:
        client.load_checkpoint(folder)
    assert Path(caught.value.path).name == file
    assert dump(admin, namespace) == before
    still_works(client, meta)
    check_partitions(admin, namespace)


def test_a_checkpoint_that_is_not_there(client: Client, folder: Path, meta: BatchMeta) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        client.load_checkpoint(folder)
    still_works(client, meta)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_store_that_is_full(
    client: Client,
    folder: Path,
    admin: Admin,
    namespace: str,
    meta: BatchMeta,
    monkeypatch: pytest.MonkeyPatch,
    after: int,
) -> None:
    """All that was stored is removed, however far it got."""
    monkeypatch.setattr(load, "_BATCH_BLOCKS", 1)
    client.put({"z": torch.ones(8)}, metadata=meta)
    client.put({"x": torch.ones(8)}, partition_id="q")
    client.save_checkpoint(folder)
    write_blocks, calls = DataPlane.write_blocks, []

    async def write(self: DataPlane, *args: Any) -> list[str]:
        calls.append(1)
        if len(calls) > after:
            raise StoreFullError("The store is full")
        return await write_blocks(self, *args)

    monkeypatch.setattr(DataPlane, "write_blocks", write)
    before = dump(admin, namespace)
    held = held_blocks(namespace)
    with pytest.raises(StoreFullError):
        client.load_checkpoint(folder)
    assert dump(admin, namespace) == before
    assert held_blocks(namespace) == held
    check_partitions(admin, namespace)
    still_works(client, meta)


def test_a_load_that_fails_between_two_partitions(
    client: Client, folder: Path, meta: BatchMeta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so, and loading again helps."""
    client.put({"x": torch.ones(8)}, partition_id="q")
    client.save_checkpoint(folder, metadata={"step": 1})
    activate = ControlPlane.activate

    async def fail_for_q(self: ControlPlane, partition: str, *args: Any) -> list[str] | None:
        if partition == "q":
            raise ServerError("Redis is gone")
        return await activate(self, partition, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ControlPlane, "activate", fail_for_q)
        with pytest.raises(CheckpointError, match="Only 1 of 2 partitions .* load it again: Redis"):
            client.load_checkpoint(folder)
    assert client.load_checkpoint(folder) == {"step": 1}
    still_works(client, meta)


def test_blocks_that_are_being_loaded_are_no_orphans(
    client: Client, folder: Path, meta: BatchMeta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner frees blocks that no sample names for too long: not those of a slow load."""
    client.save_checkpoint(folder)
    client.clear_partition("p")
    core = client._core
    now = msgspec.structs.replace(core.config.data, orphan_grace_s=1e-9)
    activate = ControlPlane.activate

    async def sweep_first(self: ControlPlane, *args: Any) -> list[str] | None:
        with monkeypatch.context() as patch:
            patch.setattr(core, "config", msgspec.structs.replace(core.config, data=now))
            await core.sweep()
        return await activate(self, *args)

    monkeypatch.setattr(ControlPlane, "activate", sweep_first)
    client.load_checkpoint(folder)
    still_works(client, meta)
