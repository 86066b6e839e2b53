"""What users hand in, as columns; also what their parsers make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack
from tensordict.base import TensorDictBase

from tq_redis.data.base import Column
from tq_redis.data.stacks import values_of
from tq_redis.errors import InputError

Fields = TensorDictBase | Mapping[str, Any]
ParserFunction = Callable[[dict[str, Column]], Fields]
"""What users write as ``data_parser``."""


def to_columns(data: Fields) -> dict[str, Column]:
    """Columns of equal length, from a TensorDict or a mapping of tensors, arrays and lists.

    Raises:
        InputError: no field, no row, a bad name, a column that is not a batch, or lengths differ.
    """
    columns = _columns(_items(data))
    _check_lengths(columns)
    return columns


def parsed(parser: ParserFunction, columns: dict[str, Column]) -> dict[str, Column]:
    """What a user's parser makes of columns.

    Raises:
        InputError: other fields, another number of rows, or what :func:`to_columns` refuses.
    """
    made = to_columns(parser(dict(columns)))
    if made.keys() != columns.keys():
        raise InputError(
            f"data_parser must return the fields it was given, {sorted(columns)}, "
            f"got {sorted(made)}"
        )
    if row_count(made) != row_count(columns):
        raise InputError(
            f"data_parser must keep the number of rows, {row_count(columns)}, got {row_count(made)}"
        )
    return made


def row_count(columns: Mapping[str, Column]) -> int:
    """Rows of columns of equal length."""
    return length(next(iter(columns.values())))


def length(column: Column) -> int:
    """Number of rows of one column."""
    return len(column) if isinstance(column, list) else column.size(0)


def field_name(name: Any) -> str:
    """The name itself.

    Raises:
        InputError: it is none.
    """
    if not isinstance(name, str) or not name:
        raise InputError(f"Field names must be non-empty strings, got {name!r}")
    return name


def _items(data: Fields) -> Sequence[tuple[Any, Any]]:
    if isinstance(data, TensorDictBase):
        batch: Any = data
        return [(name, batch.get(name)) for name in batch.keys()]  # noqa: SIM118
    if isinstance(data, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        return list(data.items())
    raise InputError(
        f"data must be a TensorDict or a mapping of columns, got {type(data).__name__}"
    )


def _columns(items: Sequence[tuple[Any, Any]]) -> dict[str, Column]:
    return {field_name(name): _column(name, value) for name, value in items}


def _column(name: str, value: Any) -> Column:
    if isinstance(value, torch.Tensor):
        if value.dim() == 0:
            raise InputError(f"Field {name!r} has no batch dimension", fields=[name])
        return value
    if isinstance(value, NonTensorData | NonTensorStack):
        return values_of(value)
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, Any]", value)
        if array.ndim == 0:
            raise InputError(f"Field {name!r} has no batch dimension", fields=[name])
        if array.dtype.kind in "biufc":
            return torch.as_tensor(np.ascontiguousarray(array))
        return list(array)
    if isinstance(value, list):
        return cast("list[Any]", value)
    raise InputError(
        f"Field {name!r} must be a tensor, an array or a list with one entry per row, "
        f"got {type(value).__name__}",
        fields=[name],
    )


def _check_lengths(columns: Mapping[str, Column]) -> None:
    if not columns:
        raise InputError("Nothing to write: data has no fields")
    lengths = {name: length(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(f"Columns must have one length, got {lengths}", fields=lengths)
    if not all(lengths.values()):
        raise InputError("Nothing to write: the columns have no rows", fields=lengths)
