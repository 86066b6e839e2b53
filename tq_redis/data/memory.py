"""Blocks in the memory of one process, for tests, examples and small runs."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence

import numpy as np

from tq_redis.config import Config
from tq_redis.data.base import Backend, Content, EncodedBlock, StoreUsage
from tq_redis.deadline import Deadline
from tq_redis.errors import DataLostError, shorten
from tq_redis.store.shelf import Block, Shelf

_shelves: dict[str, Shelf] = {}
"""By Redis namespace: all clients of one instance in this process share one."""

# Copying more than this is left to a thread: it takes a thread as long to come and go.
_LIGHT_BYTES = 1 << 20


class MemoryBackend(Backend):
    """A shelf of this process."""

    def __init__(self, config: Config) -> None:
        self._namespace = config.redis.namespace

    @property
    def _shelf(self) -> Shelf:
        return _shelves.setdefault(self._namespace, Shelf())

    async def start(self, deadline: Deadline) -> None:
        """Nothing to do: no other process can attach."""

    async def write(
        self, partition: str, blocks: Sequence[EncodedBlock], deadline: Deadline
    ) -> list[str]:
        light = sum(block.nbytes for block in blocks) <= _LIGHT_BYTES
        contents = _copies(blocks) if light else await asyncio.to_thread(_copies, blocks)
        handles = [f"memory/{secrets.token_hex(8)}" for _ in blocks]
        self._shelf.hold(
            [
                (handle, Block(partition, block.nbytes, content))
                for handle, block, content in zip(handles, blocks, contents, strict=True)
            ]
        )
        return handles

    async def read(self, handles: Sequence[str], deadline: Deadline) -> dict[str, Content]:
        blocks = dict(zip(handles, self._shelf.find(handles), strict=True))
        missing = [handle for handle, block in blocks.items() if block is None]
        if missing:
            raise DataLostError(f"Blocks are gone: {shorten(missing)}", handles=missing)
        return {handle: block.content for handle, block in blocks.items() if block is not None}

    async def delete(self, handles: Iterable[str], deadline: Deadline) -> None:
        self._shelf.drop(handles)

    async def unconfirmed(self, older_than: float, deadline: Deadline) -> dict[str, list[str]]:
        return self._shelf.unconfirmed(older_than)

    async def confirm(self, handles: Iterable[str], deadline: Deadline) -> None:
        self._shelf.confirm(handles)

    async def usage(self, deadline: Deadline) -> list[StoreUsage]:
        return [StoreUsage("memory", len(self._shelf), self._shelf.used, None)]

    async def shutdown(self, deadline: Deadline) -> None:
        _shelves.pop(self._namespace, None)

    async def close(self) -> None:
        """Nothing to let go of: the blocks belong to the process."""


def _copies(blocks: Sequence[EncodedBlock]) -> list[Content]:
    contents: list[Content] = []
    for block in blocks:
        private = [np.array(buffer) for buffer in block.buffers]
        for buffer in private:
            buffer.flags.writeable = False
        contents.append((block.header, private))
    return contents
