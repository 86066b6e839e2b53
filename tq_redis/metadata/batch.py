"""BatchMeta: which samples, in which order, with which fields. A pure value; no I/O."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tq_redis.errors import InputError
from tq_redis.metadata.attached import Attached
from tq_redis.metadata.claim import Claims, PackedClaims, claim_of_each, pack_claims, unpack_claims
from tq_redis.metadata.described import Described
from tq_redis.metadata.merge import copied_tags, merge_info, merge_schemas, same_value
from tq_redis.metadata.rows import chunk_rows, require_permutation
from tq_redis.metadata.sample import SampleViews
from tq_redis.metadata.schema import FieldSchema, ReadyFlags, require_forms


class BatchMeta(Described, Attached):
    """A batch by reference: what a trainer passes around instead of tensors.

    Pickled, 1,024 rows take a few kilobytes; no tensor and no object ref is inside.

    Args:
        global_indexes: sample ids, in the order of the rows.
        partition_ids: the partition of each row, or one name for all.
        field_schema: the fields that the rows have, with their form.
        production_status: (B,) int8, 1 where all of the fields are produced; all 1 by default.
        extra_info: what belongs to the batch as a whole (``DataProto.meta_info`` in a worker).
        custom_meta: the tags of each row.
        padding: how many of the last rows only fill the batch up. They repeat real rows, are
            resolved like them, and are never written back.
        read_only: the holder must not write to the samples: another rank of its group, which has
            the same rows, does.
        claims: the claim under which each row is leased, or one for all; None where none is.
        task: the task for which all rows were claimed, with a lease or without; None: several, or
            none. What is put with this metadata is noted as that task's work, which the task may
            do again if the bytes are lost.

    Raises:
        InputError: lengths differ, a claim is not a :class:`Claim`, the form of a field not a
            :class:`FieldSchema`, or a task not a name.
    """

    __slots__ = (
        "claims",
        "custom_meta",
        "extra_info",
        "field_schema",
        "global_indexes",
        "padding",
        "partition_ids",
        "production_status",
        "read_only",
        "task",
    )

    def __init__(
        self,
        global_indexes: Iterable[int] = (),
        partition_ids: Sequence[str] | str = (),
        field_schema: Mapping[str, FieldSchema] | None = None,
        production_status: ReadyFlags | None = None,
        extra_info: Mapping[str, Any] | None = None,
        custom_meta: Sequence[Mapping[str, Any]] | None = None,
        *,
        padding: int = 0,
        read_only: bool = False,
        claims: Claims = None,
        task: str | None = None,
    ) -> None:
        # Plain integers, also where an array or a tensor was given.
        self.global_indexes = list(map(operator.index, global_indexes))
        size = len(self.global_indexes)
        one = isinstance(partition_ids, str)
        self.partition_ids = [partition_ids] * size if one else list(partition_ids)
        self.field_schema = require_forms(field_schema or {})
        self.production_status: ReadyFlags = (
            np.ones(size, np.int8)
            if production_status is None
            else np.array(production_status, np.int8)
        )
        self.extra_info: dict[str, Any] = dict(extra_info or {})
        self.custom_meta: list[dict[str, Any]] = (
            [{} for _ in range(size)] if custom_meta is None else copied_tags(custom_meta)
        )
        self.padding = padding
        self.read_only = read_only
        self.claims = claim_of_each(claims, size)
        self.task = task
        lengths = {
            "partition_ids": len(self.partition_ids),
            "production_status": len(self.production_status),
            "custom_meta": len(self.custom_meta),
            "claims": len(self.claims),
        }
        for name, length in lengths.items():
            if length != size:
                raise InputError(f"{name} has {length} entries for {size} samples")
        given: Any = task
        if given is not None and not (isinstance(given, str) and given):
            raise InputError(f"task must be a name or None, got {task!r}")
        if not 0 <= padding <= size:
            raise InputError(f"padding must lie between 0 and {size}, got {padding}")

    @classmethod
    def empty(cls, extra_info: Mapping[str, Any] | None = None) -> BatchMeta:
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
        return self.size > 0 and bool(self.production_status.all())

    @property
    def samples(self) -> SampleViews:
        """The rows one by one, read-only and made when asked for."""
        return SampleViews(self)

    @property
    def partition_id(self) -> str:
        """The partition, where it is the same for all rows.

        Raises:
            InputError: there is no row, or there are rows of several partitions.
        """
        names = set(self.partition_ids)
        if len(names) != 1:
            raise InputError(f"Expected rows of one partition, got {sorted(names)}")
        return self.partition_ids[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchMeta) and same_value(self._state(), other._state())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        where = ", ".join(sorted(set(self.partition_ids)))
        return f"BatchMeta({self.size} samples of {where or 'nowhere'}: {self.field_names})"

    def __getitem__(self, index: int | slice) -> BatchMeta:
        """These rows as a batch of their own; so does iteration, one row at a time."""
        if isinstance(index, slice):
            return self._rows(range(*index.indices(self.size)))
        if not -self.size <= index < self.size:
            raise IndexError(f"row {index} of a batch of {self.size}")
        return self._rows([index % self.size])

    # Rows

    def select_samples(self, indices: Sequence[int]) -> BatchMeta:
        """These rows, by position; a row may be named twice.

        Raises:
            InputError: a position is out of range.
        """
        outside = [i for i in indices if not 0 <= i < self.size]
        if outside:
            raise InputError(f"No rows {outside} in a batch of {self.size}")
        return self._rows(indices)

    def reorder(self, indices: Sequence[int]) -> None:
        """Put the rows into this order, in place.

        Raises:
            InputError: ``indices`` is not a permutation of the rows, or the batch is padded.
        """
        require_permutation(indices, self.size)
        if self.padding:
            raise InputError("A padded batch cannot be reordered; reorder before padding")
        ordered = self._rows(indices)
        self.global_indexes = ordered.global_indexes
        self.partition_ids = ordered.partition_ids
        self.production_status = ordered.production_status
        self.custom_meta = ordered.custom_meta
        self.claims = ordered.claims

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """``chunks`` consecutive parts; the first ``size % chunks`` are one row longer.

        Parts share nothing with each other or with this batch. Some are empty where there are more
        parts than rows. Padding rows stay what they are; :meth:`concat` drops them.

        Raises:
            InputError: ``chunks`` is not positive.
        """
        return [self._rows(rows) for rows in chunk_rows(self.size, chunks)]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """One part per partition, in the order in which partitions first appear."""
        positions: dict[str, list[int]] = {}
        for row, name in enumerate(self.partition_ids):
            positions.setdefault(name, []).append(row)
        return [self._rows(rows) for rows in positions.values()]

    def padded(self, divisor: int) -> BatchMeta:
        """This batch, filled up to a multiple of ``divisor`` by repeating its rows from the first.

        The rule of verl's ``pad_dataproto_to_divisor``.

        Raises:
            InputError: ``divisor`` is not positive, or the batch is padded already.
        """
        if divisor < 1:
            raise InputError(f"divisor must be positive, got {divisor}")
        missing = -self.size % divisor
        if not missing:
            return self.copy()
        if self.padding:
            raise InputError("This batch is padded already; pad what unpadded() gives")
        filled = self._rows([row % self.size for row in range(self.size + missing)])
        filled.padding = missing
        return filled

    def unpadded(self) -> BatchMeta:
        """The real rows."""
        return self._rows(range(self.size - self.padding))

    @classmethod
    def concat(cls, metas: Sequence[BatchMeta]) -> BatchMeta:
        """The same fields, more rows. Empty batches are passed over, padding rows dropped.

        The result is read-only if a part is, and has a task if all parts were claimed for that one.
        Parts are always checked against each other; transfer_queue's ``validate=False`` does not
        exist.

        Raises:
            InputError: fields or dtypes differ, or ``extra_info`` has two values for one name.
        """
        info = merge_info([meta.extra_info for meta in metas])
        real = [meta.unpadded() for meta in metas]
        parts = [part for part in real if part.size] or real[:1]
        if not parts:
            return cls.empty(info)
        schema = functools.reduce(merge_schemas, [part.field_schema for part in parts])
        tasks = {part.task for part in parts}
        return cls(
            [sample for part in parts for sample in part.global_indexes],
            [name for part in parts for name in part.partition_ids],
            schema,
            np.concatenate([part.production_status for part in parts]),
            info,
            [tags for part in parts for tags in part.custom_meta],
            read_only=any(part.read_only for part in parts),
            claims=[claim for part in parts for claim in part.claims],
            task=tasks.pop() if len(tasks) == 1 else None,
        )

    # Fields

    def select_fields(self, names: Iterable[str]) -> BatchMeta:
        """The same rows with only these fields; unknown names are passed over.

        Whether a row is ready stays as it is, also where the fields left are all produced.

        Raises:
            InputError: ``names`` is a single string.
        """
        if isinstance(names, str):
            raise InputError(f"Expected a list of field names, got the string {names!r}")
        chosen = self.copy()
        chosen.field_schema = {n: self.field_schema[n] for n in names if n in self.field_schema}
        return chosen

    def with_fields(self, schema: Mapping[str, FieldSchema]) -> BatchMeta:
        """The same rows with these fields too, which were produced for all of them."""
        wider = self.copy()
        if not wider.field_schema:
            # Rows without any field, as get_meta(mode="insert") makes them, lack nothing any more.
            wider.production_status[:] = 1
        wider.field_schema.update(require_forms(schema))
        return wider

    def union(self, other: BatchMeta) -> BatchMeta:
        """The same rows, more fields. ``other`` wins where both say something, but for claims.

        A row is ready if it is on both sides; the result is read-only if one side is. Claimed for
        two tasks, it has none. Of an empty batch and another, it is a copy of the other.

        Raises:
            InputError: the rows differ, stand in another order, or not the same ones are padding.
        """
        if not self.size or not other.size:
            return (other if other.size else self).copy()
        if self.global_indexes != other.global_indexes or self.partition_ids != other.partition_ids:
            raise InputError(
                "union needs the same samples in the same order on both sides; "
                "use concat to add rows, or reorder one side"
            )
        if self.padding != other.padding:
            raise InputError(
                f"union needs the same padding on both sides, got {self.padding} and "
                f"{other.padding} rows; use unpadded()"
            )
        both = self.copy()
        both.field_schema.update(other.field_schema)
        both.production_status = self.production_status & other.production_status
        both.extra_info |= copy.deepcopy(other.extra_info)
        both.update_custom_meta(copied_tags(other.custom_meta))
        both.read_only = self.read_only or other.read_only
        both.claims = [a or b for a, b in zip(self.claims, other.claims, strict=True)]
        tasks = {self.task, other.task} - {None}
        both.task = tasks.pop() if len(tasks) == 1 else None
        return both

    def copy(self) -> BatchMeta:
        """A deep copy."""
        return self._rows(range(self.size))

    # Inner parts

    def _rows(self, rows: Sequence[int]) -> BatchMeta:
        real = self.size - self.padding
        filling = [row >= real for row in rows]
        if filling != sorted(filling):
            raise InputError("A real row cannot stand behind a padding row; use unpadded() first")
        return BatchMeta(
            [self.global_indexes[row] for row in rows],
            [self.partition_ids[row] for row in rows],
            self.field_schema,
            self.production_status[list(rows)],
            copy.deepcopy(self.extra_info),
            [self.custom_meta[row] for row in rows],
            padding=sum(filling),
            read_only=self.read_only,
            claims=[self.claims[row] for row in rows],
            task=self.task,
        )

    def _state(self) -> tuple[Any, ...]:
        """Everything, compactly: what pickling sends and equality compares."""
        same = len(set(self.partition_ids)) == 1
        return (
            self.global_indexes,
            self.partition_ids[0] if same else self.partition_ids,
            self.field_schema,
            None if self.production_status.all() else self.production_status.tobytes(),
            self.extra_info,
            self.custom_meta if any(self.custom_meta) else None,
            self.padding,
            self.read_only,
            pack_claims(self.claims),
            self.task,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, self._state()


def _restore(
    ids: list[int],
    partitions: list[str] | str,
    schema: dict[str, FieldSchema],
    status: bytes | None,
    info: dict[str, Any],
    tags: list[dict[str, Any]] | None,
    padding: int,
    read_only: bool,
    claims: PackedClaims | None,
    task: str | None,
) -> BatchMeta:
    flags = None if status is None else np.frombuffer(status, np.int8)
    rows = unpack_claims(claims)
    return BatchMeta(
        ids,
        partitions,
        schema,
        flags,
        info,
        tags,
        padding=padding,
        read_only=read_only,
        claims=rows,
        task=task,
    )
