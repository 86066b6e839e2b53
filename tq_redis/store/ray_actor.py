"""The store: one detached actor per Ray node that keeps blocks alive.

An object in Ray's store dies with the process that put it. The store holds a zero-copy view of
every block that producers on its node put: the view keeps the memory, also after the producer's
death. It then puts the block again, as its own, for readers that ask (``adopt``).

Small blocks come and go whole instead, by the ZeroMQ server that every store has
(:mod:`tq_redis.store.server`), or inside the actor's calls where that cannot be reached.

The views pin their blocks, so Ray cannot spill them; the store therefore counts bytes and makes
producers wait before the node's object store is full.

This file imports no torch, so that a store starts in a second, not in four, and takes 135 MB.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray as untyped_ray

from tq_redis.store.server import Address, StoreServer
from tq_redis.store.shelf import Block, Shelf

ray: Any = untyped_ray  # its own types are partial
_FILL = 0.8
"""Share of the node's object store that blocks may take; the rest is for puts under way."""


class Store:
    """The actor. It knows blocks by the name that their producer gave them.

    Args:
        config: settings of the instance, as JSON.
        idle_ttl_s: end after this many seconds without a call.
        curve: encrypt what small blocks travel by.
    """

    def __init__(self, config: str, idle_ttl_s: float, curve: bool) -> None:
        self._config = config
        self._shelf = Shelf(int(_FILL * _object_store_bytes()))
        self._server = StoreServer(self._shelf, ray.util.get_node_ip_address(), curve=curve)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._room = asyncio.Condition()
        self._adopting = asyncio.Lock()
        self._last_call = time.monotonic()
        threading.Thread(target=self._end_when_idle, args=(idle_ttl_s,), daemon=True).start()

    def _end_when_idle(self, ttl_s: float) -> None:
        while True:
            last = max(self._last_call, self._server.last_call)
            left = last + ttl_s - time.monotonic()
            if left <= 0:
                break
            time.sleep(left)
        ray.kill(ray.get_runtime_context().current_actor)

    async def describe(self) -> str:
        """Settings of the instance, as JSON."""
        self._last_call = time.monotonic()
        return self._config

    async def address(self) -> Address:
        """Where small blocks are taken and given."""
        self._last_call = time.monotonic()
        return self._server.address

    async def hold(
        self, partition: str, blocks: Sequence[tuple[str, int, Any, Any]], wait_s: float
    ) -> tuple[int, int] | None:
        """Keep blocks, all or none. Safe to repeat.

        Args:
            blocks: (name, bytes, reference or None, block if there is no reference).
            wait_s: how long to wait for space, in seconds.

        Returns:
            None, or, when there was no space in that time or never can be, the bytes held and the
            bytes that may be held.
        """
        self._last_call = time.monotonic()
        known = self._shelf.find([block[0] for block in blocks])
        new = [block for block, held in zip(blocks, known, strict=True) if held is None]
        nbytes = sum(block[1] for block in new)
        if not self._shelf.can_ever_hold(nbytes) or not await self._reserve(nbytes, wait_s):
            return self._shelf.used, self._shelf.capacity or 0
        try:
            views = await asyncio.gather(*(_view(ref, block) for _, _, ref, block in new))
        except BaseException:
            self._shelf.give_back(nbytes)
            raise
        self._shelf.place(
            (name, Block(partition, size, view, ref))
            for (name, size, ref, _), view in zip(new, views, strict=True)
        )
        return None

    async def _reserve(self, nbytes: int, wait_s: float) -> bool:
        if self._shelf.reserve(nbytes):
            return True
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._shelf.on_room.append(self._tell_of_room)
        async with self._room:
            try:
                async with asyncio.timeout(wait_s):
                    await self._room.wait_for(lambda: self._shelf.reserve(nbytes))
            except TimeoutError:
                return False
        return True

    def _tell_of_room(self) -> None:
        """From any thread: whoever waits for room looks again."""

        async def notify() -> None:
            async with self._room:
                self._room.notify_all()

        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(notify(), self._loop)

    async def find(self, names: Sequence[str]) -> list[Any]:
        """References of blocks, small blocks themselves, None for those that are not here."""
        self._last_call = time.monotonic()
        held = self._shelf.find(names)
        return [block and (block.ref or block.content) for block in held]

    async def adopt(self, names: Sequence[str]) -> list[Any]:
        """Like ``find``, after putting the blocks again so that this actor owns them."""
        self._last_call = time.monotonic()
        async with self._adopting:
            for block in self._shelf.find(names):
                if block is not None and block.ref is not None and not block.adopted:
                    block.ref = await asyncio.to_thread(ray.put, block.content)
                    block.content = await _view(block.ref, None)
                    block.adopted = True
        return await self.find(names)

    async def drop(self, names: Sequence[str]) -> None:
        """Forget blocks; unknown names are ignored."""
        self._last_call = time.monotonic()
        self._shelf.drop(names)

    async def unconfirmed(self, older_than: float) -> dict[str, list[str]]:
        """Names held for more than ``older_than`` seconds and not confirmed, by partition."""
        self._last_call = time.monotonic()
        return self._shelf.unconfirmed(older_than)

    async def confirm(self, names: Sequence[str]) -> None:
        """Note that Redis names these blocks; unknown names are ignored."""
        self._last_call = time.monotonic()
        self._shelf.confirm(names)

    async def usage(self) -> tuple[int, int, int]:
        """Blocks, bytes that they take, bytes that they may take."""
        self._last_call = time.monotonic()
        return len(self._shelf), self._shelf.used, self._shelf.capacity or 0


async def _view(ref: Any | None, block: Any) -> Any:
    return block if ref is None else await ref


def _object_store_bytes() -> float:
    here = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == here)
    return node["Resources"]["object_store_memory"]
