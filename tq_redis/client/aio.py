"""The client: one object over control plane and data plane. All its calls are coroutines of one
event loop; :mod:`tq_redis.client.portal` makes them callable from everywhere else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tensordict import TensorDict

from tq_redis.client.claims import ClaimCalls
from tq_redis.client.columns import DataParser, checked, rows_of, to_tensordict
from tq_redis.client.core import ANSWER_S, distinct
from tq_redis.client.leases import LeaseCalls
from tq_redis.client.lost import Loss
from tq_redis.client.status import StatusCalls
from tq_redis.control.plane import BlockGoneError, NotAdmittedError, rows_per_put
from tq_redis.control.records import BlockEntry, Lost, Run, Write
from tq_redis.data import Column, Parser, WrittenBlock
from tq_redis.data.devices import Device, destination
from tq_redis.data.given import Fields, row_count, to_columns
from tq_redis.deadline import Deadline
from tq_redis.errors import (
    DataLostError,
    InputError,
    NotFoundError,
    PartitionEndedError,
    ServerFullError,
    TQError,
)
from tq_redis.metadata import BatchMeta, FieldSchema

_log = logging.getLogger(__name__)


class AsyncClient(ClaimCalls, LeaseCalls, StatusCalls):
    """Put, claim, get and clear samples."""

    # Writing

    async def put(
        self,
        data: Fields,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: DataParser | None = None,
        *,
        group_ids: Sequence[str] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
        overwrite: bool = False,
        timeout: float | None = None,
    ) -> BatchMeta:
        """Write columns: of the samples in ``metadata``, or of new ones in ``partition_id``.

        Args:
            data: TensorDict or mapping of field -> column with B rows: dense (B, ...) or nested
                tensors of any dtype, numpy arrays, lists of B values.
            metadata: B samples to add the fields to. Without it, B new samples are made. The task
                that it was claimed for may claim the samples again if these bytes are lost.
            partition_id: where to make new samples; created on first use.
            data_parser: makes the columns that are kept from these, with the same fields and rows;
                for example images from their paths. Where all fields are kept by Ray, it runs in a
                Ray task on some node of the cluster, whose store keeps what comes out. The name
                of one that storage units offer: it runs in the unit that keeps what comes out.
                All fields must be routed to ``zmq`` then.
            group_ids: one group per new sample; GRPO claims take whole groups.
            tags: per row, small JSON values that travel in the metadata (``custom_meta``), merged
                into those that the sample has, in the same step as the columns.
            overwrite: allow a field to change its dtype.

        Returns:
            The metadata of the written samples, with the fields they now have.

        Raises:
            InputError: columns do not fit each other or the metadata, or no storage unit offers
                the parser; nothing was written.
            ParserError: the parser failed in its storage unit; nothing was written.
            SchemaConflictError: a field would change dtype; rows before it may be written if the
                batch was too large for one step (3,072 cells, a row counting as three to eight
                more).
            SampleNotFoundError, PartitionNotFoundError: the metadata is stale.
            PartitionEndedError: new samples where no more are to come.
            PartitionFullError: there was no room for new samples within the limits of tasks.
            ServerFullError: Redis is at its memory limit.
        """
        columns, parser = to_columns(data), checked(data_parser)
        rows = row_count(columns)
        if group_ids is not None and len(group_ids) != rows:
            raise InputError(f"Got {len(group_ids)} group_ids for {rows} rows")
        if tags is not None and len(tags) != rows:
            raise InputError(f"Got tags for {len(tags)} rows, the columns have {rows}")
        deadline = self._deadline(timeout)
        if metadata is None:
            if not partition_id:
                raise InputError("put needs metadata (existing samples) or partition_id (new ones)")
            ids, schema = await self._write(
                partition_id,
                columns,
                deadline,
                parser=parser,
                groups=group_ids,
                tags=tags,
                overwrite=overwrite,
            )
            return BatchMeta(ids, partition_id, schema, custom_meta=tags)
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
            parser=parser,
            ids=metadata.global_indexes,
            tags=tags,
            overwrite=overwrite,
            task=metadata.task,
        )
        written = metadata.with_fields(schema[1])
        written.update_custom_meta(tags)
        return written

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

    async def merge_custom_meta(
        self,
        metadata: BatchMeta,
        tags: Sequence[Mapping[str, Any]],
        *,
        timeout: float | None = None,
    ) -> BatchMeta:
        """Merge tags into those that each sample has. Concurrent merges lose nothing.

        Args:
            metadata: B samples.
            tags: B mappings of name -> small JSON value.

        Returns:
            The metadata with the tags merged into ``custom_meta``.

        Raises:
            InputError: there is not one mapping per sample, or a value is not JSON.
            SampleNotFoundError, PartitionNotFoundError: the metadata is stale.
        """
        deadline = self._deadline(timeout)
        merged = metadata.unpadded()
        merged.update_custom_meta(tags)
        new = BatchMeta(merged.global_indexes, merged.partition_ids, custom_meta=tags)
        for part in new.chunk_by_partition():
            write = Write(part.size, ids=part.global_indexes, tags=part.custom_meta)
            await self._register(part.partition_id, write, deadline)
        return merged

    # Reading

    async def get_data(
        self,
        metadata: BatchMeta,
        select_fields: Sequence[str] | None = None,
        *,
        copy: bool = True,
        device: Device | None = None,
        timeout: float | None = None,
    ) -> TensorDict:
        """The columns of these samples, in the order of the metadata, as a TensorDict.

        Returns:
            TensorDict with batch size (B,); non-tensor columns are NonTensorStack.

        Arguments and errors are those of :meth:`get_columns`.
        """
        columns = await self.get_columns(
            metadata, select_fields, copy=copy, device=device, timeout=timeout
        )
        return to_tensordict(columns, metadata.size)

    async def get_columns(
        self,
        metadata: BatchMeta,
        select_fields: Sequence[str] | None = None,
        *,
        copy: bool = True,
        device: Device | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """The columns of these samples, in the order of the metadata, as tensors and lists.

        Args:
            metadata: B samples; a sample may stand in it twice.
            select_fields: the fields wanted; all of the metadata's by default.
            copy: True: private, writable memory. False: read-only views of shared memory where
                a field's rows lie together (writing to them is undefined), private memory else.
            device: where tensors go: ``cuda``, ``cuda:1``, ``npu:0``, a :class:`torch.device`.
                An accelerator gets them from shared memory, without a private copy in between,
                on the stream that is current where the call is made. The call returns when the
                copies are under way: what is given to that stream is after them; another stream
                has to wait for it. By default, and with ``cpu``, they stay in main memory.
                Values in lists always do.

        Returns:
            Field -> B rows. Dense columns come back dense (B, ...), jagged ones jagged, non-tensor
            ones as lists. Consumption is not touched.

        Raises:
            SampleNotFoundError, PartitionNotFoundError: the samples were cleared.
            FieldNotFoundError, NotReadyError: a field is unknown, or not produced for some rows.
            DataLostError: the bytes are gone for good; names rows and fields. These are not
                produced any more. The task that had put them may claim the rows again; the message
                says which rows have no such task: put them again. What other tasks claimed stays
                as it is: their leases can be released or acknowledged, and the other rows got.
            InputError: this process has no such device; nothing was fetched.
        """
        target = await destination(device)
        fields = distinct(metadata.field_names if select_fields is None else select_fields)
        if not metadata.size or not fields:
            return {}
        deadline = self._deadline(timeout)
        where = await self._locate(metadata, fields, deadline)
        while True:
            try:
                return await self.data.get(where, deadline, copy=copy, device=target)
            except DataLostError as error:
                # If the samples were cleared or written again meanwhile, looking again says so.
                again = await self._locate(metadata, fields, deadline)
                loss = Loss(error, metadata, again)
                if loss.parts or again == where:
                    raise await self._reset(loss, deadline) from error
                where = again

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
        generations = await self.control.clear_partition(partition_id, deadline)
        await self._empty_trash(partition_id, generations, deadline)

    # Upkeep

    async def sweep(self, *, timeout: float | None = None) -> None:
        """Free blocks that no sample names: their writer died before Redis knew of them, or a
        clear failed before it had freed them. The owner calls it now and then."""
        deadline = self._deadline(timeout)
        await self.control.keep_alive(deadline)
        grace = self.config.data.orphan_grace_s
        for partition, handles in (await self.data.unconfirmed(grace, deadline)).items():
            named = await self.control.named_blocks(partition, deadline)
            loading = await self.control.loading_blocks(partition, deadline)
            orphans = [handle for handle in handles if handle not in named | loading]
            await self.data.confirm([h for h in handles if h in named], deadline)
            if orphans:
                _log.warning(
                    "Freeing %d blocks of partition %r that no sample names",
                    len(orphans),
                    partition,
                )
                await self.data.delete(orphans, deadline)

    # Inner parts

    async def _write(
        self,
        partition: str,
        columns: Mapping[str, Column],
        deadline: Deadline,
        *,
        parser: Parser | str | None = None,
        ids: Sequence[int] | None = None,
        keys: Sequence[str] | None = None,
        groups: Sequence[str] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
        overwrite: bool = False,
        task: str | None = None,
    ) -> tuple[list[int], dict[str, FieldSchema]]:
        """Write columns. New rows are made when the limits of tasks let them."""
        whole = Write(
            row_count(columns),
            ids=ids,
            keys=keys,
            groups=groups,
            tags=tags,
            overwrite=overwrite,
            task=task,
        )
        schema: dict[str, FieldSchema] = {}

        async def make(left: Write) -> list[int]:
            rest, first = columns, whole.count - left.count
            if first:
                rest = {n: rows_of(c, first, whole.count) for n, c in columns.items()}
            made, form = await self._write_now(partition, rest, left, deadline, parser)
            schema.update(form)
            return made

        return await self._within_limits(partition, whole, make, deadline), schema

    async def _write_now(
        self,
        partition: str,
        columns: Mapping[str, Column],
        whole: Write,
        deadline: Deadline,
        parser: Parser | str | None,
    ) -> tuple[list[int], dict[str, FieldSchema]]:
        """Bytes first, then the rows that name them, in steps that Redis handles at once.

        Returns:
            The rows' ids, fewer than there are if the others have to be written anew; the form of
            the fields.
        """
        total = whole.count
        reserve = total if whole.ids is None else 0
        putting = self.data.put(partition, columns, deadline, parser)
        blocks, first_id = await self._put_bytes(partition, putting, deadline, reserve)
        schema = {name: form for block in blocks for name, form in block.schema.items()}
        whole = replace(whole, first_id=first_id, schema=schema)
        # Blocks must be named before the sweep takes them for orphans.
        named_by = Deadline(min(deadline.remaining, self.config.data.orphan_grace_s / 2))
        numbers: dict[str, int] = {}
        written: list[int] = []
        step = rows_per_put(whole, len(columns))
        for first in range(0, total, step):
            stop = min(first + step, total)
            entries = [
                BlockEntry(
                    block.handle,
                    block.nbytes,
                    max(block.first_row - first, 0),
                    min(block.first_row + block.rows, stop) - max(block.first_row, first),
                    {name: form.dtype for name, form in block.schema.items()},
                    max(first - block.first_row, 0),
                    numbers.get(block.handle, 0),
                )
                for block in blocks
                if block.first_row < stop and first < block.first_row + block.rows
            ]
            write = replace(whole.part(first, stop), blocks=entries)
            try:
                result = await self.control.produce(partition, write, named_by)
            except BlockGoneError:
                # A consumer was fast: it has claimed and cleared all that was written so far.
                await self._drop_unnamed(blocks, numbers)
                return written, schema
            except NotAdmittedError:
                await self._drop_unnamed(blocks, numbers)
                if not written:
                    raise
                return written, schema
            except (InputError, NotFoundError, PartitionEndedError, ServerFullError):
                # Refused for certain. After a lost connection or a cancelled call Redis may
                # name these blocks; there the sweep finds out.
                await self._drop_unnamed(blocks, numbers)
                raise
            numbers |= zip((entry.handle for entry in entries), result.numbers, strict=True)
            written += result.ids
            await self._free(partition, result.freed, deadline)
        return written, schema

    async def _put_bytes(
        self,
        partition: str,
        putting: Coroutine[Any, Any, list[WrittenBlock]],
        deadline: Deadline,
        reserve: int,
    ) -> tuple[list[WrittenBlock], int | None]:
        """Write the blocks, and meanwhile reserve so many ids, if any."""
        if not reserve:
            return await putting, None
        reserving = asyncio.create_task(self.control.reserve(partition, reserve, deadline))
        try:
            blocks = await putting
        except BaseException:
            reserving.cancel()
            await asyncio.gather(reserving, return_exceptions=True)
            raise
        try:
            return blocks, await reserving
        except BaseException:
            await self._drop_unnamed(blocks, {})
            raise

    async def _drop_unnamed(
        self, blocks: Sequence[WrittenBlock], numbers: Mapping[str, int]
    ) -> None:
        unnamed = [block.handle for block in blocks if block.handle not in numbers]
        await self.data.delete(unnamed, Deadline(ANSWER_S))

    async def _reset(self, loss: Loss, deadline: Deadline) -> DataLostError:
        """Mark the lost cells as not produced. Returns what the reader is told."""
        reset: dict[str, Lost] = {}
        notes: list[str] = []
        for partition, part in loss.parts.items():
            rows, fields, handles = sorted(part.rows), list(part.fields), list(part.handles)
            try:
                lost = await self.control.mark_lost(partition, rows, fields, handles, deadline)
                reset[partition] = lost
                await self._free(partition, lost.freed, deadline)
            except TQError as failure:
                what = (
                    f"The blocks that it leaves in partition {partition!r} are freed later"
                    if partition in reset
                    else f"Partition {partition!r} has them as produced until they are read again"
                )
                notes.append(f"{what}: {failure}")
        error = loss.described(reset)
        for note in notes:
            error.add_note(note)
        return error

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
