"""The data plane on Ray: bytes in its object store, kept alive by one store actor per node.

Life of a block: the producer puts it into the object store of its node (one copy), and the store
actor of that node takes a view of it. A reader asks that actor for references, gets the block
(zero-copy on the same node, pulled once to another one) and copies the rows that it wants. When
the producer has died, Ray refuses its references; the reader then asks the store to put the block
again under its own name. The block is freed when the store has dropped it and the last view that
a reader holds is gone. Small blocks skip the object store: they go to the store through its door
(:mod:`tq_redis.data.ray_door`), or inside the actor's calls where that is shut.

References travel only inside Ray calls: one that is pickled anywhere else is never freed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray as untyped_ray
from ray.exceptions import ObjectLostError

from tq_redis.config import Config
from tq_redis.data.base import Column, Content, DataPlane, Run, WrittenBlock
from tq_redis.data.codec import EncodedBlock, StoredBlock, decoded, encode, encoded, is_light
from tq_redis.data.ray_door import Doors
from tq_redis.data.ray_stores import StoreGoneError, Stores, in_thread, running_instances
from tq_redis.deadline import Deadline
from tq_redis.errors import (
    DataLostError,
    DeadlineError,
    InputError,
    NotInitializedError,
    StoreFullError,
    shorten,
)

__all__ = ["RayDataPlane", "running_instances"]

ray: Any = untyped_ray  # its own types are partial

SMALL_BYTES = 64 << 10
"""Bytes that one put may send inside its call; Ray puts arguments over 100 KiB by itself."""

_SMALL = "s"
"""How names begin of blocks that were handed in whole; others are hexadecimal."""

_Entry = tuple[str, int, Any, Any]
"""Name, bytes, reference or None, block if there is no reference: what a store holds."""


class RayDataPlane(DataPlane):
    """One process's way to the stores of an instance."""

    def __init__(self, config: Config) -> None:
        if not ray.is_initialized():
            raise NotInitializedError(
                "This process has not joined Ray: call ray.init() first, or set data.backend=memory"
            )
        self._config = config
        self._node: str = ray.get_runtime_context().get_node_id()
        self._stores = Stores(config)
        self._doors = Doors(self._stores)

    async def start(self, deadline: Deadline) -> None:
        await self._stores.ask(
            self._node, lambda store: store.describe.remote(), deadline, create=True
        )

    async def put(
        self, partition: str, columns: Mapping[str, Column], deadline: Deadline
    ) -> list[WrittenBlock]:
        data = self._config.data

        def cut() -> list[EncodedBlock]:
            return encode(columns, block_bytes=data.block_bytes, allow_pickle=data.pickle)

        blocks = cut() if is_light(columns) else await in_thread(deadline, cut)
        return await self._write(partition, blocks, deadline)

    async def write_blocks(
        self, partition: str, contents: Sequence[Content], deadline: Deadline
    ) -> list[str]:
        written = await self._write(partition, list(map(encoded, contents)), deadline)
        return [block.handle for block in written]

    async def _write(
        self, partition: str, blocks: list[EncodedBlock], deadline: Deadline
    ) -> list[WrittenBlock]:
        if sum(block.nbytes for block in blocks) <= SMALL_BYTES:
            named = [(_SMALL + secrets.token_hex(8), block) for block in blocks]
            if await self._doors.hold(self._node, partition, named, deadline):
                return [self._written(block, name) for name, block in named]
        ready = await in_thread(deadline, lambda: _put_blocks(blocks))
        entries = [entry for _, entry in ready]
        full = await self._stores.ask(
            self._node,
            lambda store: store.hold.remote(partition, entries, _patience(deadline)),
            deadline,
            create=True,
        )
        written = [self._written(block, name) for block, (name, *_) in ready]
        if full is not None:
            used, capacity = full
            size = sum(block.nbytes for block in written)
            raise _full(size, used, capacity, partition, deadline)
        return written

    def _written(self, block: EncodedBlock, name: str) -> WrittenBlock:
        handle = f"{self._node}/{name}"
        return WrittenBlock(handle, block.fields, block.first_row, block.rows, block.nbytes)

    async def get(
        self, wanted: Mapping[str, Sequence[Run]], deadline: Deadline, *, copy: bool = True
    ) -> dict[str, Column]:
        handles = dict.fromkeys(run[0] for runs in wanted.values() for run in runs)
        blocks = await self._fetch(list(handles), deadline)
        return await decoded(wanted, blocks, copy=copy, allow_pickle=self._config.data.pickle)

    async def read_blocks(self, handles: Sequence[str], deadline: Deadline) -> list[Content]:
        blocks = await self._fetch(list(dict.fromkeys(handles)), deadline)
        return [blocks[handle].content for handle in handles]

    async def _fetch(self, handles: list[str], deadline: Deadline) -> dict[str, StoredBlock]:
        """The blocks, adopted by their stores where Ray cannot give the producer's object.

        Ray reports the death of a producer, or keeps waiting for it (seen when it dies while a
        pull runs). So the first try gets half of the time.
        """
        refs = await self._references(handles, "find", deadline)
        blocks = await _arrived(refs, deadline.remaining / 2)
        left = [handle for handle in handles if handle not in blocks]
        if left:
            refs = await self._references(left, "adopt", deadline)
            blocks |= await _arrived(refs, deadline.remaining)
            left = [handle for handle in left if handle not in blocks]
        if left and deadline.passed:
            raise DeadlineError(
                f"Blocks did not arrive within {deadline.seconds} s: {shorten(left)}",
                deadline=deadline.seconds,
            )
        if left:
            raise DataLostError(f"Blocks are lost: {shorten(left)}", handles=left)
        return blocks

    async def _references(
        self, handles: Sequence[str], how: str, deadline: Deadline
    ) -> dict[str, Any]:
        """Handle -> reference, from the stores' ``find`` or ``adopt``."""

        async def of_node(node: str, names: list[str]) -> dict[str, Any]:
            if how == "find" and all(name.startswith(_SMALL) for name in names):
                contents = await self._doors.find(node, names, deadline)
                if contents is not None:
                    return {f"{node}/{n}": c for n, c in zip(names, contents, strict=True)}
            try:
                refs = await self._stores.ask(
                    node, lambda store: getattr(store, how).remote(names), deadline
                )
            except StoreGoneError:
                refs = [None] * len(names)
            return {f"{node}/{name}": ref for name, ref in zip(names, refs, strict=True)}

        found: dict[str, Any] = {}
        for part in await asyncio.gather(*(of_node(*item) for item in _by_node(handles).items())):
            found |= part
        missing = [handle for handle in handles if found[handle] is None]
        if missing:
            raise DataLostError(
                f"Blocks are gone, or the stores that kept them: {shorten(missing)}",
                handles=missing,
            )
        return found

    async def delete(self, handles: Iterable[str], deadline: Deadline) -> None:
        await self._tell(handles, lambda store, names: store.drop.remote(names), deadline)

    async def confirm(self, handles: Iterable[str], deadline: Deadline) -> None:
        await self._tell(handles, lambda store, names: store.confirm.remote(names), deadline)

    async def _tell(
        self, handles: Iterable[str], call: Callable[[Any, list[str]], Any], deadline: Deadline
    ) -> None:
        """Call the stores of these handles; those that are gone have nothing to do."""

        async def node(node: str, names: list[str]) -> None:
            try:
                await self._stores.ask(node, lambda store: call(store, names), deadline)
            except StoreGoneError:
                return

        await asyncio.gather(*(node(*item) for item in _by_node(handles).items()))

    async def unconfirmed(self, older_than: float, deadline: Deadline) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for node in await self._stores.nodes(deadline):
            try:
                names = await self._stores.ask(
                    node, lambda store: store.unconfirmed.remote(older_than), deadline
                )
            except StoreGoneError:
                continue
            for partition, blocks in names.items():
                found.setdefault(partition, []).extend(f"{node}/{block}" for block in blocks)
        return found

    async def shutdown(self, deadline: Deadline) -> None:
        await self._stores.end_all(deadline)

    async def close(self) -> None:
        self._doors.close()
        self._stores.forget()


def _patience(deadline: Deadline) -> float:
    """Seconds that a store may wait for space, so that its answer still arrives in time."""
    return max(0.0, deadline.remaining - max(1.0, 0.1 * deadline.remaining))


def _full(
    nbytes: int, used: int, capacity: int, partition: str, deadline: Deadline
) -> StoreFullError | InputError:
    if nbytes > capacity:
        return InputError(
            f"A put of {nbytes} bytes is more than the store of this node may hold ({capacity}). "
            "Put fewer rows at once, or give Ray more object_store_memory",
            partition=partition,
        )
    return StoreFullError(
        f"The store of this node is full ({used} of {capacity} bytes), and nothing was freed "
        f"within the deadline of {deadline.seconds} s. Consume or clear, then retry",
        partition=partition,
        deadline=deadline.seconds,
    )


def _put_blocks(blocks: Iterable[EncodedBlock]) -> list[tuple[EncodedBlock, _Entry]]:
    room = SMALL_BYTES
    ready: list[tuple[EncodedBlock, _Entry]] = []
    for block in blocks:
        content = block.header, block.buffers
        if block.nbytes <= room:
            room -= block.nbytes
            ready.append((block, (_SMALL + secrets.token_hex(8), block.nbytes, None, content)))
        else:
            ready.append((block, (secrets.token_hex(8), block.nbytes, ray.put(content), None)))
    return ready


def _by_node(handles: Iterable[str]) -> dict[str, list[str]]:
    nodes: dict[str, list[str]] = {}
    for handle in handles:
        node, _, name = handle.partition("/")
        nodes.setdefault(node, []).append(name)
    return nodes


async def _arrived(found: Mapping[str, Any], wait_s: float) -> dict[str, StoredBlock]:
    """The blocks that a store sent or that arrive in time; the others are left out."""
    futures: dict[str, asyncio.Future[Any]] = {
        handle: asyncio.wrap_future(ref.future())
        for handle, ref in found.items()
        if isinstance(ref, ray.ObjectRef)
    }
    if futures:
        _, late = await asyncio.wait(futures.values(), timeout=wait_s)
        for future in late:
            future.cancel()
    blocks: dict[str, StoredBlock] = {}
    for handle, block in found.items():
        if handle not in futures:
            blocks[handle] = StoredBlock(*block)
        elif not _is_lost(futures[handle]):
            blocks[handle] = StoredBlock(*futures[handle].result())
    return blocks


def _is_lost(future: asyncio.Future[Any]) -> bool:
    """Whether the block is late, or Ray says that it is lost."""
    return (
        not future.done() or future.cancelled() or isinstance(future.exception(), ObjectLostError)
    )
