"""Columns on their way out: the wanted rows of one field, from one or more blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tq_redis.data.arenas import Memory
from tq_redis.data.base import Column
from tq_redis.data.nested import (
    Int64s,
    jagged_of_rows,
    jagged_of_values,
    offsets_of,
    strided_of_rows,
)
from tq_redis.data.pieces import Part, joined, joined_on
from tq_redis.data.spans import Span, expand
from tq_redis.data.tensors import Bytes, item_bytes, of_bytes, to_tensor
from tq_redis.data.values import ValueDecoder
from tq_redis.metadata.schema import FieldSchema

Buffer = npt.NDArray[Any]

_FIRST_ROW = np.zeros(1, np.int64)

# Values of other types have three or more (see columns.py).
_TEXT_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class Source:
    """Wanted rows of one field inside one block.

    Attributes:
        schema: the field as this block holds it.
        rows: number of rows of the block.
        buffers: the field's buffers (see columns.py).
        span: the wanted rows.
    """

    schema: FieldSchema
    rows: int
    buffers: Sequence[Buffer]
    span: Span


class Gatherer:
    """Gathers the fields of one get.

    Args:
        copy: False allows views of the blocks.
        allow_pickle: of values.
        device: where tensors go; None: main memory. Its current stream is used.
    """

    def __init__(
        self, *, copy: bool, allow_pickle: bool, device: torch.device | None = None
    ) -> None:
        self._copy = copy
        self._device = device
        self._memory = Memory()
        self._values = ValueDecoder(allow_pickle=allow_pickle)
        self._offsets: dict[bytes, torch.Tensor] = {}

    def column(self, sources: list[Source]) -> Column:
        """The rows of all sources as one column; see ``DataPlane.get``.

        Raises:
            UnsupportedValueError: a value was pickled, and this process may not unpickle.
        """
        schemas = {source.schema for source in sources}
        if len(schemas) == 1:
            (schema,) = schemas
            if schema.kind == "dense":
                return self._dense(schema, sources)
            if schema.kind == "jagged":
                return self._jagged(schema, sources)
            if schema.kind == "object":
                return [row for source in sources for row in self._rows(source)]
        column = _combine([row for source in sources for row in self._rows(source)], schemas)
        if self._device is None or isinstance(column, list):
            return column
        return column.to(self._device)

    def _dense(self, schema: FieldSchema, sources: list[Source]) -> torch.Tensor:
        row_bytes = prod(schema.shape) * item_bytes(schema.dtype)
        total = sum(source.span.rows for source in sources)
        parts = [
            Part(
                source.buffers[0].reshape(source.rows, row_bytes),
                source.span.firsts,
                source.span.counts,
                source.span.rows,
            )
            for source in sources
        ]
        return self._tensor(parts, row_bytes, schema.dtype, (total, *schema.shape))

    def _jagged(self, schema: FieldSchema, sources: list[Source]) -> torch.Tensor:
        ragged = schema.shape.index(-1) + 1
        inner = tuple(size for size in schema.shape if size != -1)
        row_bytes = prod(inner) * item_bytes(schema.dtype)
        parts: list[Part] = []
        lengths: list[Int64s] = []
        for source in sources:
            firsts, counts = source.span.firsts, source.span.counts
            if row_bytes and source.span.is_all_of(source.rows):  # as most blocks of few rows are
                data = source.buffers[1].reshape(-1, row_bytes)
                parts.append(Part(data, _FIRST_ROW, np.array([len(data)]), len(data)))
                lengths.append(source.buffers[0])
                continue
            ends = np.zeros(source.rows + 1, np.int64)
            np.cumsum(source.buffers[0], out=ends[1:])
            sizes = ends[firsts + counts] - ends[firsts]
            data = source.buffers[1].reshape(int(ends[-1]), row_bytes)
            parts.append(Part(data, ends[firsts], sizes, int(sizes.sum())))
            lengths.append(source.buffers[0][expand(firsts, counts)])
        all_lengths = np.concatenate(lengths)
        total = sum(part.rows for part in parts)
        values = self._tensor(parts, row_bytes, schema.dtype, (total, *inner))
        offsets = self._shared_offsets(all_lengths)
        return jagged_of_values(values, all_lengths, offsets, ragged)

    def _shared_offsets(self, lengths: Int64s) -> torch.Tensor:
        """Fields with equal lengths share one offsets tensor: torch then allows a * b."""
        key = lengths.tobytes()
        if key not in self._offsets:
            offsets = offsets_of(lengths)
            self._offsets[key] = offsets if self._device is None else offsets.to(self._device)
        return self._offsets[key]

    def _tensor(
        self, parts: list[Part], row_bytes: int, dtype: str, shape: tuple[int, ...]
    ) -> torch.Tensor:
        if self._device is None:
            return to_tensor(
                joined(parts, row_bytes, copy=self._copy, memory=self._memory), dtype, shape
            )
        return of_bytes(joined_on(self._device, parts, row_bytes), dtype, shape)

    def _rows(self, source: Source) -> list[Any]:
        """The wanted rows one by one; tensors are views of the block."""
        rows = expand(source.span.firsts, source.span.counts)
        if source.schema.kind == "object":
            if len(source.buffers) == _TEXT_BUFFERS:
                return _texts(source.buffers, rows)
            return [self._value(source.buffers, row) for row in rows.tolist()]
        shapes = _row_shapes(source)
        ends = np.cumsum(shapes.prod(axis=1)) * item_bytes(source.schema.dtype)
        sizes = np.diff(ends, prepend=0)
        data = source.buffers[-1]
        views: list[torch.Tensor] = []
        for row in rows.tolist():
            view = data[ends[row] - sizes[row] : ends[row]]
            views.append(_row(view, source.schema, tuple(shapes[row].tolist())))
        return views

    def _value(self, buffers: Sequence[Buffer], row: int) -> Any:
        text_ends, large_ends, text, *large = buffers
        text_from = text_ends[row - 1] if row else 0
        large_from = large_ends[row - 1] if row else 0
        return self._values.value(
            text.data[text_from : text_ends[row]], large[large_from : large_ends[row]]
        )


def _texts(buffers: Sequence[Buffer], rows: Int64s) -> list[str]:
    ends, text = buffers
    bounds = np.append(0, ends)
    lows, highs = bounds[rows].tolist(), bounds[rows + 1].tolist()
    return [str(text.data[low:high], "utf-8") for low, high in zip(lows, highs, strict=True)]


def _row_shapes(source: Source) -> Int64s:
    """int64[n, rank] shapes of all rows of the block."""
    schema = source.schema
    if schema.kind == "strided":
        return source.buffers[0].reshape(source.rows, len(schema.shape))
    shapes = np.tile(np.array(schema.shape, np.int64), (source.rows, 1))
    if schema.kind == "jagged":
        shapes[:, schema.shape.index(-1)] = source.buffers[0]
    return shapes


def _row(view: Bytes, schema: FieldSchema, shape: tuple[int, ...]) -> torch.Tensor:
    if schema.kind != "jagged":
        return to_tensor(view, schema.dtype, shape)
    ragged = schema.shape.index(-1)
    fronted = (shape[ragged], *shape[:ragged], *shape[ragged + 1 :])
    return to_tensor(view, schema.dtype, fronted).movedim(0, ragged)


def _combine(rows: list[Any], schemas: set[FieldSchema]) -> Column:
    """Rows of different form as one column of private memory."""
    kinds = {schema.kind for schema in schemas}
    alike = len({(schema.dtype, len(schema.shape)) for schema in schemas}) == 1
    if "object" not in kinds and alike:
        if "strided" in kinds:
            return strided_of_rows(rows)
        sizes = zip(*(schema.shape for schema in schemas), strict=True)
        ragged = [dim for dim, size in enumerate(sizes, 1) if len({*size}) > 1 or -1 in size]
        if len(ragged) == 1:
            return jagged_of_rows(rows, ragged[0])
    return [row.clone() if isinstance(row, torch.Tensor) else row for row in rows]
