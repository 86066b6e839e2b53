"""Columns on their way in: checked, then cut by rows into plain buffers.

What each kind of field leaves in a block (all buffers are flat, row i of n):

========  ==========================================================================
dense     data: rows one after another
jagged    lengths: int64[n]; data: rows one after another, ragged dimension first
strided   shapes: int64[n, rank]; data: rows one after another
text      ends: int64[n]; text: UTF-8 of the rows one after another
object    text_ends: int64[n]; large_ends: int64[n]; text: msgpack of the rows;
          then the large buffers of all rows (see values.py)
========  ==========================================================================

A column of texts is of the kind ``object``, and known by its two buffers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tq_redis.data.base import Column
from tq_redis.data.nested import Int64s, take_apart
from tq_redis.data.spans import copy_rows
from tq_redis.data.tensors import dtype_name, to_bytes, why_not_storable
from tq_redis.data.values import UnsupportedValueError, ValueEncoder
from tq_redis.errors import InputError
from tq_redis.metadata.schema import FieldSchema

Buffer = npt.NDArray[Any]


class Cuttable(ABC):
    """A column that can be cut by rows.

    Attributes:
        schema: what the field holds.
        ends: int64[B], the bytes up to the end of each row.
        device: the type of the device that it comes from.
    """

    schema: FieldSchema
    ends: Int64s
    device: str = "cpu"

    @abstractmethod
    def cut(self, first: int, last: int) -> list[Buffer]:
        """The buffers of rows ``first`` to ``last`` (excluded)."""


class _Dense(Cuttable):
    def __init__(self, column: torch.Tensor) -> None:
        self.schema = FieldSchema("dense", dtype_name(column.dtype), tuple(column.shape[1:]))
        self.device = column.device.type
        self._column = column.detach()
        row_bytes = column[0].numel() * column.element_size()
        self.ends = np.arange(1, column.shape[0] + 1, dtype=np.int64) * row_bytes

    def cut(self, first: int, last: int) -> list[Buffer]:
        return [to_bytes(self._column[first:last])]


class _Jagged(Cuttable):
    def __init__(self, column: torch.Tensor) -> None:
        parts = take_apart(column)
        self.schema, self.device = parts.schema, parts.values.device.type
        self._starts, self._lengths, self._gaps = parts.starts, parts.lengths, parts.gaps
        inner = prod(parts.values.shape[1:]) * parts.values.element_size()
        self._values = to_bytes(parts.values).reshape(parts.values.shape[0], inner)
        self.ends = np.cumsum(self._lengths) * inner

    def cut(self, first: int, last: int) -> list[Buffer]:
        starts, lengths = self._starts[first:last], self._lengths[first:last]
        begin, size = int(starts[0]), int(lengths.sum())
        if not self._gaps or np.array_equal(starts - begin, np.cumsum(lengths) - lengths):
            return [lengths, self._values[begin : begin + size].reshape(-1)]
        data = np.empty((size, self._values.shape[1]), np.uint8)
        copy_rows(data, self._values, starts, lengths)
        return [lengths, data.reshape(-1)]


class _Strided(Cuttable):
    def __init__(self, column: torch.Tensor) -> None:
        rows = column.unbind()
        shapes = [tuple(row.shape) for row in rows]
        sizes = (set(dim) for dim in zip(*shapes, strict=True))
        shape = tuple(size.pop() if len(size) == 1 else -1 for size in sizes)
        self.schema = FieldSchema("strided", dtype_name(column.dtype), shape)
        self.device = column.device.type
        self._rows = [to_bytes(row) for row in rows]
        self._shapes = np.array(shapes, np.int64).reshape(len(shapes), column.dim() - 1)
        self.ends = np.cumsum([row.nbytes for row in self._rows], dtype=np.int64)

    def cut(self, first: int, last: int) -> list[Buffer]:
        return [self._shapes[first:last].reshape(-1), np.concatenate(self._rows[first:last])]


class _Text(Cuttable):
    """Rows that are all ``str``: at once, in a tenth of the time of values one by one."""

    def __init__(self, rows: list[bytes]) -> None:
        self.schema = FieldSchema("object")
        self.ends = np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)))
        self._text = np.frombuffer(b"".join(rows), np.uint8)

    def cut(self, first: int, last: int) -> list[Buffer]:
        begin = int(self.ends[first - 1]) if first else 0
        return [self.ends[first:last] - begin, self._text[begin : int(self.ends[last - 1])]]


class _Object(Cuttable):
    def __init__(self, field: str, column: list[Any], allow_pickle: bool) -> None:
        self.schema = FieldSchema("object")
        encoder = ValueEncoder(allow_pickle=allow_pickle)
        self._text = bytearray()
        ends: list[tuple[int, int]] = [(0, 0)]
        for row, value in enumerate(column):
            if row and value is column[row - 1] and ends[-2][1] == ends[-1][1]:
                # One prompt for a group of samples: the same object in each of their rows.
                self._text += self._text[ends[-2][0] :]
            else:
                try:
                    encoder.append(value, self._text)
                except UnsupportedValueError as error:
                    raise InputError(
                        f"Field {field!r}, row {row}: {error}", fields=(field,), rows=(row,)
                    ) from error
            ends.append((len(self._text), len(encoder.large)))
        self._large = encoder.large
        self._text_ends, self._large_ends = np.array(ends[1:], np.int64).T
        sizes = np.cumsum([0, *(buffer.nbytes for buffer in self._large)], dtype=np.int64)
        self.ends = self._text_ends + sizes[self._large_ends]

    def cut(self, first: int, last: int) -> list[Buffer]:
        text_from = int(self._text_ends[first - 1]) if first else 0
        large_from = int(self._large_ends[first - 1]) if first else 0
        text_to, large_to = int(self._text_ends[last - 1]), int(self._large_ends[last - 1])
        return [
            self._text_ends[first:last] - text_from,
            self._large_ends[first:last] - large_from,
            np.frombuffer(self._text, np.uint8)[text_from:text_to],
            *self._large[large_from:large_to],
        ]


def check_columns(columns: Mapping[str, Column]) -> int:
    """The number of rows that all columns have.

    Raises:
        InputError: no column, no row, unequal lengths, or a column that cannot be stored.
    """
    if not columns:
        raise InputError("Nothing to put: there is no field")
    sizes = {field: _size(field, column) for field, column in columns.items()}
    first_field, rows = next(iter(sizes.items()))
    for field, size in sizes.items():
        if size != rows:
            raise InputError(
                f"Field {field!r} has {size} rows, but {first_field!r} has {rows}",
                fields=(field, first_field),
            )
    if rows == 0:
        raise InputError("Nothing to put: the fields have no rows", fields=sizes)
    return rows


def _size(field: str, column: Column) -> int:
    if not isinstance(field, str) or not field:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"A field's name must be a non-empty string, got {field!r}")
    if isinstance(column, list):
        return len(column)
    if not isinstance(column, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            f"Field {field!r}: a column is a tensor or a list, not {type(column).__name__}",
            fields=(field,),
        )
    reason = why_not_storable(column)
    if column.dim() == 0:
        reason = "a column needs a batch dimension"
    if reason is not None:
        raise InputError(f"Field {field!r}: {reason}", fields=(field,))
    return int(column.size(0))


def cuttable(field: str, column: Column, *, allow_pickle: bool) -> Cuttable:
    """Make a checked column ready to be cut.

    Raises:
        InputError: a value cannot be stored; it names the field and row.
    """
    if isinstance(column, list):
        rows = _utf8(column)
        return _Object(field, column, allow_pickle) if rows is None else _Text(rows)
    if column.layout == torch.jagged:
        return _Jagged(column)
    return _Strided(column) if column.is_nested else _Dense(column)


def _utf8(column: list[Any]) -> list[bytes] | None:
    """The rows as UTF-8, if all are texts; a subclass of ``str`` is another type."""
    if set(map(type, column)) != {str}:
        return None
    try:
        return [text.encode() for text in column]
    except UnicodeEncodeError:  # who encodes value by value can say which row it is
        return None
