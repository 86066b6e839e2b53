"""Field schemas as dictionaries: what each column of a batch looks like.

A schema maps a field to ``{"dtype", "shape", "is_nested", "is_non_tensor"}``: the torch dtype and
the shape of one row, both None where rows are no tensors; for a nested column known row by row
also ``"per_sample_shapes"``, a list of B shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict.base import TensorDictBase

from tq_redis.errors import InputError
from tq_redis.metadata import FieldSchema

Form = dict[str, Any]
Schema = dict[str, Form]
PER_ROW = "per_sample_shapes"


def extract_field_schema(data: TensorDictBase) -> Schema:
    """The schema of a TensorDict's columns; empty where it has no rows.

    Raises:
        InputError: a column has another number of rows than the TensorDict.
    """
    rows = data.batch_size[0]
    columns: Any = data
    return {name: _form(name, value, rows) for name, value in columns.items()} if rows else {}


def from_strict(schema: Mapping[str, FieldSchema]) -> Schema:
    """What the queue knows of fields. It keeps no shapes row by row: where rows differ, ``shape``
    has -1 in the dimensions in which they do."""
    return {
        name: {
            "dtype": getattr(torch, form.dtype) if form.dtype else None,
            "shape": (form.shape or (1,)) if form.dtype else None,
            "is_nested": form.kind in ("jagged", "strided"),
            "is_non_tensor": form.kind == "object",
        }
        for name, form in schema.items()
    }


def unknown_form() -> Form:
    """Of a field that no row has yet."""
    return {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": False}


def rows_of_schema(schema: Mapping[str, Form], rows: Sequence[int]) -> Schema:
    """The schema of some rows; shares nothing with the given one."""
    return _mapped(schema, lambda shapes: [shapes[row] for row in rows])


def concat_schemas(parts: Sequence[tuple[Schema, int]]) -> Schema:
    """The schema of batches one after the other.

    Args:
        parts: each batch's schema and number of rows. They have the fields of the first.
    """
    return {name: _concat([(s.get(name, {}), rows) for s, rows in parts]) for name in parts[0][0]}


def _form(name: str, value: Any, rows: int) -> Form:
    is_tensor = isinstance(value, torch.Tensor)
    found = value.size(0) if is_tensor else len(value)
    if found != rows:
        raise InputError(f"Field {name!r} has {found} rows, not {rows}", fields=[name])
    form: Form = {
        "dtype": value.dtype if is_tensor else None,
        "shape": None,
        "is_nested": is_tensor and value.is_nested,
        "is_non_tensor": not is_tensor,
    }
    if form["is_nested"]:
        form[PER_ROW] = [tuple(row.shape) for row in value.unbind()]
        form["shape"] = torch.Size(form[PER_ROW][0])
    elif is_tensor:
        form["shape"] = value.shape[1:] or torch.Size([1])
    return form


def _mapped(schema: Mapping[str, Form], change: Callable[[list[Any]], list[Any]]) -> Schema:
    changed = copy.deepcopy(dict(schema))
    for form in changed.values():
        if form.get(PER_ROW) is not None:
            form[PER_ROW] = change(form[PER_ROW])
    return changed


def _concat(parts: Sequence[tuple[Form, int]]) -> Form:
    first = parts[0][0]
    nested = any(form.get("is_nested", False) for form, _ in parts)
    merged = {name: first.get(name) for name in ("dtype", "shape", "is_nested", "is_non_tensor")}
    if nested:
        merged |= {"is_nested": True, "shape": None}
    if nested or any(form.get(PER_ROW) for form, _ in parts):
        merged[PER_ROW] = [
            shape
            for form, rows in parts
            for shape in form.get(PER_ROW) or [form.get("shape")] * rows
        ]
    return merged
