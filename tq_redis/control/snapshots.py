"""Partitions as a whole: held still, read, and put in the place of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

import msgspec

from tq_redis.control.connection import RedisConnection
from tq_redis.control.namespace import Namespace
from tq_redis.control.replies import ActivateReply, Reply, SnapshotReply
from tq_redis.deadline import Deadline

Level = Literal["all", "keep", "none"]
"""During a save: no verb writes; all do, but no bytes are freed; the save is done with it."""

# Entries that one script reads: a few milliseconds of Redis's only thread.
_ENTRIES_PER_PAGE = 4000
# Ids that a load skips: more than an earlier run can have given out after it saved.
_SKIPPED_IDS = 1_000_000_000


class Snapshots(Namespace):
    """What saving and loading need."""

    # Saving

    async def freeze(
        self,
        partition: str,
        save: str,
        level: Level,
        hold_s: float,
        deadline: Deadline,
        *,
        first: bool = False,
    ) -> Reply:
        """Hold a partition still for a save, or let it go on.

        Args:
            save: a name that no other save has.
            hold_s: seconds after which the hold ends by itself.
            first: the save does not hold it yet.
        """
        arguments = {
            "by": save,
            "level": level,
            "hold": 0 if level == "none" else int(1000 * hold_s),
            "first": first,
        }
        return await self._run("freeze", partition, arguments, Reply, deadline)

    async def is_held(self, partition: str, deadline: Deadline) -> bool:
        """Whether a save holds the partition, or died while it did."""
        key = self.keys.frozen(partition)
        level = await self.connection.command("HGET", key, "level", deadline=deadline)
        return level in (b"all", b"keep")

    async def snapshot(
        self, partition: str, deadline: Deadline
    ) -> AsyncIterator[tuple[str, str, msgspec.Raw]]:
        """The state of a partition, page by page: ``(suffix of the key, its type, items)``.

        Items are packed: of a hash name, value, ...; of a sorted set member, score, ...; of a set
        its members. An item may come twice.
        """
        server = await self._server(partition, deadline)
        while True:
            async for page in self._pages(partition, deadline):
                yield page
            before, server = server, await self._server(partition, deadline)
            if server == before:
                return
            # Cursors of one server mean nothing to the next: pages may lack what neither gave.

    async def _server(self, partition: str, deadline: Deadline) -> tuple[str | None, int]:
        """What tells the server with the partition from one that takes over, or gets its slot."""
        shard = self._shard(partition)
        life = await shard.life_of_server(self.keys.summary(partition), deadline)
        return life, shard.changes

    async def _pages(
        self, partition: str, deadline: Deadline
    ) -> AsyncIterator[tuple[str, str, msgspec.Raw]]:
        listing = await self._run("snapshot", partition, {}, SnapshotReply, deadline)
        for suffix, kind in listing.keys:
            arguments: dict[str, Any] = {"suffix": suffix, "type": kind, "count": _ENTRIES_PER_PAGE}
            cursor = "0"
            while True:
                page = await self._run(
                    "snapshot", partition, arguments | {"cursor": cursor}, SnapshotReply, deadline
                )
                yield suffix, kind, page.items
                cursor = page.cursor
                if cursor == "0":
                    break

    async def last_sample(self, deadline: Deadline) -> int:
        """The highest sample id that any shard has given out."""

        async def of(shard: RedisConnection) -> int:
            return int(await shard.command("GET", self.keys.next_sample, deadline=deadline) or 0)

        return max(await asyncio.gather(*map(of, self.connection.shards)))

    # Loading

    async def skip_samples(self, upto: int, deadline: Deadline) -> int:
        """Never give out an id that an earlier run may have given out.

        Args:
            upto: the last id that it had given out when it saved.

        Returns:
            An id that no sample has or gets: the generation of partitions that are loaded.
        """

        async def of(shard: RedisConnection) -> int:
            await self._count_on(shard, deadline)
            new = await self._skip(shard, upto, _SKIPPED_IDS, deadline)
            await self._prolong(shard, deadline)
            return new

        return max(await asyncio.gather(*map(of, self.connection.shards)))

    async def stage(
        self,
        partition: str,
        token: str,
        suffix: str,
        kind: str,
        items: Sequence[str],
        lifetime_s: int,
        deadline: Deadline,
        *,
        number: int,
        handles: Sequence[str] = (),
    ) -> bool:
        """Write a page of state, as :meth:`snapshot` gives it, beside the partition.

        Args:
            token: names the load.
            lifetime_s: after so many seconds without another page, the key is removed.
            number: of the page among those of the load and the partition, from 1 on.
            handles: blocks that the items name; until then, nobody takes them for orphans.

        Returns:
            False: pages before this one are gone, with a server that was replaced.
        """
        arguments = {
            "token": token,
            "suffix": suffix,
            "type": kind,
            "items": items,
            "lifetime": lifetime_s,
            "number": number,
            "handles": handles,
        }
        return (await self._run("stage", partition, arguments, Reply, deadline)).code == "ok"

    async def unstage(
        self, partition: str, token: str, suffixes: Sequence[str], deadline: Deadline
    ) -> None:
        """Remove what :meth:`stage` wrote."""
        names = [self.keys.staged(partition, token, suffix) for suffix in suffixes]
        names += [self.keys.staged_pages(partition, token), self.keys.loading(partition)]
        await self.connection.command("UNLINK", *names, deadline=deadline)

    async def activate(
        self, partition: str, token: str, suffixes: Sequence[str], pages: int, deadline: Deadline
    ) -> list[str] | None:
        """Put what was staged in the place of the partition, in one step.

        Args:
            pages: how many were staged.

        Returns:
            The generations whose blocks are to be freed; None: some of what was staged is gone,
            expired or with a server that was replaced, and nothing was done.
        """
        await self._list(partition, deadline)
        arguments = {"token": token, "suffixes": suffixes, "pages": pages}
        reply = await self._mutate("activate", partition, arguments, ActivateReply, deadline)
        if reply.code == "ok":
            return reply.trash
        await self._unlist(partition, deadline)
        return None
