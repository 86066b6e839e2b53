"""Columns of the queue <-> the containers that training code computes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from tensordict.base import TensorDictBase

from tq_redis.client.columns import to_tensordict
from tq_redis.data import Column
from tq_redis.errors import InputError

if TYPE_CHECKING:
    from verl import DataProto

Form = Literal["dataproto", "tensordict"]


def build(
    form: Form, columns: Mapping[str, Column], rows: int, info: Mapping[str, Any]
) -> DataProto | TensorDict:
    """A batch of ``rows`` rows; ``info`` becomes ``meta_info``, or NonTensorData entries."""
    if form == "tensordict":
        batch: Any = to_tensordict(columns, rows)
        for name, value in info.items():
            batch.set(name, NonTensorData(value))
        return batch
    from verl import DataProto

    tensors = {name: c for name, c in columns.items() if isinstance(c, torch.Tensor)}
    return DataProto(
        batch=TensorDict(tensors, batch_size=[rows]) if tensors else None,
        non_tensor_batch={
            name: _object_array(c) for name, c in columns.items() if isinstance(c, list)
        },
        meta_info=dict(info),
    )


def take_apart(output: Any) -> tuple[dict[str, Column], dict[str, Any]] | None:
    """Columns and ``meta_info`` of a method's output; None where it is no batch.

    Raises:
        InputError: a TensorDict entry is neither a column nor a value for the whole batch.
    """
    if output is None:
        return {}, {}
    if isinstance(output, TensorDictBase):
        return _tensordict_parts(output)
    if not _is_dataproto(output):
        return None
    columns: dict[str, Column] = {}
    if output.batch is not None:
        columns.update((name, output.batch.get(name)) for name in output.batch.keys())  # noqa: SIM118
    for name, array in output.non_tensor_batch.items():
        columns[name] = list(array)
    return columns, dict(output.meta_info)


def _is_dataproto(value: Any) -> bool:
    # Without importing verl: whoever returns a DataProto has done so.
    return any(kind.__name__ == "DataProto" for kind in type(value).__mro__)


def _object_array(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    # numpy.array would make values of equal length the rows of a matrix.
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def _tensordict_parts(batch: TensorDictBase) -> tuple[dict[str, Column], dict[str, Any]]:
    columns: dict[str, Column] = {}
    info: dict[str, Any] = {}
    untyped: Any = batch
    for name in untyped.keys():  # noqa: SIM118
        value: Any = untyped.get(name)
        if isinstance(value, torch.Tensor):
            columns[name] = value
        elif isinstance(value, NonTensorStack):
            columns[name] = value.tolist()
        elif isinstance(value, NonTensorData):
            info[name] = value.data
        else:
            raise InputError(
                f"Output {name!r} is a {type(value).__name__}; expected a tensor, a "
                f"NonTensorStack (a column) or NonTensorData (a value for the whole batch)",
                fields=[str(name)],
            )
    return columns, info
