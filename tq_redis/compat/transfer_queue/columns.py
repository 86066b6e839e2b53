"""Columns as transfer_queue gives them: tensors with a dimension come back jagged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import NonTensorData, TensorDict
from tensordict.base import TensorDictBase

from tq_redis.client.columns import to_tensordict
from tq_redis.data import Column
from tq_redis.data.given import Fields, to_columns

# Typed in part.
_nested: Any = torch.nested


def jagged_tensordict(columns: Mapping[str, Column], rows: int) -> TensorDict:
    """A TensorDict of batch size (rows,).

    A column of tensors is a jagged nested tensor, also where all rows have one shape (a strided
    one where rows differ in several dimensions); of scalars, a dense (rows,) tensor; anything
    else, a NonTensorStack. Dense columns become jagged without a copy.
    """
    return to_tensordict({name: _jagged(column) for name, column in columns.items()}, rows)


def with_lists(data: TensorDictBase) -> TensorDictBase:
    """``data``, where a NonTensorData that wraps a list of one value per row is the column of these
    values, as transfer_queue takes it. TensorDict itself means that each row has the whole list."""
    untyped: Any = data
    rows = list(data.batch_size[:1])
    lists: dict[str, Column] = {}
    for name, column in untyped.items():
        wrapped = column.data if isinstance(column, NonTensorData) else None
        if isinstance(wrapped, list) and [len(cast("list[Any]", wrapped))] == rows:
            lists[name] = wrapped
    return untyped.copy().update(to_tensordict(lists, *rows)) if lists else data


def picked_rows(data: Fields, rows: Sequence[int]) -> dict[str, Column]:
    """Some rows of columns, in this order.

    Raises:
        InputError: as :func:`tq_redis.client.columns.to_columns`.
    """
    return {name: _picked(column, rows) for name, column in to_columns(data).items()}


def _picked(column: Column, rows: Sequence[int]) -> Column:
    if isinstance(column, list):
        return [column[row] for row in rows]
    if column.is_nested:
        parts = column.unbind()
        return _nested.as_nested_tensor([parts[row] for row in rows], layout=column.layout)
    return column[list(rows)]


def _jagged(column: Column) -> Column:
    if isinstance(column, list):
        return _from_rows(column)
    if column.is_nested:
        return column if column.layout is torch.jagged else _from_rows(list(column.unbind()))
    if column.dim() < 2:
        return column
    rows, length = column.shape[:2]
    offsets = torch.arange(rows + 1, device=column.device) * length
    return _nested.nested_tensor_from_jagged(
        column.flatten(0, 1), offsets, min_seqlen=length, max_seqlen=length
    )


def _from_rows(rows: list[Any]) -> Column:
    """One tensor of rows that are tensors of one dtype; else the list."""
    kinds = {(row.dtype, row.dim()) if isinstance(row, torch.Tensor) else None for row in rows}
    if len(kinds) != 1 or None in kinds:
        return rows
    if not rows[0].dim():
        return torch.stack(rows)
    try:
        return _nested.as_nested_tensor(rows, layout=torch.jagged)
    except RuntimeError:  # rows differ in more than one dimension
        return _nested.as_nested_tensor(rows, layout=torch.strided)
