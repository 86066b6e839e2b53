"""KVBatchMeta: a batch named by user keys."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from tq_redis.errors import InputError, KeyNotFoundError, shorten
from tq_redis.metadata.merge import copied_tags, merge_info, same_value
from tq_redis.metadata.rows import chunk_rows, require_permutation


@dataclass(repr=False, eq=False)
class KVBatchMeta:
    """Samples of one partition by their user keys.

    Attributes:
        keys: user keys, distinct.
        tags: one dict per key.
        partition_id: the partition.
        fields: fields that all the samples have, or None where that is not known.
        extra_info: what belongs to the batch as a whole; None, as transfer_queue has it where there
            is nothing, becomes an empty dict.

    Raises:
        InputError: lengths differ, or a key or field stands twice.
    """

    keys: list[str] = field(default_factory=list[str])
    tags: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tags):
            raise InputError(f"Got {len(self.keys)} keys and {len(self.tags)} tags")
        if len(set(self.keys)) != len(self.keys):
            raise InputError(f"Keys must be distinct, got {shorten(self.keys)}")
        if self.fields is not None and len(set(self.fields)) != len(self.fields):
            raise InputError(f"Fields must be distinct, got {self.fields}")
        self.keys = list(self.keys)
        self.tags = copied_tags(self.tags)
        self.fields = None if self.fields is None else list(self.fields)
        self.extra_info = copy.deepcopy(self.extra_info or {})

    @property
    def size(self) -> int:
        return len(self.keys)

    def __len__(self) -> int:
        return self.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KVBatchMeta) and same_value(self._state(), other._state())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = "fields unknown" if self.fields is None else self.fields
        return f"KVBatchMeta({self.size} keys of {self.partition_id or 'nowhere'}: {fields})"

    def select_keys(self, keys: Sequence[str]) -> Self:
        """These samples, in this order.

        Raises:
            InputError: a key stands twice.
            KeyNotFoundError: a key is not in the batch. It is a KeyError, where transfer_queue
                raises RuntimeError.
        """
        rows = {key: row for row, key in enumerate(self.keys)}
        unknown = [key for key in keys if key not in rows]
        if unknown:
            raise KeyNotFoundError(
                f"Keys {shorten(unknown)} are not in the batch", partition=self.partition_id
            )
        return self._rows([rows[key] for key in keys])

    def reorder(self, indices: Sequence[int]) -> None:
        """Put the samples into this order, in place.

        Raises:
            InputError: ``indices`` is not a permutation of the rows.
        """
        require_permutation(indices, self.size)
        self.keys = [self.keys[row] for row in indices]
        self.tags = [self.tags[row] for row in indices]

    def chunk(self, chunks: int) -> list[Self]:
        """``chunks`` consecutive parts; the first ``size % chunks`` are one sample longer.

        Parts share nothing with each other or with this batch. Some are empty where there are more
        parts than samples.

        Raises:
            InputError: ``chunks`` is not positive.
        """
        return [self._rows(rows) for rows in chunk_rows(self.size, chunks)]

    @classmethod
    def concat(cls, metas: Sequence[KVBatchMeta]) -> Self:
        """More samples of the same partition; empty batches are passed over.

        Raises:
            InputError: partitions or fields differ, a key stands twice, or ``extra_info`` has two
                values for one name.
        """
        info = merge_info([meta.extra_info for meta in metas])
        parts = [meta for meta in metas if meta.size] or list(metas[:1])
        if not parts:
            return cls(extra_info=info)
        first = parts[0]
        for part in parts[1:]:
            if part.partition_id != first.partition_id:
                raise InputError(
                    f"concat needs one partition: {first.partition_id!r} and {part.partition_id!r}"
                )
            if set(part.fields or ()) != set(first.fields or ()):
                raise InputError(f"concat needs the same fields: {first.fields} and {part.fields}")
        return cls(
            [key for part in parts for key in part.keys],
            [tags for part in parts for tags in part.tags],
            first.partition_id,
            first.fields,
            info,
        )

    def _state(self) -> tuple[Any, ...]:
        return self.keys, self.tags, self.partition_id, self.fields, self.extra_info

    def _rows(self, rows: Sequence[int]) -> Self:
        return type(self)(
            [self.keys[row] for row in rows],
            [self.tags[row] for row in rows],
            self.partition_id,
            self.fields,
            self.extra_info,
        )
