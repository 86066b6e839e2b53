"""What several batches say about themselves, made one."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np

from tq_redis.errors import InputError
from tq_redis.metadata.schema import FieldSchema

if TYPE_CHECKING:
    import torch

Schema = Mapping[str, FieldSchema]

# Values that nobody can change.
_PLAIN: frozenset[type] = frozenset({str, int, float, bool, type(None)})


def copied_tags(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tags of some rows; shares nothing with them.

    ``copy.deepcopy`` of a row of plain values takes six times as long, and batches are cut and
    copied several times on their way to the workers.
    """
    return [
        dict(row) if _PLAIN.issuperset(map(type, row.values())) else copy.deepcopy(dict(row))
        for row in rows
    ]


def merge_info(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The union of several ``extra_info``; shares nothing with them.

    Raises:
        InputError: two of them have different values under one name.
    """
    merged: dict[str, Any] = {}
    for info in infos:
        for name, value in info.items():
            if name not in merged:
                merged[name] = copy.deepcopy(value)
            elif not same_value(merged[name], value):
                raise InputError(f"extra_info[{name!r}] differs between the batches")
    return merged


def same_value(a: Any, b: Any) -> bool:
    """Equality that also works for tensors and arrays, and in which NaN equals NaN."""
    if _is_tensor(a) and _is_tensor(b):
        return _same_tensor(a, b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return _same_array(cast("np.ndarray[Any, Any]", a), cast("np.ndarray[Any, Any]", b))
    if _is_tensor(a) or _is_tensor(b) or isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return False
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        mine, theirs = cast("Mapping[Any, Any]", a), cast("Mapping[Any, Any]", b)
        return mine.keys() == theirs.keys() and all(same_value(mine[k], theirs[k]) for k in mine)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        one, other = cast("Sequence[Any]", a), cast("Sequence[Any]", b)
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


def merge_schemas(first: Schema, other: Schema) -> dict[str, FieldSchema]:
    """The form of the fields of two batches, one after the other.

    Raises:
        InputError: they have different fields, or a field has two dtypes.
    """
    if first.keys() != other.keys():
        raise InputError(
            f"concat needs the same fields in every batch: {sorted(first)} and {sorted(other)}; "
            f"use union to add fields to the same rows"
        )
    for name, form in first.items():
        if form.dtype != other[name].dtype:
            raise InputError(
                f"concat needs one dtype per field: {name!r} is {form.dtype or 'non-tensor'} and "
                f"{other[name].dtype or 'non-tensor'}",
                fields=[name],
            )
    return {name: _common_form(form, other[name]) for name, form in first.items()}


def _common_form(a: FieldSchema, b: FieldSchema) -> FieldSchema:
    if a == b or not a.dtype:
        return a
    if len(a.shape) != len(b.shape):
        return FieldSchema("strided", a.dtype, (-1,) * max(len(a.shape), len(b.shape)))
    shape = tuple(x if x == y else -1 for x, y in zip(a.shape, b.shape, strict=True))
    return FieldSchema("strided" if "strided" in (a.kind, b.kind) else "jagged", a.dtype, shape)


def _is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    # Who has no torch has no tensor, and need not wait seconds for its import.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_nested or b.is_nested:
        nested = a.is_nested and b.is_nested and a.size(0) == b.size(0)
        return nested and all(map(_same_tensor, a.unbind(), b.unbind()))
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    mine, theirs = a.detach().cpu(), b.detach().cpu()
    return bool(((mine == theirs) | ((mine != mine) & (theirs != theirs))).all())


def _same_array(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype == object:
        return all(map(same_value, a.ravel().tolist(), b.ravel().tolist()))
    return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
