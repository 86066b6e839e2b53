"""What a field holds: kind, dtype and the shape of one sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from tq_redis.errors import InputError

ReadyFlags = npt.NDArray[np.int8]
Kind = Literal["dense", "jagged", "strided", "object"]


class FieldSchema(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form of one field.

    Attributes:
        kind: ``dense`` (every sample has the same shape), ``jagged`` or ``strided`` (nested
            tensors of that layout), ``object`` (any non-tensor values).
        dtype: torch's name without the prefix, for example ``bfloat16``; empty for ``object``.
        shape: the shape of one sample; -1 where samples differ.
    """

    kind: Kind
    dtype: str = ""
    shape: tuple[int, ...] = ()


def require_forms(schema: Mapping[str, FieldSchema]) -> dict[str, FieldSchema]:
    """A copy of the mapping.

    Raises:
        InputError: it does not map names to :class:`FieldSchema`.
    """
    if not isinstance(schema, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"Expected a mapping of names to FieldSchema, got {type(schema).__name__}")
    given: Mapping[str, Any] = schema
    wrong = [name for name, form in given.items() if not isinstance(form, FieldSchema)]
    if wrong:
        raise InputError(
            f"Field {wrong[0]!r} must have a FieldSchema, got {type(schema[wrong[0]]).__name__}",
            fields=wrong,
        )
    return dict(schema)
