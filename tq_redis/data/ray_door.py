"""The short way to a store: small blocks in messages instead of calls of the actor.

They go by a Unix socket on the store's own host, and by ZeroMQ from others. A put of eight rows
took 2.7 ms of CPU in the client and 1.4 in the store with a call of the async actor, and 1.4 and
0.3 with a message of ZeroMQ. Who gets no answer takes the long way, whose errors say what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tq_redis.data.base import Content, EncodedBlock
from tq_redis.data.ray_stores import StoreGoneError, Stores
from tq_redis.deadline import Deadline
from tq_redis.store import messages as m
from tq_redis.store.connection import Answer, StoreConnection
from tq_redis.store.local_connection import LocalConnection
from tq_redis.store.zmq_connection import ZmqConnection

_ANSWER_S = 1.0
"""A store answers in a fraction of a millisecond; after this long, its actor is asked instead."""
_KEEP_S = 30.0
"""So long a store keeps room for the next block of a producer, which may have died."""
_SHUT_S = 30.0
"""So long a door is left alone that did not answer: the store died, or a firewall is between."""


class Doors:
    """The doors of the stores that this process uses, opened when they are needed."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._open: dict[str, StoreConnection] = {}
        self._shut: dict[str, Deadline] = {}

    def close(self) -> None:
        """Let go of all connections."""
        for door in self._open.values():
            door.close()
        self._open.clear()

    async def hold(
        self,
        node: str,
        partition: str,
        blocks: Sequence[tuple[str, EncodedBlock]],
        deadline: Deadline,
    ) -> bool:
        """Hand small blocks to the store of a node, which is made where there is none; False if
        it did not answer or has no room now: the actor can be asked, and can wait.

        Raises:
            DeadlineError: the store cannot be reached at all.
        """
        parcels, buffers = m.pack(block.content for _, block in blocks)
        request = m.Hold(partition, [name for name, _ in blocks], parcels)
        answer = await self._ask(node, request, buffers, deadline, create=True)
        return answer is not None and isinstance(answer[0], m.Done)

    async def reserve(
        self, node: str, name: str, nbytes: int, wait_s: float, deadline: Deadline
    ) -> m.Full | None:
        """Wait for room in the store of a node, for blocks of which the first has this name. It is
        kept while they come one after the other.

        Returns:
            What the store says if there was no room in time. None also if it did not answer: it may
            have room.

        Raises:
            DeadlineError: the store cannot be reached at all.
        """
        request = m.Reserve(name, nbytes, wait_s, _KEEP_S)
        answer = await self._ask(
            node, request, (), deadline, create=True, answer_s=wait_s + _ANSWER_S
        )
        return answer[0] if answer is not None and isinstance(answer[0], m.Full) else None

    async def find(
        self, node: str, names: Sequence[str], deadline: Deadline
    ) -> list[Content | None] | None:
        """Small blocks from the store of a node; None if it did not answer.

        Raises:
            DeadlineError: the store cannot be reached at all.
        """
        answer = await self._ask(node, m.Find(list(names)), (), deadline)
        if answer is None or not isinstance(answer[0], m.Found):
            return None
        return m.unpack(answer[0].parcels, answer[1])

    async def drop(self, node: str, names: Sequence[str], deadline: Deadline) -> bool:
        """Free blocks; False if the store did not answer.

        Raises:
            DeadlineError: the store cannot be reached at all.
        """
        return await self._ask(node, m.Drop(list(names)), (), deadline) is not None

    async def confirm(self, node: str, names: Sequence[str], deadline: Deadline) -> bool:
        """Note that Redis names blocks; False if the store did not answer.

        Raises:
            DeadlineError: the store cannot be reached at all.
        """
        return await self._ask(node, m.Confirm(list(names)), (), deadline) is not None

    async def _ask(
        self,
        node: str,
        request: m.Request,
        buffers: Sequence[Any],
        deadline: Deadline,
        *,
        create: bool = False,
        answer_s: float | None = None,
    ) -> Answer | None:
        if node in self._shut and not self._shut[node].passed:
            return None
        door = self._open.get(node)
        if door is None:
            try:
                address = await self._stores.ask(
                    node, lambda store: store.address.remote(), deadline, create=create
                )
            except StoreGoneError:
                return None
            opened = await LocalConnection.open(address) or ZmqConnection(address)
            door = self._open.setdefault(node, opened)
            if door is not opened:  # another call was faster
                opened.close()
        try:
            if answer_s is None:
                answer_s = min(_ANSWER_S, deadline.remaining / 2)
            return await door.ask(request, buffers, wait_s=answer_s)
        except (TimeoutError, ConnectionError):
            self._shut[node] = Deadline(_SHUT_S)
            if self._open.get(node) is door:
                del self._open[node]
                door.close()
            return None
