"""What users hand in and get back, as columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from tensordict.base import TensorDictBase

from tq_redis.client.stacks import stack_of, values_of
from tq_redis.data.base import Column
from tq_redis.errors import InputError

_nested: Any = torch.nested  # typed in part

Fields = TensorDictBase | Mapping[str, Any]
DataParser = Callable[[dict[str, Column]], Mapping[str, Any]]


def to_columns(data: Fields) -> dict[str, Column]:
    """Columns of equal length, from a TensorDict or a mapping of tensors, arrays and lists.

    Raises:
        InputError: no field, no row, a bad name, a column that is not a batch, or lengths differ.
    """
    columns = _columns(_items(data))
    _check_lengths(columns)
    return columns


def parsed(parser: DataParser, columns: dict[str, Column]) -> dict[str, Column]:
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


def rows_of(column: Column, first: int, stop: int) -> Column:
    """The rows from ``first`` to before ``stop``."""
    if isinstance(column, list) or not column.is_nested:
        return column[first:stop]
    return _nested.as_nested_tensor(list(column.unbind()[first:stop]), layout=column.layout)


def to_tensordict(columns: Mapping[str, Column], rows: int) -> TensorDict:
    """A TensorDict of batch size (rows,); lists become NonTensorStack."""
    result: Any = TensorDict({}, batch_size=[rows])
    for name, column in columns.items():
        if isinstance(column, list):
            result.set(name, stack_of(column))
        else:
            result.set(name, column)
    return result


def single_row(data: Mapping[str, Any]) -> dict[str, Column]:
    """One sample's values as columns of length 1: tensors get a batch dimension, everything else
    is a value.

    Raises:
        InputError: a nested tensor, which is a batch already.
    """
    columns: dict[str, Column] = {}
    for name, value in data.items():
        if isinstance(value, torch.Tensor):
            if value.is_nested:
                raise InputError(
                    f"Field {name!r} is a nested tensor, which is a batch: use kv_batch_put",
                    fields=[name],
                )
            columns[_name(name)] = value.unsqueeze(0)
        else:
            columns[_name(name)] = [value]
    return columns


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
    return {_name(name): _column(name, value) for name, value in items}


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise InputError(f"Field names must be non-empty strings, got {name!r}")
    return name


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
