"""Samples by user key: put, get, list and clear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict
from tensordict.base import TensorDictBase

from tq_redis.client.checkpoint import CheckpointCalls
from tq_redis.client.columns import DataParser, checked, single_row
from tq_redis.client.listing import Listings, text_of, version_of
from tq_redis.config import Config
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Rows, Write
from tq_redis.data import DataPlane
from tq_redis.data.base import Column
from tq_redis.data.devices import Device
from tq_redis.data.given import Fields, row_count, to_columns
from tq_redis.deadline import Deadline
from tq_redis.errors import InputError, KeyNotFoundError, PartitionNotFoundError, shorten
from tq_redis.metadata import BatchMeta, KVBatchMeta

Tags = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class KVChanges:
    """What has changed among the keys of a partition.

    Attributes:
        version: what this goes up to: ``since`` of the next call.
        tags: key -> all its tags, of keys that are new or whose tags changed.
        removed: keys that were cleared.
        whole: ``tags`` are all keys there are, in the order of their samples: the partition is
            another one than before, there was no ``since``, or too much has changed since then.
    """

    version: str
    tags: dict[str, dict[str, Any]]
    removed: list[str]
    whole: bool


class AsyncKVClient(CheckpointCalls):
    """The client, with access by user key."""

    def __init__(self, config: Config, control: ControlPlane, data: DataPlane, name: str) -> None:
        super().__init__(config, control, data, name)
        self._listings = Listings(control)

    async def kv_put(
        self,
        key: str,
        partition_id: str,
        fields: Fields | None = None,
        tag: Tags | None = None,
        data_parser: DataParser | None = None,
        *,
        overwrite: bool = False,
        timeout: float | None = None,
    ) -> KVBatchMeta:
        """Write one sample: make it where the key is new, else add to it.

        Args:
            fields: a TensorDict of batch size (1,), or field -> value of this sample (a tensor
                without batch dimension, or any value).
            tag: merged into the sample's tags.

        See :meth:`kv_batch_put`.
        """
        batch: Fields | None = fields
        if fields is not None and not isinstance(fields, TensorDictBase):
            batch = single_row(fields)
        return await self.kv_batch_put(
            [key],
            partition_id,
            batch,
            None if tag is None else [tag],
            data_parser,
            overwrite=overwrite,
            timeout=timeout,
        )

    async def kv_batch_put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: Fields | None = None,
        tags: Sequence[Tags] | None = None,
        data_parser: DataParser | None = None,
        *,
        overwrite: bool = False,
        timeout: float | None = None,
    ) -> KVBatchMeta:
        """Write samples by key: make those whose key is new, add to the others.

        Args:
            keys: distinct.
            fields: columns with one row per key; other fields of the samples stay.
            data_parser: as in ``put``.
            tags: one dict per key, merged into the sample's tags in one step, so that concurrent
                writers lose nothing.
            overwrite: allow a field to change its dtype.

        Returns:
            The samples with all their tags and the fields that all of them have.

        Raises:
            InputError: keys are empty or repeat, lengths differ, or there is nothing to write;
                nothing was written.
            SchemaConflictError: a field would change dtype.
            PartitionFullError: there was no room for new samples within the limits of tasks.
        """
        names = _check_keys(keys, distinct=True)
        if fields is None and tags is None:
            raise InputError("Nothing to write: give fields, tags or both")
        if tags is not None and len(tags) != len(names):
            raise InputError(f"Got {len(tags)} tags for {len(names)} keys")
        deadline = self._deadline(timeout)
        if fields is None:
            write = Write(len(names), keys=names, tags=tags)
            await self._register(partition_id, write, deadline)
        else:
            await self._write(
                partition_id,
                _columns_for(names, fields),
                deadline,
                parser=checked(data_parser),
                keys=names,
                tags=tags,
                overwrite=overwrite,
            )
        rows = await self.control.describe(partition_id, deadline, keys=names)
        return KVBatchMeta(names, rows.tags, partition_id, rows.common_fields())

    async def kv_batch_get(
        self,
        keys: Sequence[str] | str,
        partition_id: str,
        select_fields: Sequence[str] | str | None = None,
        *,
        device: Device | None = None,
        timeout: float | None = None,
    ) -> TensorDict:
        """The columns of samples, in the order of ``keys``; a key may stand twice.

        Args:
            select_fields: the fields wanted; by default those that all the samples have.
            device: where tensors go, as in ``get_columns``; main memory by default.

        Raises:
            KeyNotFoundError, PartitionNotFoundError: names the missing keys.
            FieldNotFoundError, NotReadyError: a field is unknown, or not produced for some rows.
        """
        names = _check_keys([keys] if isinstance(keys, str) else keys)
        deadline = self._deadline(timeout)
        rows = await self._rows_of(names, partition_id, deadline)
        if select_fields is None:
            wanted = rows.common_fields()
        else:
            wanted = [select_fields] if isinstance(select_fields, str) else list(select_fields)
        meta = BatchMeta(rows.ids, partition_id)
        return await self.get_data(meta, wanted, device=device, timeout=deadline.remaining)

    async def kv_batch_get_by_meta(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str] | str | None = None,
        *,
        device: Device | None = None,
        timeout: float | None = None,
    ) -> TensorDict:
        """As :meth:`kv_batch_get`; ``meta.fields`` are the default.

        Raises:
            InputError: the metadata names no partition, or lacks a field that is asked for.
        """
        if meta.partition_id is None:
            raise InputError("The metadata names no partition")
        wanted = [select_fields] if isinstance(select_fields, str) else select_fields
        lacking = [name for name in wanted or () if name not in (meta.fields or (name,))]
        if lacking:
            raise InputError(f"Fields {lacking} are not in the metadata, which has {meta.fields}")
        return await self.kv_batch_get(
            meta.keys, meta.partition_id, wanted or meta.fields, device=device, timeout=timeout
        )

    async def kv_list(
        self, partition_id: str | None = None, *, timeout: float | None = None
    ) -> dict[str, dict[str, dict[str, Any]]]:
        """partition -> key -> tags, in the order in which samples were made. Samples without a
        key are left out; an unknown partition gives an empty dict."""
        deadline = self._deadline(timeout)
        if partition_id is None:
            names = await self.control.partitions(deadline)
        else:
            names = [partition_id]
        listed: dict[str, dict[str, dict[str, Any]]] = {}
        for name in names:
            with suppress(PartitionNotFoundError):  # cleared since it was listed
                listed[name] = await self._listings.tags(name, deadline)
        return listed

    async def kv_list_changes(
        self, partition_id: str, since: str | None = None, *, timeout: float | None = None
    ) -> KVChanges:
        """What has changed among the keys of a partition, and their tags, since an earlier call.
        Its cost is that of what has changed.

        Args:
            since: ``version`` of that call's result.

        Raises:
            InputError: ``since`` is no version.
            PartitionNotFoundError: there is no such partition.
        """
        deadline = self._deadline(timeout)
        changes = await self.control.changes(partition_id, version_of(since), deadline)
        tags = {key: changes.tags[key] for key, sample in changes.samples.items() if sample}
        removed = [key for key, sample in changes.samples.items() if not sample]
        return KVChanges(text_of(changes.version), tags, removed, changes.whole)

    async def kv_clear(
        self, keys: Sequence[str] | str, partition_id: str, *, timeout: float | None = None
    ) -> None:
        """Forget samples by key and free their bytes. Unknown keys are passed over; can be
        repeated. The partition stays."""
        names = _check_keys([keys] if isinstance(keys, str) else keys)
        deadline = self._deadline(timeout)
        try:
            rows = await self.control.describe(partition_id, deadline, keys=names, fields=())
        except PartitionNotFoundError:
            return
        found = BatchMeta([sample for sample in rows.ids if sample], partition_id)
        await self.clear_samples(found, timeout=deadline.remaining)

    async def kv_retrieve_meta(
        self,
        keys: Sequence[str] | str,
        partition_id: str,
        create: bool = False,
        *,
        timeout: float | None = None,
    ) -> BatchMeta:
        """The samples of these keys, with the fields that all of them have.

        Args:
            create: make samples for keys that are new.

        Raises:
            KeyNotFoundError, PartitionNotFoundError: a key is unknown and ``create`` is False.
        """
        names = _check_keys([keys] if isinstance(keys, str) else keys)
        deadline = self._deadline(timeout)
        if create:
            distinct = list(dict.fromkeys(names))
            write = Write(len(distinct), keys=distinct)
            await self._register(partition_id, write, deadline)
        rows = await self._rows_of(names, partition_id, deadline)
        common = rows.common_fields()
        schema = {name: rows.schema[name] for name in common}
        return BatchMeta(rows.ids, partition_id, schema, custom_meta=rows.tags)

    async def kv_retrieve_keys(
        self,
        global_indexes: Sequence[int] | int,
        partition_id: str,
        *,
        timeout: float | None = None,
    ) -> list[str]:
        """The user key of each sample.

        Raises:
            KeyNotFoundError: a sample has no key, or was cleared.
        """
        ids = [global_indexes] if isinstance(global_indexes, int) else list(global_indexes)
        rows = await self.control.describe(
            partition_id, self._deadline(timeout), ids=ids, fields=()
        )
        lacking = [sample for sample, key in zip(ids, rows.keys, strict=True) if key is None]
        if lacking:
            raise KeyNotFoundError(
                f"Samples {shorten(lacking)} of partition {partition_id!r} have no user key",
                partition=partition_id,
                rows=lacking,
            )
        return [key for key in rows.keys if key is not None]

    async def _rows_of(self, keys: Sequence[str], partition: str, deadline: Deadline) -> Rows:
        rows = await self.control.describe(partition, deadline, keys=keys)
        missing = [key for key, sample in zip(keys, rows.ids, strict=True) if not sample]
        if missing:
            raise KeyNotFoundError(
                f"Partition {partition!r} has no keys {shorten(missing)}", partition=partition
            )
        return rows


def _check_keys(keys: Sequence[str], *, distinct: bool = False) -> list[str]:
    names = list(keys)
    if not names:
        raise InputError("keys is empty")
    bad = [key for key in names if not isinstance(key, str) or not key]  # pyright: ignore[reportUnnecessaryIsInstance]
    if bad:
        raise InputError(f"Keys must be non-empty strings, got {shorten(bad)}")
    if distinct and len(set(names)) != len(names):
        repeated = sorted({key for key in names if names.count(key) > 1})
        raise InputError(f"Keys must be distinct, got {shorten(repeated)} more than once")
    return names


def _columns_for(keys: Sequence[str], fields: Fields) -> dict[str, Column]:
    columns = to_columns(fields)
    if row_count(columns) != len(keys):
        raise InputError(f"Got {row_count(columns)} rows for {len(keys)} keys", fields=columns)
    return columns
