"""The store: one detached actor per Ray node that keeps blocks alive.

An object in Ray's store dies with the process that put it. The store holds a zero-copy view of
every block that producers on its node put: the view keeps the memory, also after the producer's
death. It then puts the block again, as its own, for readers that ask (``adopt``).

Small blocks come and go whole instead, by the server that every store has
(:mod:`tq_redis.store.server`), or inside the actor's calls where that cannot be reached.

The views pin their blocks, so Ray cannot spill them; the store therefore counts bytes and makes
producers wait before the node's object store is full: they ask its server for room first.

Its methods run in threads: Ray's calls of a coroutine take a millisecond more.

This file imports no torch, so that a store starts in a second, not in four, and takes 135 MB.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray as untyped_ray

from tq_redis.store.server import Address, StoreServer
from tq_redis.store.shelf import Block, Content, Shelf

ray: Any = untyped_ray  # its own types are partial
_FILL = 0.8
"""Share of the node's object store that blocks may take; the rest is for Ray's other objects, and
for puts that found no server to ask for room."""

CALLS = 64
"""Threads of the actor. A call that waits for the object of a producer that hangs has one."""


class Entry(NamedTuple):
    """A block on its way to the store.

    Attributes:
        name: chosen by the producer.
        nbytes: of its rows.
        ref: where it lies in Ray's object store, or None.
        content: the block itself if it has no reference.
    """

    name: str
    nbytes: int
    ref: Any | None
    content: Content | None


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
        self._server = StoreServer(
            self._shelf, ray.util.get_node_ip_address(), curve=curve, local=True
        )
        self._adopting = threading.Lock()
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

    def describe(self) -> str:
        """Settings of the instance, as JSON."""
        self._last_call = time.monotonic()
        return self._config

    def address(self) -> Address:
        """Where small blocks are taken and given, and room is asked for."""
        self._last_call = time.monotonic()
        return self._server.address

    def hold(
        self, partition: str, blocks: Sequence[Entry], room: str, wait_s: float
    ) -> tuple[int, int] | None:
        """Keep blocks, all or none. Safe to repeat.

        Args:
            room: the name that room for them was reserved under, if any was.
            wait_s: how long to wait for the producer's objects, in seconds.

        Returns:
            None, or, when there is no space now, the bytes held and the bytes that may be held.

        Raises:
            GetTimeoutError: the objects did not come.
        """
        self._last_call = time.monotonic()
        refs = [block.ref for block in blocks if block.ref is not None]
        views = iter(ray.get(refs, timeout=wait_s))
        kept = self._server.place(
            [
                (name, Block(partition, size, next(views) if content is None else content, ref))
                for name, size, ref, content in blocks
            ],
            room,
        )
        return None if kept else (self._shelf.used, self._shelf.capacity or 0)

    def find(self, names: Sequence[str]) -> list[Any]:
        """References of blocks, small blocks themselves, None for those that are not here."""
        self._last_call = time.monotonic()
        held = self._shelf.find(names)
        return [block and (block.ref or block.content) for block in held]

    def adopt(self, names: Sequence[str]) -> list[Any]:
        """Like ``find``, after putting the blocks again so that this actor owns them."""
        self._last_call = time.monotonic()
        with self._adopting:
            for block in self._shelf.find(names):
                if block is not None and block.ref is not None and not block.adopted:
                    block.ref = ray.put(block.content)
                    block.content = ray.get(block.ref)
                    block.adopted = True
        return self.find(names)

    def drop(self, names: Sequence[str]) -> None:
        """Forget blocks; unknown names are ignored."""
        self._last_call = time.monotonic()
        self._shelf.drop(names)

    def unconfirmed(self, older_than: float) -> dict[str, list[str]]:
        """Names held for more than ``older_than`` seconds and not confirmed, by partition."""
        self._last_call = time.monotonic()
        return self._shelf.unconfirmed(older_than)

    def confirm(self, names: Sequence[str]) -> None:
        """Note that Redis names these blocks; unknown names are ignored."""
        self._last_call = time.monotonic()
        self._shelf.confirm(names)

    def usage(self) -> tuple[int, int, int]:
        """Blocks, bytes that they take, bytes that they may take."""
        self._last_call = time.monotonic()
        return len(self._shelf), self._shelf.used, self._shelf.capacity or 0


def _object_store_bytes() -> float:
    here = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == here)
    return node["Resources"]["object_store_memory"]
