"""What users hand in and get back, as columns."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from tq_redis.data.base import Column, Parser
from tq_redis.data.given import ParserFunction, field_name, parsed
from tq_redis.data.stacks import stack_of
from tq_redis.errors import InputError

_nested: Any = torch.nested  # typed in part

DataParser = ParserFunction | str


def checked(parser: DataParser | None) -> Parser | str | None:
    """A parser that fails where its result does not fit. A name stays one: who runs what it names
    checks that.

    Raises:
        InputError: it is neither.
    """
    if parser is None or isinstance(parser, str):
        return parser
    if not callable(parser):
        raise InputError(
            f"data_parser must be a function, or the name of one that storage units offer, "
            f"got {type(parser).__name__}"
        )
    return partial(parsed, parser)


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
            columns[field_name(name)] = value.unsqueeze(0)
        else:
            columns[field_name(name)] = [value]
    return columns
