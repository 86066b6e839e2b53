"""The client: one object over control plane and data plane. All its calls are coroutines of one
event loop; :mod:`tq_redis.client.portal` makes them callable from everywhere else."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict

from tq_redis.client.columns import (
    DataParser,
    Fields,
    row_count,
    row_slices,
    to_columns,
    to_tensordict,
)
from tq_redis.config import Config
from tq_redis.control.plane import CELLS_PER_CALL, ControlPlane
from tq_redis.control.records import BlockEntry, NotEnough, Run, Write
from tq_redis.data.base import Column, DataPlane
from tq_redis.data.codec import describe
from tq_redis.deadline import Deadline
from tq_redis.errors import (
    DataLostError,
    DeadlineError,
    InputError,
    NotFoundError,
    PartitionNotFoundError,
    ServerFullError,
    nearest,
    shorten,
)
from tq_redis.metadata import BatchMeta, FieldSchema

_log = logging.getLogger(__name__)

Mode = Literal["fetch", "force_fetch", "insert"]

# A call that must not wait for samples still waits this long for Redis to answer.
_ANSWER_S = 5.0


class AsyncClient:
    """Put, claim, get and clear samples.

    Args:
        config: settings of the instance.
        control: who has what.
        data: where the bytes are.
        name: who this is, in consumption records.

    ``timeout`` of every call is its deadline in seconds; None means ``config.timeout_s``. A call
    raises :class:`DeadlineError` or :class:`ServerUnavailableError` when it passes.
    """

    def __init__(self, config: Config, control: ControlPlane, data: DataPlane, name: str) -> None:
        self.config = config
        self.control = control
        self.data = data
        self.name = name

    # Writing

    async def put(
        self,
        data: Fields,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: DataParser | None = None,
        *,
        group_ids: Sequence[str] | None = None,
        overwrite: bool = False,
        timeout: float | None = None,
    ) -> BatchMeta:
        """Write columns: of the samples in ``metadata``, or of new ones in ``partition_id``.

        Args:
            data: TensorDict or mapping of field -> column with B rows: dense (B, ...) or nested
                tensors of any dtype, numpy arrays, lists of B values.
            metadata: B samples to add the fields to. Without it, B new samples are made.
            partition_id: where to make new samples; created on first use.
            data_parser: applied to the columns before they are written.
            group_ids: one group per new sample; GRPO claims take whole groups.
            overwrite: allow a field to change its dtype.

        Returns:
            The metadata of the written samples, with the fields they now have.

        Raises:
            InputError: columns do not fit each other or the metadata; nothing was written.
            SchemaConflictError: a field would change dtype; rows before it may be written if the
                batch was too large for one step (8,192 cells).
            SampleNotFoundError, PartitionNotFoundError: the metadata is stale.
            ServerFullError: Redis is at its memory limit.
        """
        columns = to_columns(data, data_parser)
        rows = row_count(columns)
        if group_ids is not None and len(group_ids) != rows:
            raise InputError(f"Got {len(group_ids)} group_ids for {rows} rows")
        deadline = self._deadline(timeout)
        if metadata is None:
            if not partition_id:
                raise InputError("put needs metadata (existing samples) or partition_id (new ones)")
            ids, schema = await self._write(
                partition_id, columns, deadline, groups=group_ids, overwrite=overwrite
            )
            return BatchMeta(ids, partition_id, schema)
        if group_ids is not None:
            raise InputError("group_ids are given when samples are made, not with metadata")
        if metadata.padding or metadata.size != rows:
            raise InputError(
                f"Got {rows} rows for the {metadata.size - metadata.padding} samples "
                f"(and {metadata.padding} padding rows) of the metadata",
                fields=columns,
            )
        schema = await self._write(
            metadata.partition_id,
            columns,
            deadline,
            ids=metadata.global_indexes,
            overwrite=overwrite,
        )
        return metadata.with_fields(schema[1])

    async def set_custom_meta(self, metadata: BatchMeta, *, timeout: float | None = None) -> None:
        """Make the tags of each sample exactly those in ``metadata.custom_meta``.

        Raises:
            SampleNotFoundError, PartitionNotFoundError: the metadata is stale.
        """
        deadline = self._deadline(timeout)
        for part in metadata.unpadded().chunk_by_partition():
            await self.control.set_tags(
                part.partition_id, part.global_indexes, part.custom_meta, deadline
            )

    # Claiming

    async def get_meta(
        self,
        data_fields: Sequence[str],
        batch_size: int,
        partition_id: str,
        mode: Mode = "fetch",
        task_name: str | None = None,
        sampling_config: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> BatchMeta:
        """Metadata of samples.

        Args:
            data_fields: the fields that are wanted.
            batch_size: how many samples.
            partition_id: it need not exist yet.
            mode: ``fetch`` waits until ``batch_size`` samples have all the fields and were not
                consumed by ``task_name``, and marks them consumed; ``force_fetch`` gives all
                samples as they are (``batch_size`` and ``task_name`` do not matter);
                ``insert`` makes ``batch_size`` new samples without fields.
            task_name: who consumes; needed for ``fetch``.
            sampling_config: ``{"n_samples_per_prompt": n}``: only whole groups of n.
            timeout: for ``fetch``, how long to wait for samples; 0: a batch if there is one now,
                else an empty one.

        Returns:
            For ``fetch``: exactly ``batch_size`` samples in ascending order of id (whole groups
            one after the other), or none with ``timeout=0``.

        Raises:
            InputError: an argument is missing or out of range.
            DeadlineError: not enough samples came; says how many there are and what is missing.
            PartitionNotFoundError: for ``force_fetch``.
        """
        if mode == "force_fetch":
            return await self._all_samples(partition_id, data_fields, self._deadline(timeout))
        if batch_size < 1:
            raise InputError(f"batch_size must be positive, got {batch_size}")
        if mode == "insert":
            deadline = self._deadline(timeout)
            written = await self.control.produce(partition_id, Write(batch_size), deadline)
            return BatchMeta(written.ids, partition_id, {}, np.zeros(batch_size, np.int8))
        if mode != "fetch":
            raise InputError(f"mode must be fetch, force_fetch or insert, got {mode!r}")
        if not task_name:
            raise InputError("mode 'fetch' needs task_name: consumption is kept per task")
        fields = _distinct(data_fields)
        group_size = _group_size(sampling_config, batch_size)
        return await self._fetch(fields, batch_size, partition_id, task_name, group_size, timeout)

    # Reading

    async def get_data(
        self,
        metadata: BatchMeta,
        select_fields: Sequence[str] | None = None,
        *,
        copy: bool = True,
        timeout: float | None = None,
    ) -> TensorDict:
        """The columns of these samples, in the order of the metadata, as a TensorDict.

        Returns:
            TensorDict with batch size (B,); non-tensor columns are NonTensorStack.

        Arguments and errors are those of :meth:`get_columns`.
        """
        columns = await self.get_columns(metadata, select_fields, copy=copy, timeout=timeout)
        return to_tensordict(columns, metadata.size)

    async def get_columns(
        self,
        metadata: BatchMeta,
        select_fields: Sequence[str] | None = None,
        *,
        copy: bool = True,
        timeout: float | None = None,
    ) -> dict[str, Column]:
        """The columns of these samples, in the order of the metadata, as tensors and lists.

        Args:
            metadata: B samples; a sample may stand in it twice.
            select_fields: the fields wanted; all of the metadata's by default.
            copy: True: private, writable memory. False: read-only views of shared memory where
                a field's rows lie together (writing to them is undefined), private memory else.

        Returns:
            Field -> B rows. Dense columns come back dense (B, ...), jagged ones jagged, non-tensor
            ones as lists. Consumption is not touched.

        Raises:
            SampleNotFoundError, PartitionNotFoundError: the samples were cleared.
            FieldNotFoundError, NotReadyError: a field is unknown, or not produced for some rows.
            DataLostError: the bytes are gone; names rows and fields.
        """
        fields = _distinct(metadata.field_names if select_fields is None else select_fields)
        if not metadata.size or not fields:
            return {}
        deadline = self._deadline(timeout)
        where = await self._locate(metadata, fields, deadline)
        try:
            return await self.data.get(where, deadline, copy=copy)
        except DataLostError as error:
            # If the samples were cleared or written again meanwhile, looking again says so.
            again = await self._locate(metadata, fields, deadline)
            if again == where:
                raise _name_rows(error, metadata, where) from error
            return await self.data.get(again, deadline, copy=copy)

    # Clearing

    async def clear_samples(self, metadata: BatchMeta, *, timeout: float | None = None) -> None:
        """Forget samples and free their bytes. Unknown ones are passed over; can be repeated."""
        deadline = self._deadline(timeout)
        for part in metadata.chunk_by_partition():
            freed = await self.control.clear_samples(
                part.partition_id, part.global_indexes, deadline
            )
            await self._free(part.partition_id, freed, deadline)

    async def clear_partition(self, partition_id: str, *, timeout: float | None = None) -> None:
        """Forget a partition and free its bytes. Unknown ones are passed over; can be repeated.

        For other clients the partition is gone in one step, before the bytes are freed.
        """
        deadline = self._deadline(timeout)
        for generation in await self.control.clear_partition(partition_id, deadline):
            handles = await self.control.trash(partition_id, generation, deadline)
            await self.data.delete(handles, deadline)
            await self.control.empty_trash(partition_id, generation, deadline)

    # Status

    async def get_partition_list(self, *, timeout: float | None = None) -> list[str]:
        """Names of the partitions, sorted."""
        return await self.control.partitions(self._deadline(timeout))

    async def get_summary(
        self, partition_id: str, *, timeout: float | None = None
    ) -> dict[str, int | str]:
        """The partition's summary, as ``redis-cli HGETALL`` shows it: ``samples``, ``bytes``,
        ``produced:<field>``, ``consumed:<task>``.

        Raises:
            PartitionNotFoundError
        """
        return await self.control.summary(partition_id, self._deadline(timeout))

    async def get_production_status(
        self, data_fields: Sequence[str], partition_id: str, *, timeout: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample ids (N,) int64 and flags (N, fields) int8: 1 where the cell is produced.

        Raises:
            PartitionNotFoundError, FieldNotFoundError
        """
        deadline = self._deadline(timeout)
        fields = _distinct(data_fields)
        rows = await self.control.describe(partition_id, deadline, fields=fields)
        for name in fields:
            if name not in rows.produced:
                await self.control.require_field(partition_id, name, deadline)
        flags = torch.tensor([rows.produced[name] for name in fields], dtype=torch.int8)
        return torch.tensor(rows.ids), flags.T.contiguous()

    async def get_consumption_status(
        self, task_name: str, partition_id: str, *, timeout: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample ids (N,) int64 and flags (N,) int8: 1 where the task consumed the sample.

        Raises:
            PartitionNotFoundError
        """
        rows = await self.control.describe(
            partition_id, self._deadline(timeout), fields=(), task=task_name
        )
        return torch.tensor(rows.ids), torch.tensor(rows.consumed, dtype=torch.int8)

    async def check_production_status(
        self, data_fields: Sequence[str], partition_id: str, *, timeout: float | None = None
    ) -> bool:
        """Whether all samples of the partition have all the fields; False where it has none."""
        samples, counts = await self._counts(
            partition_id, [f"produced:{name}" for name in _distinct(data_fields)], timeout
        )
        return samples > 0 and all(count == samples for count in counts)

    async def check_consumption_status(
        self, task_name: str, partition_id: str, *, timeout: float | None = None
    ) -> bool:
        """Whether the task consumed all samples of the partition; False where it has none."""
        samples, counts = await self._counts(partition_id, [f"consumed:{task_name}"], timeout)
        return samples > 0 and counts[0] == samples

    # Upkeep

    async def sweep(self, *, timeout: float | None = None) -> None:
        """Free blocks that no sample names: their writer died before Redis knew of them, or a
        clear failed before it had freed them. The owner calls it now and then."""
        deadline = self._deadline(timeout)
        await self.control.keep_alive(deadline)
        grace = self.config.data.orphan_grace_s
        for partition, handles in (await self.data.unconfirmed(grace, deadline)).items():
            named = await self.control.named_blocks(partition, deadline)
            orphans = [handle for handle in handles if handle not in named]
            await self.data.confirm([h for h in handles if h in named], deadline)
            if orphans:
                _log.warning(
                    "Freeing %d blocks of partition %r that no sample names",
                    len(orphans),
                    partition,
                )
                await self.data.delete(orphans, deadline)

    async def close(self) -> None:
        """Let go of connections; nothing in the instance ends."""
        await self.data.close()
        await self.control.connection.close()

    # Inner parts

    def _deadline(self, timeout: float | None) -> Deadline:
        if timeout is not None and timeout < 0:
            raise InputError(f"timeout must not be negative, got {timeout}")
        return Deadline(self.config.timeout_s if timeout is None else timeout)

    async def _write(
        self,
        partition: str,
        columns: Mapping[str, Column],
        deadline: Deadline,
        *,
        ids: Sequence[int] | None = None,
        keys: Sequence[str] | None = None,
        groups: Sequence[str] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
        overwrite: bool = False,
    ) -> tuple[list[int], dict[str, FieldSchema]]:
        """Bytes first, then the rows that name them, in steps that Redis handles at once."""
        schema = {name: describe(column) for name, column in columns.items()}
        written: list[int] = []
        for first, part in row_slices(columns, max(1, CELLS_PER_CALL // len(columns))):
            rows = slice(first, first + row_count(part))
            blocks = await self.data.put(partition, part, deadline)
            # A block must be named before the sweep takes it for an orphan.
            named_by = Deadline(min(deadline.remaining, self.config.data.orphan_grace_s / 2))
            write = Write(
                row_count(part),
                ids=None if ids is None else ids[rows],
                keys=None if keys is None else keys[rows],
                groups=None if groups is None else groups[rows],
                tags=None if tags is None else tags[rows],
                blocks=[
                    BlockEntry(
                        block.handle,
                        block.nbytes,
                        block.first_row,
                        block.rows,
                        {name: schema[name].dtype for name in block.fields},
                    )
                    for block in blocks
                ],
                schema=schema,
                overwrite=overwrite,
            )
            try:
                result = await self.control.produce(partition, write, named_by)
            except (InputError, NotFoundError, ServerFullError):
                # Refused for certain. After a lost connection or a cancelled call Redis may
                # name these blocks; there the sweep finds out.
                await self.data.delete([block.handle for block in blocks], Deadline(_ANSWER_S))
                raise
            written += result.ids
            await self._free(partition, result.freed, deadline)
        return written, schema

    async def _free(self, partition: str, handles: Sequence[str], deadline: Deadline) -> None:
        if handles:
            await self.data.delete(handles, deadline)
            await self.control.forget_freed(partition, handles, deadline)

    async def _fetch(
        self,
        fields: list[str],
        count: int,
        partition: str,
        task: str,
        group_size: int,
        timeout: float | None,
    ) -> BatchMeta:
        wait = self._deadline(timeout)
        while True:
            answer = Deadline(max(wait.remaining, _ANSWER_S))
            found = await self.control.claim(
                partition, task, fields, count, self.name, answer, group_size=group_size
            )
            if not isinstance(found, NotEnough):
                return BatchMeta(found.ids, partition, found.schema, custom_meta=found.tags)
            if wait.seconds == 0:
                return BatchMeta.empty()
            if wait.passed:
                raise await self._too_few(found, fields, count, partition, task, group_size, wait)
            await self.control.wait(partition, found.event, wait)

    async def _too_few(
        self,
        found: NotEnough,
        fields: list[str],
        count: int,
        partition: str,
        task: str,
        group_size: int,
        wait: Deadline,
    ) -> DeadlineError:
        answer = Deadline(_ANSWER_S)
        text = f"Task {task!r} waited {wait.seconds:g} s for {count} samples of {partition!r}"
        if not found.exists:
            known = await self.control.partitions(answer)
            text += f", which does not exist. {nearest(partition, known)}"
        else:
            text += f" with fields {fields}: {found.ready} are ready"
            if group_size:
                text += f", in {found.groups} whole groups of {group_size}"
            known = await self.control.fields(partition, answer)
            summary = await self.control.summary(partition, answer)
            text += f", of {summary['samples']} ({summary.get(f'consumed:{task}', 0)} consumed)."
            for name in fields:
                produced = summary.get(f"produced:{name}", 0)
                if name not in known:
                    text += f" Field {name!r} does not exist. {nearest(name, known)}"
                elif produced != summary["samples"]:
                    text += f" Field {name!r} is produced in {produced}."
        return DeadlineError(text, partition=partition, fields=fields, deadline=wait.seconds)

    async def _all_samples(
        self, partition: str, fields: Sequence[str], deadline: Deadline
    ) -> BatchMeta:
        rows = await self.control.describe(partition, deadline, fields=_distinct(fields))
        flags = np.ones(len(rows.ids), np.int8)
        for produced in rows.produced.values():
            flags &= np.array(produced, np.int8)
        if len(rows.produced) < len(set(fields)):
            flags[:] = 0
        return BatchMeta(rows.ids, partition, rows.schema, flags, custom_meta=rows.tags)

    async def _locate(
        self, metadata: BatchMeta, fields: list[str], deadline: Deadline
    ) -> dict[str, list[Run]]:
        where: dict[str, list[Run]] = {name: [] for name in fields}
        start = 0
        for stop in range(1, metadata.size + 1):
            end = stop == metadata.size
            partition = metadata.partition_ids[start]
            if end or metadata.partition_ids[stop] != partition:
                part = metadata.global_indexes[start:stop]
                for name, runs in (
                    await self.control.locate(partition, part, fields, deadline)
                ).items():
                    where[name].extend(runs)
                start = stop
        return where

    async def _counts(
        self, partition: str, names: Sequence[str], timeout: float | None
    ) -> tuple[int, list[int]]:
        try:
            summary = await self.control.summary(partition, self._deadline(timeout))
        except PartitionNotFoundError:
            return 0, [0] * len(names)
        return int(summary["samples"]), [int(summary.get(name, 0)) for name in names]


def _distinct(fields: Sequence[str]) -> list[str]:
    if isinstance(fields, str):  # a sequence of strings too
        raise InputError(f"Fields must be a list of names, got the string {fields!r}")
    names: list[Any] = list(fields)
    if len(set(names)) != len(names) or not all(isinstance(n, str) and n for n in names):
        raise InputError(f"Fields must be distinct non-empty strings, got {names!r}")
    return names


def _group_size(sampling: Mapping[str, Any] | None, batch_size: int) -> int:
    settings = dict(sampling or {})
    size = settings.pop("n_samples_per_prompt", 0)
    if settings:
        raise InputError(
            f"Unknown sampling_config {sorted(settings)}. "
            f"{nearest(sorted(settings)[0], ['n_samples_per_prompt'])}"
        )
    if not isinstance(size, int) or size < 0:
        raise InputError(f"n_samples_per_prompt must be a positive integer, got {size!r}")
    if size and batch_size % size:
        raise InputError(
            f"batch_size {batch_size} is not a multiple of n_samples_per_prompt {size}"
        )
    return size


def _name_rows(
    error: DataLostError, metadata: BatchMeta, where: Mapping[str, Sequence[Run]]
) -> DataLostError:
    """The same loss in the user's words: rows and fields instead of blocks."""
    lost = set(error.handles)
    rows: set[int] = set()
    fields: list[str] = []
    for name, runs in where.items():
        position = 0
        for handle, _, count in runs:
            if handle in lost:
                rows.update(metadata.global_indexes[position : position + count])
                fields += [name] if name not in fields else []
            position += count
    return DataLostError(
        f"The bytes of fields {fields} are gone for rows {shorten(sorted(rows))}: {error.message}",
        handles=error.handles,
        partition=metadata.partition_ids[0],
        fields=fields,
        rows=sorted(rows),
    )
