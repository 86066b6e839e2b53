"""Tensors as bytes and back, without a copy where memory allows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tq_redis.data.devices import to_host

Bytes = npt.NDArray[np.uint8]

_DTYPE_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32", "bool"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",
)
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def why_not_storable(tensor: torch.Tensor) -> str | None:
    """The reason why the bytes of this tensor cannot be stored, or None."""
    if tensor.dtype not in _NAMES:
        return f"dtype {tensor.dtype} is not supported"
    if tensor.device.type == "meta":
        return "a meta tensor has no data"
    if tensor.is_nested:
        return None
    if tensor.layout != torch.strided:
        return f"layout {tensor.layout} is not supported; convert it with to_dense()"
    if is_traceable_wrapper_subclass(tensor):
        return f"{type(tensor).__name__} is not a plain tensor; convert it to one first"
    return None


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name without the prefix, for example ``bfloat16``."""
    return _NAMES[dtype]


def item_bytes(dtype: str) -> int:
    return _DTYPES[dtype].itemsize


def to_bytes(tensor: torch.Tensor) -> Bytes:
    """The elements of a dense tensor in C order, as a flat uint8 array.

    It shares memory with a contiguous CPU tensor; others are copied. See
    :func:`~tq_redis.data.devices.to_host` for what a copy from a device waits for.
    """
    plain = to_host(tensor.detach()).resolve_conj().resolve_neg().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,))
    return flat.view(torch.uint8).numpy()


def from_numpy(array: npt.NDArray[Any]) -> torch.Tensor:
    """``torch.from_numpy`` with a type (torch gives it none)."""
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]


class _Writable:
    """A memory range that numpy takes for writable.

    Torch has no read-only tensors and warns when it wraps a read-only array. ``owner`` stays
    alive as the base of the array made from this.
    """

    def __init__(self, owner: Bytes) -> None:
        self.owner = owner
        self.__array_interface__: dict[str, Any] = {
            "shape": owner.shape,
            "typestr": "|u1",
            "data": (owner.ctypes.data, False),
            "version": 3,
        }


def to_tensor(data: Bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over the memory of a C-contiguous uint8 array (no copy)."""
    flat = data.reshape(-1)
    if not flat.flags.writeable:
        flat = np.asarray(_Writable(flat))
    return of_bytes(from_numpy(flat), dtype, shape)


def of_bytes(flat: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A view of flat uint8 memory, of any device, as a tensor."""
    return flat.view(_DTYPES[dtype]).view(shape)
