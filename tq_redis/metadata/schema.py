"""What a field holds: kind, dtype and the shape of one sample."""

from __future__ import annotations

from typing import Literal

import msgspec

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
