"""Saving: all partitions as they stood at one moment; their users go on as soon as they can."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, ParamSpec, TypeVar

import msgspec

from tq_redis.checkpoint.directory import Draft
from tq_redis.checkpoint.disk import Disk
from tq_redis.checkpoint.files import FileRecord, Writer, disk_errors
from tq_redis.checkpoint.manifest import PartitionRecord
from tq_redis.client.core import ClientCore
from tq_redis.control.freeze import HOLD_S, Freeze, HoldLostError
from tq_redis.data.base import Content
from tq_redis.deadline import Deadline
from tq_redis.errors import CheckpointError, DataLostError, DeadlineError, TQError

_log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# Blocks that are copied at a time: few enough to need little memory, many enough to be fast.
_BATCH_BYTES = 32 << 20
_BATCH_BLOCKS = 64
_FREE_S = 10.0


class _Block(NamedTuple):
    handle: str
    nbytes: int


@dataclass
class _Partition:
    name: str
    number: int
    samples: int = 0
    blocks: dict[str, _Block] = field(default_factory=dict[str, _Block])
    state: FileRecord | None = None


class Save:
    """One save into a folder.

    1. Every partition is frozen: calls that would write wait.
    2. The state of each is copied, and its calls go on.
    3. Its bytes are copied. What is cleared or replaced meanwhile is freed afterwards.

    Args:
        draft: where to.
        disk: the thread that writes.
        deadline: of the whole.
    """

    def __init__(
        self,
        core: ClientCore,
        draft: Draft,
        disk: Disk,
        deadline: Deadline,
    ) -> None:
        self._core = core
        self._draft = draft
        self._disk = disk
        self._deadline = deadline

    async def run(self) -> tuple[int, list[PartitionRecord]]:
        """Write all files but the manifest.

        Returns:
            The last sample id that was given out, and what was saved.

        Raises:
            CheckpointError: the disk refuses, or this process or Redis was held up for too long.
            DataLostError: bytes are gone; names blocks and partition.
            DeadlineError: it took longer than the deadline.
        """
        partitions: list[_Partition] = []
        try:
            async with Freeze(self._core.control) as freeze:
                start = time.monotonic()
                names = await freeze.all(self._deadline)
                for number, name in enumerate(names):
                    partitions.append(await self._copy_state(name, number))
                    await freeze.keep(name, self._deadline)
                _log.info("A save held up others for up to %.3f s", time.monotonic() - start)
                last = await self._core.control.last_sample(self._deadline)
                records: list[PartitionRecord] = []
                for partition in partitions:
                    records.append(await self._copy_blocks(partition))
                    await freeze.release(partition.name, self._deadline)
        except HoldLostError as error:
            raise CheckpointError(
                f"Partition {error} did not stand still: this process or Redis was held up for "
                f"more than {HOLD_S:g} s, or another server took over. Save again",
                path=str(self._draft.target),
                partition=str(error),
            ) from error
        finally:
            await self._free_kept([partition.name for partition in partitions])
        return last, records

    async def _free_kept(self, partitions: Sequence[str]) -> None:
        """Free what others cleared or replaced meanwhile."""
        deadline = Deadline(_FREE_S)
        try:
            for name in partitions:
                await self._core.free_kept(name, deadline)
        except TQError as error:
            _log.warning("Bytes that were cleared during a save are freed later: %s", error)

    async def _copy_state(self, name: str, number: int) -> _Partition:
        partition = _Partition(name, number)
        async with self._file(f"partition-{number:04d}.state") as file:
            async for suffix, kind, items in self._core.control.snapshot(name, self._deadline):
                self._check_deadline()
                if suffix == "":
                    partition.samples = int(_pairs(items)["samples"])
                elif suffix == "blocks":
                    partition.blocks |= {n: _block(text) for n, text in _pairs(items).items()}
                await self._write(file.page, suffix, kind, items)
            partition.state = await self._write(file.close)
        return partition

    async def _copy_blocks(self, partition: _Partition) -> PartitionRecord:
        # Blocks that are cleared while they are copied must not look like orphans.
        handles = [block.handle for block in partition.blocks.values()]
        await self._core.data.confirm(handles, self._deadline)
        async with self._file(f"partition-{partition.number:04d}.blocks") as file:

            def write(batch: Mapping[str, _Block], contents: Sequence[Content]) -> None:
                for number, (header, buffers) in zip(batch, contents, strict=True):
                    file.block(number, header, buffers)

            for batch in _batches(partition.blocks):
                self._check_deadline()
                contents = await self._contents(partition.name, batch.values())
                await self._write(write, batch, contents)
            data = await self._write(file.close)
        assert partition.state is not None
        return PartitionRecord(
            partition.name, partition.samples, len(partition.blocks), partition.state, data
        )

    async def _contents(self, partition: str, blocks: Iterable[_Block]) -> list[Content]:
        try:
            handles = [block.handle for block in blocks]
            return await self._core.data.read_blocks(handles, self._deadline)
        except DataLostError as error:
            raise DataLostError(
                f"Partition {partition!r} cannot be saved; clear the samples whose bytes are "
                f"gone: {error.message}",
                handles=error.handles,
                partition=partition,
            ) from error

    @asynccontextmanager
    async def _file(self, name: str) -> AsyncGenerator[Writer]:
        writer = Writer(self._draft.folder / name)
        try:
            await self._write(writer.open)
            yield writer
        finally:
            await self._disk.finish(writer.abandon)

    async def _write(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        with disk_errors(self._draft.target, "write"):
            return await self._disk.run(self._deadline, call, *args, **kwargs)

    def _check_deadline(self) -> None:
        if self._deadline.passed:
            raise DeadlineError(
                f"Saving took longer than its deadline of {self._deadline.seconds:g} s. Give it a "
                f"longer timeout",
                deadline=self._deadline.seconds,
            )


def _pairs(items: msgspec.Raw) -> dict[str, str]:
    flat = msgspec.msgpack.decode(items, type=list[str])
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _block(text: str) -> _Block:
    block = msgspec.json.decode(text)
    return _Block(block["handle"], block["bytes"])


def _batches(blocks: Mapping[str, _Block]) -> Iterator[dict[str, _Block]]:
    batch: dict[str, _Block] = {}
    nbytes = 0
    for number, block in blocks.items():
        if batch and (nbytes + block.nbytes > _BATCH_BYTES or len(batch) == _BATCH_BLOCKS):
            yield batch
            batch, nbytes = {}, 0
        batch[number] = block
        nbytes += block.nbytes
    if batch:
        yield batch
