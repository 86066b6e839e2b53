"""BatchMeta: which rows, in which order, with which fields. A pure value; no I/O."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from tq_redis.compat.transfer_queue.metadata.described import Described
from tq_redis.compat.transfer_queue.metadata.sample import SampleViews
from tq_redis.compat.transfer_queue.metadata.schema import (
    PER_ROW,
    Form,
    Schema,
    concat_schemas,
    rows_of_schema,
)
from tq_redis.errors import InputError, shorten
from tq_redis.metadata.attached import Attached
from tq_redis.metadata.merge import copied_tags, merge_info, same_value
from tq_redis.metadata.rows import chunk_rows, require_permutation
from tq_redis.metadata.schema import ReadyFlags

Tags = dict[str, Any]


class BatchMeta(Described, Attached):
    """A batch by reference, as transfer_queue has it.

    Args:
        global_indexes: sample ids, in the order of the rows.
        partition_ids: the partition of each row.
        field_schema: field -> form, as in :mod:`tq_redis.compat.transfer_queue.metadata.schema`.
        production_status: (B,) int8, 1 where all of the fields are produced; all 0 by default.
        extra_info: what belongs to the batch as a whole.
        custom_meta: the tags of each row.

    Raises:
        InputError: lengths differ.
    """

    __slots__ = (
        "_custom_backend_meta",
        "custom_meta",
        "extra_info",
        "field_schema",
        "global_indexes",
        "known_tags",
        "partition_ids",
        "production_status",
    )

    def __init__(
        self,
        global_indexes: Iterable[int] = (),
        partition_ids: Iterable[str] = (),
        field_schema: Mapping[str, Form] | None = None,
        production_status: Sequence[int] | ReadyFlags | None = None,
        extra_info: Mapping[str, Any] | None = None,
        custom_meta: Sequence[Mapping[str, Any]] | None = None,
        _custom_backend_meta: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.global_indexes = list(global_indexes)
        self.partition_ids = list(partition_ids)
        size = len(self.global_indexes)
        self.field_schema: Schema = {n: dict(form) for n, form in (field_schema or {}).items()}
        self.production_status: ReadyFlags = (
            np.zeros(size, np.int8)
            if production_status is None
            else np.array(production_status, np.int8)
        )
        self.extra_info: dict[str, Any] = dict(extra_info or {})
        self.custom_meta: list[Tags] = _row_dicts(custom_meta, size)
        self._custom_backend_meta: list[Tags] = _row_dicts(_custom_backend_meta, size)
        self.known_tags: list[Tags] | None = None
        lengths = {
            "partition_ids": len(self.partition_ids),
            "production_status": len(self.production_status),
            "custom_meta": len(self.custom_meta),
            "_custom_backend_meta": len(self._custom_backend_meta),
        } | {
            f"{PER_ROW} of field {name!r}": len(form[PER_ROW])
            for name, form in self.field_schema.items()
            if form.get(PER_ROW) is not None
        }
        for name, length in lengths.items():
            if length != size:
                raise InputError(f"{name} has {length} entries for {size} rows")

    @classmethod
    def empty(cls, extra_info: Mapping[str, Any] | None = None) -> Self:
        """A batch without rows."""
        return cls(extra_info=extra_info)

    # What it holds

    @property
    def size(self) -> int:
        return len(self.global_indexes)

    def __len__(self) -> int:
        return self.size

    @property
    def is_ready(self) -> bool:
        """True if there are rows and all have all fields."""
        return self.size > 0 and bool((self.production_status == 1).all())

    @property
    def samples(self) -> SampleViews:
        """The rows one by one, read-only and made when asked for."""
        return SampleViews(self)

    def __getitem__(self, item: int | slice) -> Self:
        """These rows as a batch of their own; so does iteration, one row at a time."""
        if isinstance(item, slice):
            return self._rows(range(*item.indices(self.size)))
        if isinstance(item, int | np.integer):  # pyright: ignore[reportUnnecessaryIsInstance]
            if not -self.size <= item < self.size:
                raise IndexError(f"row {item} of a batch of {self.size}")
            return self._rows([int(item) % self.size])
        raise TypeError(f"A batch is indexed by integers and slices, not {type(item).__name__}")

    def __str__(self) -> str:
        return (
            f"BatchMeta(size={self.size}, field_names={self.field_names}, "
            f"is_ready={self.is_ready}, global_indexes={self.global_indexes}, "
            f"extra_info={self.extra_info})"
        )

    # Rows

    def select_samples(self, sample_indices: Sequence[int]) -> Self:
        """These rows, by position; a row may be named twice.

        Raises:
            InputError: a position is out of range.
        """
        outside = [row for row in sample_indices if not 0 <= row < self.size]
        if outside:
            raise InputError(f"No rows {shorten(outside)} in a batch of {self.size}")
        return self._rows(sample_indices)

    def reorder(self, indices: Sequence[int]) -> None:
        """Put the rows into this order, in place.

        Raises:
            InputError: ``indices`` is not a permutation of the rows.
        """
        require_permutation(indices, self.size)
        self.__setstate__(self._rows(indices).__getstate__())

    def chunk(self, chunks: int) -> list[Self]:
        """``chunks`` consecutive parts; the first ``size % chunks`` are one row longer.

        Raises:
            InputError: ``chunks`` is not positive.
        """
        return [self._rows(rows) for rows in chunk_rows(self.size, chunks)]

    def chunk_by_partition(self) -> list[Self]:
        """One part per partition, in the order in which partitions first appear."""
        positions: dict[str, list[int]] = {}
        for row, name in enumerate(self.partition_ids):
            positions.setdefault(name, []).append(row)
        return [self._rows(rows) for rows in positions.values()]

    @classmethod
    def concat(cls, data: Sequence[Self], validate: bool = True) -> Self:
        """The same fields, more rows; empty batches are passed over.

        Args:
            validate: whether the batches must have the same fields, of the same dtypes.

        Raises:
            InputError: they have not, or ``extra_info`` has two values for one name.
        """
        parts = [part for part in data if part]
        if not parts:
            return cls.empty()
        if validate:
            for part in parts[1:]:
                _require_same_fields(parts[0], part)
        joined = cls(
            [sample for part in parts for sample in part.global_indexes],
            [name for part in parts for name in part.partition_ids],
            concat_schemas([(part.field_schema, part.size) for part in parts]),
            np.concatenate([part.production_status for part in parts]),
            merge_info([part.extra_info for part in parts]),
            [tags for part in parts for tags in part.custom_meta],
            [meta for part in parts for meta in part._custom_backend_meta],
        )
        if all(part.known_tags is not None for part in parts):
            joined.known_tags = [tags for part in parts for tags in part.known_tags or ()]
        return joined

    # Fields

    def select_fields(self, field_names: Sequence[str]) -> Self:
        """The same rows with only these fields; unknown names are passed over. Whether a row is
        ready stays as it is."""
        chosen = self.copy()
        chosen.field_schema = {
            name: chosen.field_schema[name] for name in field_names if name in chosen.field_schema
        }
        return chosen

    def union(self, other: Self) -> Self:
        """The same rows, more fields. ``other`` wins where both say something.

        A row is ready if it is on both sides. Of an empty batch and another, it is a copy of the
        other.

        Raises:
            InputError: the rows differ, or stand in another order.
        """
        if not self.size or not other:
            return (other if other else self).copy()
        if self.global_indexes != other.global_indexes or self.partition_ids != other.partition_ids:
            raise InputError("union needs the same rows in the same order on both sides")
        both, more = self.copy(), other.copy()
        both.field_schema |= more.field_schema
        both.production_status &= more.production_status
        both.extra_info |= more.extra_info
        both.update_custom_meta(more.custom_meta)
        for mine, theirs in zip(both._custom_backend_meta, more._custom_backend_meta, strict=True):
            mine.update(theirs)
        return both

    def copy(self) -> Self:
        """A deep copy."""
        return self._rows(range(self.size))

    # Tags

    def changed_tags(self) -> list[Tags]:
        """Per row, the tags that are new or other than when they were read from the queue."""
        known = self.known_tags or [Tags()] * self.size
        return [
            {
                name: value
                for name, value in now.items()
                if name not in old or not same_value(old[name], value)
            }
            for now, old in zip(self.custom_meta, known, strict=True)
        ]

    def note_tags(self) -> None:
        """Remember that the queue has these tags."""
        self.known_tags = copied_tags(self.custom_meta)

    # Inner parts

    def _rows(self, rows: Sequence[int]) -> Self:
        part = type(self)(
            [self.global_indexes[row] for row in rows],
            [self.partition_ids[row] for row in rows],
            rows_of_schema(self.field_schema, rows),
            self.production_status[list(rows)],
            copy.deepcopy(self.extra_info),
            copied_tags([self.custom_meta[row] for row in rows]),
            copied_tags([self._custom_backend_meta[row] for row in rows]),
        )
        if self.known_tags is not None:
            part.known_tags = [self.known_tags[row] for row in rows]
        return part

    def __getstate__(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        for name, value in zip(self.__slots__, state, strict=True):
            setattr(self, name, value)
        # Ray gives arrays that cannot be written to.
        self.production_status = np.array(self.production_status, np.int8)


def _row_dicts(given: Sequence[Mapping[str, Any]] | None, size: int) -> list[Tags]:
    return [dict(row) for row in given] if given else [{} for _ in range(size)]


def _require_same_fields(first: BatchMeta, other: BatchMeta) -> None:
    if first.field_names != other.field_names:
        raise InputError(
            f"concat needs the same fields in every batch: {first.field_names} and "
            f"{other.field_names}"
        )
    for name, form in first.field_schema.items():
        if form.get("dtype") != other.field_schema[name].get("dtype"):
            raise InputError(
                f"concat needs one dtype per field: {name!r} is {form.get('dtype')} and "
                f"{other.field_schema[name].get('dtype')}",
                fields=[name],
            )
