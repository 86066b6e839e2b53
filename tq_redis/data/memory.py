"""The data plane of one process: blocks in its own memory, for tests, examples and small runs."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tq_redis.config import Config
from tq_redis.data.base import Column, Content, DataPlane, Run, WrittenBlock
from tq_redis.data.codec import EncodedBlock, StoredBlock, decoded, encode, encoded, is_light
from tq_redis.deadline import Deadline
from tq_redis.errors import DataLostError, shorten


@dataclass(slots=True)
class _Held:
    block: StoredBlock
    partition: str
    since: float
    confirmed: bool = False


_stores: dict[str, dict[str, _Held]] = {}
"""Redis namespace -> handle -> block: all clients of one instance in this process share them."""


class MemoryDataPlane(DataPlane):
    """Blocks in a dictionary of this process."""

    def __init__(self, config: Config) -> None:
        self._config = config

    @property
    def _blocks(self) -> dict[str, _Held]:
        return _stores.setdefault(self._config.redis.namespace, {})

    async def start(self, deadline: Deadline) -> None:
        """Nothing to do: no other process can attach."""

    async def put(
        self, partition: str, columns: Mapping[str, Column], deadline: Deadline
    ) -> list[WrittenBlock]:
        if is_light(columns):
            return self._put(partition, columns)
        return await asyncio.to_thread(self._put, partition, columns)

    def _put(self, partition: str, columns: Mapping[str, Column]) -> list[WrittenBlock]:
        data = self._config.data
        encoded = encode(columns, block_bytes=data.block_bytes, allow_pickle=data.pickle)
        return [self._hold(partition, block) for block in encoded]

    def _hold(self, partition: str, block: EncodedBlock) -> WrittenBlock:
        handle = f"memory/{secrets.token_hex(8)}"
        private = [np.array(buffer) for buffer in block.buffers]
        for buffer in private:
            buffer.flags.writeable = False
        stored = StoredBlock(block.header, private)
        self._blocks[handle] = _Held(stored, partition, time.monotonic())
        return WrittenBlock(handle, block.fields, block.first_row, block.rows, block.nbytes)

    async def get(
        self, wanted: Mapping[str, Sequence[Run]], deadline: Deadline, *, copy: bool = True
    ) -> dict[str, Column]:
        blocks = self._found(run[0] for runs in wanted.values() for run in runs)
        return await decoded(wanted, blocks, copy=copy, allow_pickle=self._config.data.pickle)

    async def read_blocks(self, handles: Sequence[str], deadline: Deadline) -> list[Content]:
        blocks = self._found(handles)
        return [blocks[handle].content for handle in handles]

    async def write_blocks(
        self, partition: str, contents: Sequence[Content], deadline: Deadline
    ) -> list[str]:
        def write() -> list[str]:
            return [self._hold(partition, encoded(content)).handle for content in contents]

        return await asyncio.to_thread(write)

    def _found(self, handles: Iterable[str]) -> dict[str, StoredBlock]:
        blocks: dict[str, StoredBlock] = {}
        missing: list[str] = []
        for handle in dict.fromkeys(handles):
            held = self._blocks.get(handle)
            if held is None:
                missing.append(handle)
            else:
                blocks[handle] = held.block
        if missing:
            raise DataLostError(f"Blocks are gone: {shorten(missing)}", handles=missing)
        return blocks

    async def delete(self, handles: Iterable[str], deadline: Deadline) -> None:
        for handle in handles:
            self._blocks.pop(handle, None)

    async def unconfirmed(self, older_than: float, deadline: Deadline) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        before = time.monotonic() - older_than
        for handle, held in list(self._blocks.items()):  # puts run in threads
            if not held.confirmed and held.since < before:
                found.setdefault(held.partition, []).append(handle)
        return found

    async def confirm(self, handles: Iterable[str], deadline: Deadline) -> None:
        for handle in handles:
            held = self._blocks.get(handle)
            if held is not None:
                held.confirmed = True

    async def shutdown(self, deadline: Deadline) -> None:
        _stores.pop(self._config.redis.namespace, None)

    async def close(self) -> None:
        """Nothing to let go of: the blocks belong to the process."""
