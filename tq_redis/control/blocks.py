"""Which blocks are named, and which wait for their bytes to be freed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from tq_redis.control.namespace import Namespace
from tq_redis.deadline import Deadline

# Elements that one command looks at.
_PAGE = 1000


class Kept(NamedTuple):
    """How much of something a store keeps.

    Attributes:
        blocks: how many.
        nbytes: bytes that they take.
    """

    blocks: int
    nbytes: int


class BlockLists(Namespace):
    """Lists of blocks. They may be long, so they are read and written in pages."""

    async def named_blocks(self, partition: str, deadline: Deadline) -> set[str]:
        """Handles that the partition's rows use."""
        return set(await self._handles(self.keys.blocks(partition), deadline))

    async def kept(self, partition: str, deadline: Deadline) -> dict[str, Kept]:
        """What each store keeps for the partition's rows, by the store's name."""
        found: dict[str, Kept] = {}
        records = await self._scan("HSCAN", self.keys.blocks(partition), deadline)
        for record in map(msgspec.json.decode, records.values()):
            store = record["handle"].rpartition("/")[0]
            so_far = found.get(store, Kept(0, 0))
            found[store] = Kept(so_far.blocks + 1, so_far.nbytes + record["bytes"])
        return found

    async def loading_blocks(self, partition: str, deadline: Deadline) -> set[str]:
        """Handles that a checkpoint which is being loaded uses."""
        found = await self._scan("SSCAN", self.keys.loading(partition), deadline)
        return {handle.decode() for handle in found}

    async def freed(self, partition: str, deadline: Deadline) -> list[str]:
        """Handles of blocks whose bytes are to be freed."""
        found = await self._scan("ZSCAN", self.keys.freed(partition), deadline)
        return [handle.decode() for handle in found]

    async def trashes(self, partition: str, deadline: Deadline) -> list[str]:
        """Generations of the partition that were cleared and whose bytes are to be freed."""
        key = self.keys.trashes(partition)
        found = await self.connection.command("SMEMBERS", key, deadline=deadline)
        return [generation.decode() for generation in found]

    async def forget_freed(
        self, partition: str, handles: Sequence[str], deadline: Deadline
    ) -> None:
        """Note that the bytes of these blocks were freed."""
        key = self.keys.freed(partition)
        for first in range(0, len(handles), _PAGE):
            page = handles[first : first + _PAGE]
            await self.connection.command("ZREM", key, *page, deadline=deadline)

    async def trash(self, partition: str, generation: str, deadline: Deadline) -> list[str]:
        """Handles of the blocks that a cleared partition left behind."""
        used = await self._handles(self.keys.trash(partition, generation), deadline)
        freed = await self._scan("ZSCAN", self.keys.trash_freed(partition, generation), deadline)
        return used + [handle.decode() for handle in freed]

    async def empty_trash(self, partition: str, generation: str, deadline: Deadline) -> None:
        """Note that the blocks of a cleared partition were freed."""
        lists = self.keys.trash(partition, generation), self.keys.trash_freed(partition, generation)
        await self.connection.commands(
            ("UNLINK", *lists),
            ("SREM", self.keys.trashes(partition), generation),
            deadline=deadline,
        )

    async def _handles(self, key: str, deadline: Deadline) -> list[str]:
        records = await self._scan("HSCAN", key, deadline)
        return [msgspec.json.decode(record)["handle"] for record in records.values()]

    async def _scan(
        self, command: Literal["HSCAN", "SSCAN", "ZSCAN"], key: str, deadline: Deadline
    ) -> dict[bytes, Any]:
        """A hash, the scores of a sorted set, or the members of a set with nothing each. Has all
        that was there throughout."""
        found: dict[bytes, Any] = {}
        cursor = -1
        while cursor:
            cursor, page = await self.connection.command(
                command, key, max(cursor, 0), "COUNT", _PAGE, deadline=deadline
            )
            found.update(dict.fromkeys(page) if command == "SSCAN" else page)
        return found
