"""Samples by id: the coroutines behind the low-level client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from os import PathLike
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.base import TensorDictBase

from tq_redis import metadata as strict
from tq_redis.client.columns import DataParser
from tq_redis.compat.transfer_queue.columns import picked_rows, with_lists
from tq_redis.compat.transfer_queue.draws import fetch
from tq_redis.compat.transfer_queue.errors import (
    RequestError,
    RequestPartitionError,
    StorageKeyNotFoundError,
)
from tq_redis.compat.transfer_queue.kv_calls import KVCalls, described, plain_tags
from tq_redis.compat.transfer_queue.metadata import BatchMeta
from tq_redis.compat.transfer_queue.metadata.schema import unknown_form
from tq_redis.compat.transfer_queue.own_sampler import forget_partition
from tq_redis.compat.transfer_queue.settings import CHECKPOINT_S, note_of
from tq_redis.deadline import Deadline
from tq_redis.errors import (
    FieldNotFoundError,
    InputError,
    NotFoundError,
    PartitionNotFoundError,
    SampleNotFoundError,
)


class RowCalls(KVCalls):
    """Lenient calls on the strict client."""

    async def get_meta(
        self,
        data_fields: Sequence[str],
        batch_size: int,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: Mapping[str, Any] | None = None,
    ) -> BatchMeta:
        """Metadata of samples.

        Args:
            data_fields: the fields that are wanted.
            batch_size: how many samples.
            partition_id: it need not exist yet.
            mode: ``fetch`` claims samples that have all the fields and that ``task_name`` has not
                had; the sampler of the queue chooses them. ``force_fetch`` gives all samples as
                they are. ``insert`` makes new samples.
            task_name: who consumes; needed for ``fetch``.
            sampling_config: ``dp_rank`` and ``batch_index``, for samplers that look at them.

        Returns:
            The samples. With ``controller.polling_mode``, none if there are too few; without it,
            ``fetch`` waits some seconds for them.

        Raises:
            RequestError: an argument is missing or out of range. A RuntimeError.
            RequestTimeoutError: not enough samples came. A RuntimeError.
            RequestPartitionError: for ``force_fetch``: no such partition. A RuntimeError.
        """
        fields = list(data_fields)
        deadline = Deadline(self.core.config.timeout_s)
        if mode == "force_fetch":
            try:
                rows = await self.core.control.describe(partition_id, deadline, fields=fields)
            except PartitionNotFoundError as error:
                raise RequestPartitionError(error.message, partition=partition_id) from error
            return described(rows, partition_id, fields)
        if batch_size < 1:
            raise RequestError(f"batch_size must be positive, got {batch_size}")
        if mode == "insert":
            made = await self.core.get_meta([], batch_size, partition_id, "insert")
            forms = {name: unknown_form() for name in fields}
            return BatchMeta(made.global_indexes, made.partition_ids, forms)
        if mode != "fetch":
            raise RequestError(f"mode must be fetch, force_fetch or insert, got {mode!r}")
        if not task_name:
            raise RequestError("mode 'fetch' needs task_name: consumption is kept per task")
        note = note_of(self.core.config)
        return await fetch(
            self.core, note, fields, batch_size, partition_id, task_name, sampling_config or {}
        )

    async def put(
        self,
        data: TensorDictBase,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: DataParser | None = None,
    ) -> BatchMeta:
        """Write columns: of the samples in ``metadata``, or of new ones in ``partition_id``.

        Args:
            data: B rows. A field may change its dtype.
            metadata: B samples. Tags in it that the queue does not have yet are merged into the
                samples' tags.
            data_parser: makes the columns that are kept from these, with the same fields and rows.

        Returns:
            ``metadata``, with the new fields in it; for new samples, a new one.

        Raises:
            InputError: columns do not fit each other or the metadata; nothing was written.
            StorageKeyNotFoundError: the metadata is stale. A KeyError.
        """
        data = with_lists(data)
        if metadata is None:
            if not partition_id:
                raise InputError("partition_id must be provided if metadata is not given")
            made = await self.core.put(
                data, partition_id=partition_id, data_parser=data_parser, overwrite=True
            )
            new = BatchMeta(made.global_indexes, made.partition_ids)
            new.note_tags()
            return new.add_fields(data)
        if data.batch_size[0] != metadata.size:
            raise InputError(f"Got {data.batch_size[0]} rows for {metadata.size} samples")
        tags = [plain_tags(row) for row in metadata.changed_tags()]
        for rows in positions_by_partition(metadata):
            await self._put_rows(data, metadata, rows, tags, data_parser)
        metadata.note_tags()
        return metadata.add_fields(data)

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """The columns of the metadata's fields, in the order of its rows.

        Returns:
            As :meth:`kv_batch_get`. Consumption is not touched.

        Raises:
            StorageKeyNotFoundError: samples were cleared. A KeyError.
            FieldsNotReadyError: a field is not produced for some samples. A ValueError.
        """
        where = strict.BatchMeta(metadata.global_indexes, metadata.partition_ids)
        deadline = Deadline(self.core.config.timeout_s)
        return await self._columns(where, metadata.field_names, deadline)

    async def set_custom_meta(self, metadata: BatchMeta) -> None:
        """Make the tags of each sample exactly those in ``metadata.custom_meta``. Partitions that
        are not there are passed over.

        Raises:
            StorageKeyNotFoundError: a sample was cleared. A KeyError.
        """
        for part in metadata.chunk_by_partition():
            tags = [plain_tags(row) for row in part.custom_meta]
            new = strict.BatchMeta(part.global_indexes, part.partition_ids, custom_meta=tags)
            try:
                await self.core.set_custom_meta(new)
            except PartitionNotFoundError:
                continue
            except SampleNotFoundError as error:
                raise _stale(error) from error
        metadata.note_tags()

    # Clearing

    async def clear_samples(self, metadata: BatchMeta) -> None:
        """Forget samples and free their bytes. Unknown ones are passed over."""
        await self.core.clear_samples(
            strict.BatchMeta(metadata.global_indexes, metadata.partition_ids)
        )

    async def clear_partition(self, partition_id: str) -> None:
        """Forget a partition and free its bytes. An unknown one is passed over."""
        await self.core.clear_partition(partition_id)
        if not note_of(self.core.config).sampler:
            await forget_partition(self.core, partition_id)

    # Status

    async def get_consumption_status(
        self, task_name: str, partition_id: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Sample ids (N,) int64 and flags (N,) int8: 1 where the task had the sample. None twice
        for an unknown partition."""
        try:
            return await self.core.get_consumption_status(task_name, partition_id)
        except PartitionNotFoundError:
            return None, None

    async def get_production_status(
        self, data_fields: Sequence[str], partition_id: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Sample ids (N,) int64 and flags (N, fields) int8: 1 where the cell is produced. None
        twice for an unknown partition or field."""
        try:
            return await self.core.get_production_status(data_fields, partition_id)
        except (PartitionNotFoundError, FieldNotFoundError):
            return None, None

    async def check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Whether the task had all samples of the partition; False where it has none."""
        return await self.core.check_consumption_status(task_name, partition_id)

    async def check_production_status(self, data_fields: Sequence[str], partition_id: str) -> bool:
        """Whether all samples of the partition have all the fields; False where it has none."""
        return await self.core.check_production_status(data_fields, partition_id)

    async def reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Let a task, or all of them, have all samples again. True, also where the partition is
        unknown."""
        with suppress(PartitionNotFoundError):
            await self.core.reset_consumption(partition_id, task_name)
        return True

    async def get_partition_list(self) -> list[str]:
        """Names of the partitions, sorted."""
        return await self.core.get_partition_list()

    # Checkpoints

    async def save_controller_checkpoint(self, path: str | PathLike[str]) -> None:
        """Write a checkpoint of all, columns included, to ``path``. See ``save_checkpoint``."""
        await self.core.save_checkpoint(path, timeout=CHECKPOINT_S)

    async def load_controller_checkpoint(self, path: str | PathLike[str]) -> None:
        """Put the partitions of a checkpoint in place of all that are there."""
        await self.core.load_checkpoint(path, timeout=CHECKPOINT_S)

    async def save_storage_checkpoint(self, checkpoint_dir: str | PathLike[str]) -> None:
        """Nothing to do: ``save_controller_checkpoint`` has written the columns too."""

    async def load_storage_checkpoint(self, checkpoint_dir: str | PathLike[str]) -> None:
        """Nothing to do: ``load_controller_checkpoint`` reads the columns too."""

    # Inner parts

    async def _put_rows(
        self,
        data: TensorDictBase,
        metadata: BatchMeta,
        rows: Sequence[int],
        tags: Sequence[Mapping[str, Any]],
        parser: DataParser | None,
    ) -> None:
        """Write the rows of one partition."""
        ids = [metadata.global_indexes[row] for row in rows]
        try:
            await self.core.put(
                data if len(rows) == metadata.size else picked_rows(data, rows),
                strict.BatchMeta(ids, metadata.partition_ids[rows[0]]),
                data_parser=parser,
                tags=[tags[row] for row in rows],
                overwrite=True,
            )
        except (SampleNotFoundError, PartitionNotFoundError) as error:
            raise _stale(error) from error


def positions_by_partition(metadata: BatchMeta) -> list[list[int]]:
    """The positions of each partition's rows."""
    found: dict[str, list[int]] = {}
    for row, name in enumerate(metadata.partition_ids):
        found.setdefault(name, []).append(row)
    return list(found.values())


def _stale(error: NotFoundError) -> StorageKeyNotFoundError:
    return StorageKeyNotFoundError(error.message, partition=error.partition, rows=error.rows)
