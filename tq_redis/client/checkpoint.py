"""Checkpoints: the whole queue on disk, and back."""

from __future__ import annotations

import time
from collections.abc import Mapping
from os import PathLike
from typing import Any

import tq_redis
from tq_redis.checkpoint.directory import Draft, find
from tq_redis.checkpoint.disk import Disk
from tq_redis.checkpoint.manifest import Manifest, as_metadata, read_manifest, write_manifest
from tq_redis.client.aio import AsyncClient
from tq_redis.client.load import Load
from tq_redis.client.save import Save


class CheckpointCalls(AsyncClient):
    """Saving and loading the queue."""

    async def save_checkpoint(
        self,
        checkpoint_dir: str | PathLike[str],
        *,
        metadata: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Write all partitions into a directory: samples with their bytes, keys, groups and tags,
        consumption, draws, and what is expected. They are saved as they stood at one moment.

        Others go on meanwhile. Calls that write wait only until the state of their partition is
        copied, without its bytes; a save that dies holds them up for 5 seconds at most. Leases do
        not run while they wait. What is cleared or replaced while bytes are copied is freed when
        they are.

        Args:
            checkpoint_dir: its parent directory must exist. A checkpoint that is there is replaced
                when the new one is complete; the disk needs room for both.
            metadata: JSON values that :meth:`load_checkpoint` returns.
            timeout: of the whole.

        Raises:
            InputError: ``metadata`` is not JSON.
            CheckpointError: the disk refuses, or something else than a checkpoint is there; names
                the file. A checkpoint that was there is as it was.
            DataLostError: bytes are gone, with the store that kept them.
            DeadlineError: it took longer than ``timeout``.
        """
        given = as_metadata(metadata)
        deadline = self._deadline(timeout)
        draft, disk = Draft(checkpoint_dir), Disk()
        try:
            await disk.run(deadline, draft.begin)
            save = Save(self, draft, disk, deadline)
            last, partitions = await save.run()
            manifest = Manifest(tq_redis.__version__, time.time(), last, partitions, given)
            await disk.run(deadline, write_manifest, draft.folder, manifest)
            await disk.finish(draft.commit)
        finally:
            try:
                await disk.finish(draft.discard)
            finally:
                disk.close()

    async def load_checkpoint(
        self, checkpoint_dir: str | PathLike[str], *, timeout: float | None = None
    ) -> dict[str, Any]:
        """Put the partitions of a checkpoint in place of all that are there.

        Samples keep their ids, so metadata that points to them works. Samples that a consumer held
        with a lease are open again. Ids that are given out from now on are new. Settings are those
        of this queue, and so are the limits of tasks (:meth:`limit`): those that a partition has
        stay, those of the checkpoint are not loaded. The number of servers and stores, and the
        backend, may differ.

        The checkpoint is checked, and stored beside the partitions that are there, before any of
        these is touched: Redis and stores need room for both. Each partition is then replaced in
        one step.

        Args:
            checkpoint_dir: as given to :meth:`save_checkpoint`.
            timeout: of the whole.

        Returns:
            The metadata that was given when it was saved.

        Raises:
            CheckpointError: it is not there, not whole or changed; names the file. The partitions
                are as they were.
            StoreFullError, ServerFullError: there is no room. The partitions are as they were.
            DeadlineError: it took longer than ``timeout``. The partitions are as they were.
        """
        deadline = self._deadline(timeout)
        disk = Disk()
        try:
            folder = await disk.run(deadline, find, checkpoint_dir)
            manifest = await disk.run(deadline, read_manifest, folder)
            trash = await Load(self.control, self.data, folder, disk, deadline).run(manifest)
        finally:
            disk.close()
        for partition, generations in trash.items():
            await self._empty_trash(partition, generations, deadline)
        for partition in await self.control.partitions(deadline):
            if partition not in trash:
                generations = await self.control.clear_partition(
                    partition, deadline, keep_limits=True
                )
                await self._empty_trash(partition, generations, deadline)
        return manifest.metadata
