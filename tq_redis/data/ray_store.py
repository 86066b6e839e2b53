"""Blocks in Ray's object store, kept alive by one store actor per node.

Life of a block: the producer asks the store actor of its node for room and puts the block into the
object store of that node (one copy); the actor takes a view of it while the next block is put. A
reader asks that actor for references, gets the block (zero-copy on the same node, pulled once to
another one) and copies the rows that it wants. When the producer has died, Ray refuses its
references; the reader then asks the store to put the block again under its own name. The block is
freed when the store has dropped it and the last view that a reader holds is gone. Small blocks skip
the object store: they go to the store through its door (:mod:`tq_redis.data.ray_door`), or inside
the actor's calls where that is shut.

References travel only inside Ray calls: one that is pickled anywhere else is never freed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray as untyped_ray
from ray.exceptions import ObjectLostError

from tq_redis.config import Config
from tq_redis.data.base import (
    Backend,
    Column,
    Content,
    EncodedBlock,
    Parser,
    StoreUsage,
    WrittenBlock,
)
from tq_redis.data.calls import to_the_end, together
from tq_redis.data.ray_door import Doors
from tq_redis.data.ray_parse import parse_and_write
from tq_redis.data.ray_stores import StoreGoneError, Stores, ray_call, running_instances
from tq_redis.deadline import Deadline
from tq_redis.errors import (
    DataLostError,
    DeadlineError,
    InputError,
    NotInitializedError,
    StoreFullError,
    TQError,
    shorten,
)
from tq_redis.store.ray_actor import Entry

__all__ = ["RayBackend", "running_instances"]

ray: Any = untyped_ray  # its own types are partial

DOOR_BYTES = 1 << 20
"""Bytes that one put may hand to the store in a message, which keeps them in its own memory. A put
and a get of 1 MiB took 4.6 and 2.9 ms so, and 11.6 and 5.8 through the object store. From about 8
MiB on that is faster, and all readers of a node share one copy."""

SMALL_BYTES = 64 << 10
"""Bytes that one put may send inside its call of the actor, where the store did not answer the
message; Ray puts arguments over 100 KiB by itself."""

_SMALL = "s"
"""How names begin of blocks that were handed in whole; others are hexadecimal."""

# For undoing a put that failed half way.
_UNDO_S = 5.0


class RayBackend(Backend):
    """One process's way to the stores of an instance.

    Raises:
        NotInitializedError: this process has not joined Ray.
    """

    def __init__(self, config: Config) -> None:
        if not ray.is_initialized():
            raise NotInitializedError(
                "This process has not joined Ray: call ray.init() first, or set data.backend to "
                "zmq (storage units) or memory"
            )
        self._config = config
        self._node: str = ray.get_runtime_context().get_node_id()
        self._stores = Stores(config)
        self._doors = Doors(self._stores)

    async def start(self, deadline: Deadline) -> None:
        await self._stores.ask(
            self._node, lambda store: store.describe.remote(), deadline, create=True
        )

    async def write(
        self, partition: str, blocks: Sequence[EncodedBlock], deadline: Deadline
    ) -> list[str]:
        nbytes = sum(block.nbytes for block in blocks)
        if nbytes <= DOOR_BYTES:
            named = [(_SMALL + secrets.token_hex(8), block) for block in blocks]
            if await self._doors.hold(self._node, partition, named, deadline):
                return [self._handle(name) for name, _ in named]
        names = _names(blocks)
        try:
            await self._reserve(partition, names[0], nbytes, deadline)
            await self._put_and_hold(partition, names, blocks, deadline)
        except BaseException:
            with suppress(TQError):  # what stays is swept later
                await self.delete(map(self._handle, names), Deadline(_UNDO_S))
            raise
        return [self._handle(name) for name in names]

    async def _reserve(self, partition: str, room: str, nbytes: int, deadline: Deadline) -> None:
        patience = _patience(deadline)
        full = await self._doors.reserve(self._node, room, nbytes, patience, deadline)
        if full is not None:
            raise _full(nbytes, full.used, full.capacity, partition, deadline)

    async def _put_and_hold(
        self,
        partition: str,
        names: Sequence[str],
        blocks: Sequence[EncodedBlock],
        deadline: Deadline,
    ) -> None:
        """Put one block after the other; meanwhile the store takes a view of those before."""
        small: list[Entry] = []
        holding: list[asyncio.Future[None]] = []

        def hold(entries: Sequence[Entry]) -> None:
            call = self._hold(partition, entries, names[0], deadline)
            holding.append(asyncio.ensure_future(call))

        try:
            for name, block in zip(names, blocks, strict=True):
                if name.startswith(_SMALL):
                    small.append(Entry(name, block.nbytes, None, block.content))
                else:
                    ref = await ray_call(deadline, ray.put, block.content)
                    hold([Entry(name, block.nbytes, ref, None)])
            if small:
                hold(small)
        except BaseException:
            for call in holding:
                call.cancel()
            await asyncio.gather(*holding, return_exceptions=True)
            raise
        await together(holding)

    async def _hold(
        self, partition: str, entries: Sequence[Entry], room: str, deadline: Deadline
    ) -> None:
        full = await self._stores.ask(
            self._node,
            lambda store: store.hold.remote(partition, entries, room, _patience(deadline)),
            deadline,
            create=True,
        )
        if full is not None:
            nbytes = sum(entry.nbytes for entry in entries)
            used, capacity = full
            raise _full(nbytes, used, capacity, partition, deadline)

    def _handle(self, name: str) -> str:
        return f"ray/{self._node}/{name}"

    async def parse(
        self,
        partition: str,
        columns: Mapping[str, Column],
        parser: Parser | str,
        deadline: Deadline,
    ) -> list[WrittenBlock] | None:
        if isinstance(parser, str):
            return None
        return await parse_and_write(self._config, partition, columns, parser, deadline)

    async def read(self, handles: Sequence[str], deadline: Deadline) -> dict[str, Content]:
        """The blocks, adopted by their stores where Ray cannot give the producer's object.

        Ray reports the death of a producer, or keeps waiting for it (seen when it dies while a
        pull runs). So the first try gets half of the time.
        """
        refs = await self._references(handles, "find", deadline)
        blocks, _ = await _arrived(refs, deadline.remaining / 2)
        left = [handle for handle in handles if handle not in blocks]
        if left:
            refs = await self._references(left, "adopt", deadline)
            adopted, lost = await _arrived(refs, deadline.remaining)
            blocks |= adopted
            if lost:
                raise DataLostError(f"Ray has lost blocks: {shorten(lost)}", handles=lost)
            late = [handle for handle in left if handle not in adopted]
            if late:  # they may come yet: nothing is given up
                raise DeadlineError(
                    f"Blocks did not arrive within {deadline.seconds:g} s: {shorten(late)}",
                    deadline=deadline.seconds,
                )
        return blocks

    async def _references(
        self, handles: Sequence[str], how: str, deadline: Deadline
    ) -> dict[str, Any]:
        """Handle -> reference, from the stores' ``find`` or ``adopt``."""

        async def of_node(node: str, names: list[str]) -> dict[str, Any]:
            if how == "find" and all(name.startswith(_SMALL) for name in names):
                contents = await self._doors.find(node, names, deadline)
                if contents is not None:
                    return {f"ray/{node}/{n}": c for n, c in zip(names, contents, strict=True)}
            try:
                refs = await self._stores.ask(
                    node, lambda store: getattr(store, how).remote(names), deadline
                )
            except StoreGoneError:
                refs = [None] * len(names)
            return {f"ray/{node}/{name}": ref for name, ref in zip(names, refs, strict=True)}

        found: dict[str, Any] = {}
        for part in await together(of_node(*item) for item in _by_node(handles).items()):
            found |= part
        missing = [handle for handle in handles if found[handle] is None]
        if missing:
            raise DataLostError(
                f"Blocks are gone, or the stores that kept them: {shorten(missing)}",
                handles=missing,
            )
        return found

    async def delete(self, handles: Iterable[str], deadline: Deadline) -> None:
        async def drop(node: str, names: list[str]) -> None:
            if not await self._doors.drop(node, names, deadline):
                await self._tell(node, lambda store: store.drop.remote(names), deadline)

        await to_the_end(drop(*item) for item in _by_node(handles).items())

    async def confirm(self, handles: Iterable[str], deadline: Deadline) -> None:
        async def confirm(node: str, names: list[str]) -> None:
            if not await self._doors.confirm(node, names, deadline):
                await self._tell(node, lambda store: store.confirm.remote(names), deadline)

        await together(confirm(*item) for item in _by_node(handles).items())

    async def _tell(self, node: str, call: Callable[[Any], Any], deadline: Deadline) -> None:
        """Call the store of a node; one that is gone has nothing to do."""
        with suppress(StoreGoneError):
            await self._stores.ask(node, call, deadline)

    async def usage(self, deadline: Deadline) -> list[StoreUsage]:
        found: list[StoreUsage] = []
        for node in await self._stores.nodes(deadline):
            with suppress(StoreGoneError):
                usage = await self._stores.ask(node, lambda store: store.usage.remote(), deadline)
                found.append(StoreUsage(f"ray/{node}", *usage))
        return found

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
                found.setdefault(partition, []).extend(f"ray/{node}/{b}" for b in blocks)
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


def _names(blocks: Iterable[EncodedBlock]) -> list[str]:
    """New names, which say of the first few small blocks that they go in a call's arguments."""
    room = SMALL_BYTES
    names: list[str] = []
    for block in blocks:
        small = block.nbytes <= room
        room -= block.nbytes if small else 0
        names.append((_SMALL if small else "") + secrets.token_hex(8))
    return names


def _by_node(handles: Iterable[str]) -> dict[str, list[str]]:
    nodes: dict[str, list[str]] = {}
    for handle in handles:
        node, _, name = handle.removeprefix("ray/").partition("/")
        nodes.setdefault(node, []).append(name)
    return nodes


async def _arrived(found: Mapping[str, Any], wait_s: float) -> tuple[dict[str, Content], list[str]]:
    """The blocks that a store sent or that arrive in time, and those that Ray says are lost."""
    blocks: dict[str, Content] = {}
    lost: list[str] = []
    futures: dict[asyncio.Future[Any], str] = {}
    for handle, block in found.items():
        if isinstance(block, ray.ObjectRef):
            futures[asyncio.wrap_future(block.future())] = handle
        else:
            blocks[handle] = block
    if futures:
        done, late = await asyncio.wait(futures, timeout=wait_s)
        for future in late:
            future.cancel()
        for future in done:
            if isinstance(future.exception(), ObjectLostError):
                lost.append(futures[future])
            else:
                blocks[futures[future]] = future.result()
    return blocks, lost
