"""Loading: all is put beside what is there, and takes its place when it is complete."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tq_redis.checkpoint.disk import Disk
from tq_redis.checkpoint.files import disk_errors, read_blocks, read_pages
from tq_redis.checkpoint.manifest import Manifest, PartitionRecord
from tq_redis.checkpoint.restored import Restored, with_handle
from tq_redis.control.plane import ControlPlane
from tq_redis.data import DataPlane
from tq_redis.data.base import Content
from tq_redis.deadline import Deadline
from tq_redis.errors import CheckpointError, DeadlineError, TQError

_log = logging.getLogger(__name__)

# Blocks that are stored at a time.
_BATCH_BYTES = 32 << 20
_BATCH_BLOCKS = 64
# Staged keys live at least this long, and twice as long as the load may take.
_LIFETIME_S = 600
_UNDO_S = 10.0

T = TypeVar("T")
_Block = tuple[str, Content]


@dataclass
class _Staged:
    """A partition that is being loaded.

    Attributes:
        suffixes: the keys that were written, in order.
        pages: how many pages of them.
        handles: its blocks.
    """

    record: PartitionRecord
    pages: int = 0
    suffixes: dict[str, None] = field(default_factory=dict[str, None])
    handles: list[str] = field(default_factory=list[str])


class Load:
    """One load.

    Args:
        folder: of a checkpoint that was checked.
        disk: the thread that reads.
        deadline: of the whole.
    """

    def __init__(
        self,
        control: ControlPlane,
        data: DataPlane,
        folder: Path,
        disk: Disk,
        deadline: Deadline,
    ) -> None:
        self._control = control
        self._data = data
        self._folder = folder
        self._disk = disk
        self._deadline = deadline
        self._token = uuid.uuid4().hex
        self._lifetime_s = int(max(_LIFETIME_S, 2 * deadline.remaining))

    async def run(self, manifest: Manifest) -> dict[str, list[str]]:
        """Put the partitions of the checkpoint in place of those that are there.

        Returns:
            Partition -> generations whose blocks are to be freed.

        Raises:
            CheckpointError: only some of the partitions were replaced, or staged keys are gone.
        """
        staged: list[_Staged] = []
        trash: dict[str, list[str]] = {}
        try:
            last = await self._control.skip_samples(manifest.next_sample, self._deadline)
            for record in manifest.partitions:
                staged.append(_Staged(record))
                await self._stage(staged[-1], Restored(generation=last))
            for partition in staged:
                trash[partition.record.name] = await self._activate(partition)
        except BaseException as error:
            await self._undo([part for part in staged if part.record.name not in trash])
            if trash and isinstance(error, TQError):
                raise CheckpointError(
                    f"Only {len(trash)} of {len(staged)} partitions were replaced by those of "
                    f"{self._folder}; load it again: {error}",
                    path=str(self._folder),
                ) from error
            raise
        return trash

    async def _stage(self, staged: _Staged, restored: Restored) -> None:
        state = self._folder / staged.record.state.name
        records: dict[str, str] = {}
        async with self._read(read_pages(state)) as pages:
            async for page in pages:
                if page.suffix == "blocks":
                    records |= dict(zip(page.items[::2], page.items[1::2], strict=True))
        await self._stage_blocks(staged, records)
        async with self._read(read_pages(state)) as pages:
            async for page in pages:
                if page.suffix != "blocks":
                    await self._write(staged, page.suffix, page.type, restored.items(page))

    async def _stage_blocks(self, staged: _Staged, records: dict[str, str]) -> None:
        name, path = staged.record.name, self._folder / staged.record.data.name
        async with self._read(_in_batches(read_blocks(path))) as batches:
            async for batch in batches:
                numbers = [number for number, _ in batch]
                contents = [content for _, content in batch]
                handles = await self._data.write_blocks(name, contents, self._deadline)
                staged.handles += handles
                items = [
                    text
                    for number, handle in zip(numbers, handles, strict=True)
                    for text in (number, with_handle(records.pop(number), handle))
                ]
                await self._write(staged, "blocks", "hash", items, handles)
        if records:
            raise CheckpointError(f"{path} lacks blocks {sorted(records)[:8]}", path=str(path))

    async def _write(
        self, staged: _Staged, suffix: str, kind: str, items: list[str], handles: Sequence[str] = ()
    ) -> None:
        if self._deadline.passed:
            raise DeadlineError(
                f"Loading took longer than its deadline of {self._deadline.seconds:g} s. Give it a "
                f"longer timeout",
                deadline=self._deadline.seconds,
            )
        if items:
            staged.suffixes[suffix] = None
            staged.pages += 1
            there = await self._control.stage(
                staged.record.name,
                self._token,
                suffix,
                kind,
                items,
                self._lifetime_s,
                self._deadline,
                number=staged.pages,
                handles=handles,
            )
            if not there:
                raise self._gone(staged)

    @asynccontextmanager
    async def _read(self, parts: Generator[T]) -> AsyncGenerator[AsyncIterator[T]]:
        """What a generator gives, made in the thread of the disk."""

        async def results() -> AsyncIterator[T]:
            with disk_errors(self._folder, "read"):
                while (part := await self._disk.run(self._deadline, next, parts, None)) is not None:
                    yield part

        try:
            yield results()
        finally:
            await self._disk.finish(parts.close)

    async def _activate(self, staged: _Staged) -> list[str]:
        trash = await self._control.activate(
            staged.record.name, self._token, list(staged.suffixes), staged.pages, self._deadline
        )
        if trash is None:
            raise self._gone(staged)
        return trash

    def _gone(self, staged: _Staged) -> CheckpointError:
        return CheckpointError(
            f"Redis has lost keys of partition {staged.record.name!r} that were written for it: "
            f"loading took too long, or another server took over; load again",
            partition=staged.record.name,
            path=str(self._folder),
        )

    async def _undo(self, partitions: list[_Staged]) -> None:
        deadline = Deadline(_UNDO_S)
        try:
            for staged in partitions:
                name = staged.record.name
                # Without its keys it cannot take its place any more; but it may have.
                await self._control.unstage(name, self._token, list(staged.suffixes), deadline)
                used = await self._control.named_blocks(name, deadline)
                left = [handle for handle in staged.handles if handle not in used]
                await self._data.delete(left, deadline)
        except TQError as error:
            _log.warning("What a load had written is removed later: %s", error)


def _in_batches(blocks: Generator[_Block]) -> Generator[list[_Block]]:
    batch: list[_Block] = []
    nbytes = 0
    for number, content in blocks:
        batch.append((number, content))
        nbytes += sum(buffer.nbytes for buffer in content[1])
        if nbytes >= _BATCH_BYTES or len(batch) == _BATCH_BLOCKS:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
