"""What several batches say about themselves, made one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from tq_redis.errors import InputError


def merge_info(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The union of several ``extra_info``.

    Raises:
        InputError: two of them have different values under one name.
    """
    merged: dict[str, Any] = {}
    for info in infos:
        for name, value in info.items():
            if name in merged and not same_value(merged[name], value):
                raise InputError(f"extra_info[{name!r}] differs between the batches")
            merged[name] = value
    return merged


def same_value(a: Any, b: Any) -> bool:
    """Equality that also works for tensors and arrays."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return both and torch.equal(cast(torch.Tensor, a), cast(torch.Tensor, b))
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b))
    return bool(a == b)
