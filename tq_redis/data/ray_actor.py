"""The store: one detached actor per Ray node that keeps blocks alive.

An object in Ray's store dies with the process that put it. The store holds a zero-copy view of
every block that producers on its node put: the view keeps the memory, also after the producer's
death. It then puts the block again, as its own, for readers that ask (``adopt``).

Small blocks come and go whole instead, and are the store's own from the start: by a door of their
own, a ZeroMQ socket for those who know its address and secret, or inside the actor's calls.

The views pin their blocks, so Ray cannot spill them; the store therefore counts bytes and makes
producers wait before the node's object store is full.

This file imports nothing of tq_redis: Ray ships it by value, so that a store starts without torch.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray as untyped_ray
import zmq
import zmq.asyncio

ray: Any = untyped_ray  # its own types are partial
_FILL = 0.8
"""Share of the node's object store that blocks may take; the rest is for puts under way."""


@dataclass(slots=True)
class _Held:
    """A block: the view keeps the bytes, the reference (none if small) lets readers find them."""

    ref: Any | None
    view: Any
    nbytes: int
    partition: str
    since: float
    adopted: bool = False
    confirmed: bool = False


class Store:
    """The actor. It knows blocks by the name that their producer gave them.

    Args:
        config: settings of the instance, as JSON.
        idle_ttl_s: end after this many seconds without a call.
    """

    def __init__(self, config: str, idle_ttl_s: float) -> None:
        self._config = config
        self._blocks: dict[str, _Held] = {}
        self._bytes = 0
        self._capacity = int(_FILL * _object_store_bytes())
        self._changed = asyncio.Condition()
        self._adopting = asyncio.Lock()
        self._door: Any = None
        self._address = ("", b"")
        self._serving: asyncio.Task[None] | None = None
        self._last_call = time.monotonic()
        threading.Thread(target=self._end_when_idle, args=(idle_ttl_s,), daemon=True).start()

    def _end_when_idle(self, ttl_s: float) -> None:
        while (left := self._last_call + ttl_s - time.monotonic()) > 0:
            time.sleep(left)
        ray.kill(ray.get_runtime_context().current_actor)

    async def describe(self) -> str:
        """Settings of the instance, as JSON."""
        self._last_call = time.monotonic()
        return self._config

    async def door(self) -> tuple[str, bytes]:
        """Where small blocks are taken and given: address and secret."""
        self._last_call = time.monotonic()
        if self._door is None:
            self._door = zmq.asyncio.Context().socket(zmq.ROUTER)
            self._door.setsockopt(zmq.IPV6, 1)
            host = ray.util.get_node_ip_address()
            host = f"[{host}]" if ":" in host else host
            port = self._door.bind_to_random_port(f"tcp://{host}")
            self._address = (f"tcp://{host}:{port}", secrets.token_bytes(16))
            self._serving = asyncio.create_task(self._serve())
        return self._address

    async def _serve(self) -> None:
        """Frames of a request: client, request, secret, verb, arguments. Others are no requests."""
        while True:
            client, *rest = await self._door.recv_multipart()
            if len(rest) < 3 or rest[1] != self._address[1]:
                continue
            self._last_call = time.monotonic()
            request, _, verb, *arguments = rest
            try:
                answer = self._take(arguments) if verb == b"hold" else self._give(arguments)
            except (LookupError, TypeError, ValueError):  # not what our clients send
                answer = [b"bad request"]
            await self._door.send_multipart([client, request, *answer])

    def _take(self, frames: list[bytes]) -> list[bytes]:
        """Frames: partition, then for each block name, header, dtypes, buffers."""
        partition, at = frames[0].decode(), 1
        new: dict[str, tuple[Any, int]] = {}
        while at < len(frames):
            name = frames[at].decode()
            content, at = next_block(frames, at + 1)
            if name not in self._blocks:
                new[name] = content, sum(buffer.nbytes for buffer in content[1])
        nbytes = sum(size for _, size in new.values())
        if self._bytes + nbytes > self._capacity:
            return [b"full"]
        self._bytes += nbytes
        now = time.monotonic()
        for name, (content, size) in new.items():
            self._blocks[name] = _Held(None, content, size, partition, now)
        return [b"held"]

    def _give(self, names: list[bytes]) -> list[bytes]:
        """For each block: header, dtypes, buffers; an empty header where there is none."""
        frames: list[bytes] = []
        for name in names:
            block = self._blocks.get(name.decode())
            frames += [b"", b""] if block is None else to_frames(*block.view)
        return frames

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
        blocks = [block for block in blocks if block[0] not in self._blocks]
        nbytes = sum(block[1] for block in blocks)
        if nbytes > self._capacity or not await self._reserve(nbytes, wait_s):
            return self._bytes, self._capacity
        try:
            views = await asyncio.gather(*(_view(ref, block) for _, _, ref, block in blocks))
        except BaseException:
            await self._give_back(nbytes)
            raise
        now = time.monotonic()
        twice = 0
        for (name, size, ref, _), view in zip(blocks, views, strict=True):
            twice += size if name in self._blocks else 0
            self._blocks[name] = _Held(ref, view, size, partition, now)
        await self._give_back(twice)
        return None

    async def _reserve(self, nbytes: int, wait_s: float) -> bool:
        async with self._changed:
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait_for(lambda: self._bytes + nbytes <= self._capacity)
            except TimeoutError:
                return False
            self._bytes += nbytes
            return True

    async def _give_back(self, nbytes: int) -> None:
        async with self._changed:
            self._bytes -= nbytes
            self._changed.notify_all()

    async def find(self, names: Sequence[str]) -> list[Any]:
        """References of blocks, small blocks themselves, None for those that are not here."""
        self._last_call = time.monotonic()
        held = [self._blocks.get(name) for name in names]
        return [block and (block.ref or block.view) for block in held]

    async def adopt(self, names: Sequence[str]) -> list[Any]:
        """Like ``find``, after putting the blocks again so that this actor owns them."""
        self._last_call = time.monotonic()
        async with self._adopting:
            for name in names:
                block = self._blocks.get(name)
                if block is not None and block.ref is not None and not block.adopted:
                    block.ref = await asyncio.to_thread(ray.put, block.view)
                    block.view = await _view(block.ref, None)
                    block.adopted = True
        return await self.find(names)

    async def drop(self, names: Sequence[str]) -> None:
        """Forget blocks; unknown names are ignored."""
        self._last_call = time.monotonic()
        dropped = [self._blocks.pop(name, None) for name in names]
        await self._give_back(sum(block.nbytes for block in dropped if block is not None))

    async def unconfirmed(self, older_than: float) -> dict[str, list[str]]:
        """Names held for more than ``older_than`` seconds and not confirmed, by partition."""
        self._last_call = time.monotonic()
        before = time.monotonic() - older_than
        found: dict[str, list[str]] = {}
        for name, block in self._blocks.items():
            if not block.confirmed and block.since < before:
                found.setdefault(block.partition, []).append(name)
        return found

    async def confirm(self, names: Sequence[str]) -> None:
        """Note that Redis names these blocks; unknown names are ignored."""
        self._last_call = time.monotonic()
        for name in names:
            if name in self._blocks:
                self._blocks[name].confirmed = True


def to_frames(header: bytes, buffers: Sequence[Any]) -> list[bytes]:
    """A block as parts of a message: header, names of dtypes, buffers."""
    dtypes = " ".join(buffer.dtype.str for buffer in buffers)
    return [header, dtypes.encode(), *(buffer.tobytes() for buffer in buffers)]


def next_block(frames: Sequence[bytes], at: int) -> tuple[tuple[bytes, list[Any]], int]:
    """Inverse of :func:`to_frames`: the block that begins here, and where the next one does."""
    header, dtypes = frames[at], frames[at + 1].decode().split()
    end = at + 2 + len(dtypes)
    parts = zip(frames[at + 2 : end], dtypes, strict=True)
    return (header, [np.frombuffer(part, dtype) for part, dtype in parts]), end


async def _view(ref: Any | None, block: Any) -> Any:
    return block if ref is None else await ref


def _object_store_bytes() -> float:
    here = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == here)
    return node["Resources"]["object_store_memory"]
