"""Samples by user key: the coroutines behind the key-value calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.base import TensorDictBase

from tq_redis import metadata as strict
from tq_redis.client.columns import DataParser, single_row
from tq_redis.client.kv import AsyncKVClient
from tq_redis.compat.transfer_queue.columns import jagged_tensordict, with_lists
from tq_redis.compat.transfer_queue.errors import (
    FieldsNotReadyError,
    KeyLookupError,
    KeysNotFoundError,
    KeyTypeError,
    StorageKeyNotFoundError,
)
from tq_redis.compat.transfer_queue.metadata import BatchMeta, KVBatchMeta
from tq_redis.compat.transfer_queue.metadata.schema import from_strict
from tq_redis.control.records import Rows
from tq_redis.data.given import Fields
from tq_redis.deadline import Deadline
from tq_redis.errors import (
    InputError,
    NotFoundError,
    NotReadyError,
    PartitionNotFoundError,
    SampleNotFoundError,
    shorten,
)

Keys = Sequence[str] | str
Tags = Mapping[str, Any]


class KVCalls:
    """Lenient calls on the strict client.

    Args:
        core: the client's coroutines.
    """

    def __init__(self, core: AsyncKVClient) -> None:
        self.core = core

    async def kv_put(
        self,
        key: str,
        partition_id: str,
        fields: Fields | None = None,
        tag: Tags | None = None,
        data_parser: DataParser | None = None,
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
            given: Any = fields
            if not isinstance(given, Mapping):
                raise InputError(f"fields must be a dict or a TensorDict, not {type(given)}")
            batch = single_row(fields)
        tags = None if tag is None else [tag]
        return await self.kv_batch_put([key], partition_id, batch, tags, data_parser)

    async def kv_batch_put(
        self,
        keys: Keys,
        partition_id: str,
        fields: Fields | None = None,
        tags: Sequence[Tags] | None = None,
        data_parser: DataParser | None = None,
    ) -> KVBatchMeta:
        """Write samples by key: make those whose key is new, add to the others.

        Args:
            keys: distinct.
            fields: columns with one row per key; other fields of the samples stay. A field may
                change its dtype.
            tags: one dict per key, merged into the sample's tags in one step, so that concurrent
                writers lose nothing.
            data_parser: makes the columns that are kept from these, with the same fields and rows.

        Returns:
            The samples with all their tags and the fields that all of them have.

        Raises:
            InputError: keys are empty or repeat, lengths differ, or there is nothing to write;
                nothing was written.
            KeyTypeError: a key is not a string.
        """
        names = key_list(keys)
        if fields is None and tags is None:
            raise InputError("Nothing to write: give fields, tags or both")
        if isinstance(fields, TensorDictBase) and fields.batch_size[0] != len(names):
            raise InputError(f"Got {fields.batch_size[0]} rows for {len(names)} keys")
        plain = None if tags is None else [plain_tags(row) for row in tags]
        columns: Any = with_lists(fields) if isinstance(fields, TensorDictBase) else fields
        if columns is not None and not list(columns.keys()):
            columns, plain = None, plain or [{} for _ in names]
        written = await self.core.kv_batch_put(
            names, partition_id, columns, plain, data_parser, overwrite=True
        )
        return KVBatchMeta(written.keys, written.tags, partition_id, written.fields)

    async def kv_batch_get(
        self, keys: Keys, partition_id: str, select_fields: Sequence[str] | str | None = None
    ) -> TensorDict:
        """The columns of samples, in the order of ``keys``; a key may stand twice.

        Keys that are not there are left out, and the rows behind them move up.

        Args:
            select_fields: the fields wanted; those that not all the samples have are left out. By
                default all that all have.

        Returns:
            Fresh, writable memory; tensors with a dimension are jagged. Without any field, a
            TensorDict of batch size (0,).

        Raises:
            KeysNotFoundError: no key is there. A ValueError.
            FieldsNotReadyError: the samples have no field in common. A ValueError.
            StorageKeyNotFoundError: samples were cleared meanwhile. A KeyError.
        """
        names = key_list(keys)
        deadline = Deadline(self.core.config.timeout_s)
        rows = await self._found(names, partition_id, deadline)
        if not rows.ids:
            raise KeysNotFoundError(
                f"Keys {shorten(names)} or partition {partition_id!r} were not found",
                partition=partition_id,
            )
        common = rows.common_fields()
        if not common:
            raise FieldsNotReadyError(
                f"Some fields are not ready in all the requested keys {shorten(names)}: they have "
                f"no field in common",
                partition=partition_id,
                rows=rows.ids,
            )
        if select_fields is not None:
            wanted = [select_fields] if isinstance(select_fields, str) else select_fields
            common = [name for name in dict.fromkeys(wanted) if name in common]
        return await self._columns(strict.BatchMeta(rows.ids, partition_id), common, deadline)

    async def kv_batch_get_by_meta(
        self, meta: KVBatchMeta, select_fields: Sequence[str] | str | None = None
    ) -> TensorDict:
        """As :meth:`kv_batch_get`; ``meta.fields`` are the default.

        Raises:
            InputError: the metadata names no partition, or lacks a field that is asked for.
        """
        if meta.partition_id is None:
            raise InputError("The metadata names no partition_id")
        wanted = meta.fields
        if select_fields is not None:
            wanted = [select_fields] if isinstance(select_fields, str) else list(select_fields)
            lacking = [name for name in wanted if name not in (meta.fields or ())]
            if lacking:
                raise InputError(
                    f"Some fields assigned in select_fields not found in the metadata: {lacking}; "
                    f"it has {meta.fields}",
                    fields=lacking,
                )
        return await self.kv_batch_get(meta.keys, meta.partition_id, wanted)

    async def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        """partition -> key -> tags, in the order in which samples were made. Samples without a
        key are left out; an unknown partition gives an empty dict."""
        return await self.core.kv_list(partition_id)

    async def kv_clear(self, keys: Keys, partition_id: str) -> None:
        """Forget samples by key and free their bytes. Unknown keys are passed over; the partition
        stays.

        Raises:
            InputError: keys are empty.
            KeyTypeError: a key is not a string.
        """
        await self.core.kv_clear(key_list(keys), partition_id)

    async def kv_retrieve_meta(
        self, keys: Keys, partition_id: str, create: bool = False
    ) -> BatchMeta:
        """The samples of these keys, with the fields that all of them have.

        Args:
            create: make samples for keys that are new; else these are left out.

        Raises:
            InputError: keys are empty.
            KeyTypeError: a key is not a string.
        """
        names = key_list(keys)
        deadline = Deadline(self.core.config.timeout_s)
        if create:
            await self.core.kv_retrieve_meta(
                names, partition_id, create=True, timeout=deadline.remaining
            )
        rows = await self._found(names, partition_id, deadline)
        return described(rows, partition_id, rows.common_fields())

    async def kv_retrieve_keys(
        self, global_indexes: Sequence[int] | int, partition_id: str
    ) -> list[str]:
        """The user key of each sample.

        Raises:
            KeyLookupError: a sample has no key, or was cleared. A RuntimeError.
        """
        try:
            return await self.core.kv_retrieve_keys(global_indexes, partition_id)
        except NotFoundError as error:
            raise KeyLookupError(error.message, partition=partition_id, rows=error.rows) from error

    # Inner parts

    async def _found(self, keys: Sequence[str], partition: str, deadline: Deadline) -> Rows:
        """The rows of those keys that are there."""
        try:
            rows = await self.core.control.describe(partition, deadline, keys=keys)
        except PartitionNotFoundError:
            return Rows([], [], [], {}, {}, [], [])
        there = [place for place, sample in enumerate(rows.ids) if sample]
        return Rows(
            [rows.ids[place] for place in there],
            [rows.keys[place] for place in there],
            [rows.tags[place] for place in there],
            rows.schema,
            {name: [flags[i] for i in there] for name, flags in rows.produced.items()},
            [],
            [],
        )

    async def _columns(
        self, where: strict.BatchMeta, fields: Sequence[str], deadline: Deadline
    ) -> TensorDict:
        if not fields or not where.size:
            return TensorDict({}, batch_size=[0])
        try:
            columns = await self.core.get_columns(where, fields, timeout=deadline.remaining)
        except (SampleNotFoundError, PartitionNotFoundError) as error:
            raise StorageKeyNotFoundError(
                error.message, partition=error.partition, rows=error.rows
            ) from error
        except NotReadyError as error:
            raise FieldsNotReadyError(
                error.message, partition=error.partition, fields=error.fields, rows=error.rows
            ) from error
        return jagged_tensordict(columns, where.size)


def described(rows: Rows, partition: str, fields: Sequence[str]) -> BatchMeta:
    """Metadata of rows; a row is ready if it has all the fields, of which there are some."""
    flags = np.full(len(rows.ids), bool(fields), np.int8)
    for name in fields:
        flags &= np.array(rows.produced.get(name, [False] * len(rows.ids)), np.int8)
    schema = from_strict({name: rows.schema[name] for name in fields if name in rows.schema})
    names = [partition] * len(rows.ids)
    meta = BatchMeta(rows.ids, names, schema, flags, custom_meta=rows.tags)
    meta.note_tags()
    return meta


def key_list(keys: Keys) -> list[str]:
    """Raises:
    InputError: there is none, or one is empty.
    KeyTypeError: one is not a string.
    """
    names: list[Any] = [keys] if isinstance(keys, str) else list(keys)
    if not names:
        raise InputError("Received an empty list as keys")
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise KeyTypeError(f"Keys must be strings, got {shorten(wrong)}")
    return names


def plain_tags(tags: Tags) -> dict[str, Any]:
    """Tags whose numbers come from arrays and tensors, as JSON has numbers."""
    return {name: _plain(value) for name, value in tags.items()}


def _plain(value: Any) -> Any:
    numbers: Any = value
    return numbers.tolist() if isinstance(value, np.generic | np.ndarray | torch.Tensor) else value
