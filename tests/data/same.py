"""Equality to the last bit, and with exact types."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def assert_same(got: Any, put: Any) -> None:
    """Fail unless ``got`` has the type, form and bits of ``put``."""
    assert type(got) is type(put), f"{type(got)} is not {type(put)}"
    if isinstance(put, torch.Tensor):
        _assert_same_tensor(got, put)
    elif isinstance(put, np.ndarray):
        _assert_same_array(got, put)
    elif isinstance(put, dict):
        assert_same(list(got.items()), list(put.items()))
    elif isinstance(put, list | tuple):
        assert len(got) == len(put)
        for one, other in zip(got, put, strict=True):
            assert_same(one, other)
    elif isinstance(put, np.generic):
        assert (got.dtype, got.tobytes()) == (put.dtype, put.tobytes())
    elif isinstance(put, float | complex):  # nan is nan, and -0.0 is not 0.0
        assert repr(got) == repr(put)
    else:
        assert got == put


def _assert_same_array(got: Any, put: Any) -> None:
    assert (got.dtype, got.shape) == (put.dtype, put.shape)
    if put.dtype == object:
        assert_same(got.reshape(-1).tolist(), put.reshape(-1).tolist())
    else:
        assert got.tobytes() == put.tobytes()


def _assert_same_tensor(got: torch.Tensor, put: torch.Tensor) -> None:
    assert (got.dtype, got.layout, got.is_nested) == (put.dtype, put.layout, put.is_nested)
    assert not got.requires_grad
    if put.is_nested:
        assert getattr(got, "_ragged_idx", None) == getattr(put, "_ragged_idx", None)
        for one, other in zip(got.unbind(), put.unbind(), strict=True):
            _assert_same_tensor(one, other)
    else:
        assert got.shape == put.shape
        assert bits(got) == bits(put)


def bits(tensor: torch.Tensor) -> bytes:
    """The elements of a dense tensor as bytes."""
    plain = (
        tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    )
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def rows_of(column: Any, order: list[int]) -> Any:
    """The rows of a column in another order, as the column's own kind."""
    if isinstance(column, list):
        return [column[row] for row in order]
    if not column.is_nested:
        return column.detach()[order]
    rows = [column.unbind()[row].detach() for row in order]
    if column.layout == torch.strided:
        return torch.nested.as_nested_tensor(rows, layout=torch.strided)
    ragged = getattr(column, "_ragged_idx", 1)
    values = torch.cat([row.movedim(ragged - 1, 0) for row in rows]).movedim(0, ragged - 1)
    offsets = torch.tensor([0, *(row.shape[ragged - 1] for row in rows)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged)
