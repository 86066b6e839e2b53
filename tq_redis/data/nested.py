"""Nested tensors taken apart and put together."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Jagged:
    """A jagged nested tensor taken apart: each look at it as a whole takes torch 10 to 30 us.

    Attributes:
        schema: kind, dtype and shape of one sample.
        values: (N, *other dims) of all samples, the ragged dimension first; not copied.
        starts, lengths: (B,) where samples lie in it.
        gaps: whether samples may have gaps between them, as those of a narrowed view.
    """

    schema: FieldSchema
    values: torch.Tensor
    starts: Int64s
    lengths: Int64s
    gaps: bool


def take_apart(column: torch.Tensor) -> Jagged:
    """The parts of a jagged nested tensor."""
    plain: Any = column
    ragged = ragged_dim(column)
    offsets, chosen = _int64s(plain.offsets()), plain.lengths()
    lengths = offsets[1:] - offsets[:-1] if chosen is None else _int64s(chosen)
    values: torch.Tensor = plain.values().detach()
    shape = tuple(-1 if dim == ragged - 1 else size for dim, size in enumerate(values.shape))
    return Jagged(
        FieldSchema("jagged", dtype_name(values.dtype), shape),
        values.movedim(ragged - 1, 0),
        offsets[: len(lengths)],
        lengths,
        gaps=chosen is not None,
    )


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
