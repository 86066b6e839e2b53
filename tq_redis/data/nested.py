"""Nested tensors taken apart and put together."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tq_redis.data.devices import to_host
from tq_redis.data.tensors import dtype_name, from_numpy, to_bytes, to_tensor
from tq_redis.metadata.schema import FieldSchema

Int64s = npt.NDArray[np.int64]


def ragged_dim(column: torch.Tensor) -> int:
    """The dimension of a jagged nested tensor in which samples differ (0 is the batch)."""
    return getattr(column, "_ragged_idx", 1)


def tensor_schema(column: torch.Tensor) -> FieldSchema:
    """Kind, dtype and shape of one sample of a tensor with a batch dimension."""
    dtype = dtype_name(column.dtype)
    if not column.is_nested:
        return FieldSchema("dense", dtype, tuple(column.shape[1:]))
    if column.layout == torch.jagged:
        ragged = ragged_dim(column)
        dims = range(1, column.dim())
        shape = tuple(-1 if dim == ragged else int(column.shape[dim]) for dim in dims)
        return FieldSchema("jagged", dtype, shape)
    sizes = map(set, zip(*(row.shape for row in column.unbind()), strict=True))
    return FieldSchema("strided", dtype, tuple(s.pop() if len(s) == 1 else -1 for s in sizes))


def take_apart(column: torch.Tensor) -> tuple[torch.Tensor, Int64s, Int64s]:
    """The values of a jagged nested tensor, ragged dimension first, and where its samples lie.

    Returns:
        values (N, *other dims), not copied; starts (B,) and lengths (B,) of the samples in it.
        A narrowed view has gaps between its samples.
    """
    plain: Any = column
    offsets = _int64s(plain.offsets())
    lengths = np.diff(offsets) if plain.lengths() is None else _int64s(plain.lengths())
    values: torch.Tensor = plain.values().detach().movedim(ragged_dim(column) - 1, 0)
    return values, offsets[: plain.size(0)], lengths


def _int64s(tensor: torch.Tensor) -> Int64s:
    return to_host(tensor).numpy().astype(np.int64, copy=False)


def jagged_of_values(
    values: torch.Tensor, lengths: Int64s, offsets: torch.Tensor, ragged: int
) -> torch.Tensor:
    """A jagged nested tensor over ``values``, whose dim 0 holds all samples one after another.

    Args:
        values: (sum of lengths, *other dims); not copied.
        lengths: (B,) size of each sample in its ragged dimension.
        offsets: (B + 1,) where each sample starts in ``values``.
        ragged: the dimension of the result in which samples differ.
    """
    return torch.nested.nested_tensor_from_jagged(
        values.movedim(0, ragged - 1),
        offsets,
        jagged_dim=ragged,
        min_seqlen=int(lengths.min()),
        max_seqlen=int(lengths.max()),
    )


def offsets_of(lengths: Int64s) -> torch.Tensor:
    """(B + 1,) int64 offsets of samples with these lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return from_numpy(offsets)


def jagged_of_rows(rows: list[torch.Tensor], ragged: int) -> torch.Tensor:
    """A jagged nested tensor of rows that differ in one dimension only; the rows are copied."""
    fronted = [row.movedim(ragged - 1, 0) for row in rows]
    lengths = np.array([row.shape[0] for row in fronted], np.int64)
    data = np.concatenate([to_bytes(row) for row in fronted])
    shape = (int(lengths.sum()), *fronted[0].shape[1:])
    values = to_tensor(data, dtype_name(rows[0].dtype), shape)
    return jagged_of_values(values, lengths, offsets_of(lengths), ragged)


def strided_of_rows(rows: list[torch.Tensor]) -> torch.Tensor:
    """A strided nested tensor of rows with equal rank; the rows are copied."""
    nested: Any = torch.nested  # its functions are typed in part only
    return nested.as_nested_tensor(rows, layout=torch.strided)
