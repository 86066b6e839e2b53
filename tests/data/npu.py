"""A device called ``npu`` in plain Python, by torch's PrivateUse1 key: memory of its own kind, and
streams that belong to threads. Torch allows one such device per process, for good: import this in a
process of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("npu")
_acc: Any = getattr(torch._C, "_acc")  # noqa: B009  (its types leave it out)

events: list[str] = []
"""What happened between host and device: ``in STREAM``, ``out STREAM`` (a copy, and the stream that
was current), ``waited for STREAM``."""

_hosts: dict[int, tuple[Any, torch.Tensor]] = {}
"""Storage of a tensor on the device -> the storage, kept alive, and the elements. Torch makes more
tensors over the same storage by itself."""


def host_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor on the device."""
    return _hosts[tensor.untyped_storage()._cdata][1]


def _on_npu(host: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = _acc.create_empty_tensor(host.shape, host.dtype)
    storage = made.untyped_storage()
    _hosts[storage._cdata] = storage, host
    return made


def _kernel(name: str) -> Callable[[Any], Any]:
    return torch.library.impl(f"aten::{name}", "PrivateUse1")


@_kernel("empty.memory_format")
def _empty(size: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return _on_npu(torch.empty(size, dtype=dtype))


@_kernel("empty_strided")
def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return _on_npu(torch.empty_strided(size, stride, dtype=dtype))


@_kernel("_copy_from")
def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> torch.Tensor:
    if source.device != target.device:
        way = "in" if source.device.type == "cpu" else "out"
        events.append(f"{way} {_current_stream().name}")
    _plain(target).copy_(_plain(source))
    return target


def _same_on_host(name: str) -> None:
    packet, _, overload = name.partition(".")
    of_host = getattr(getattr(torch.ops.aten, packet), overload or "default")

    @_kernel(name)
    def kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
        return _on_npu(of_host(*map(_plain, args), **kwargs))


def _plain(value: Any) -> Any:
    return (
        host_of(value) if isinstance(value, torch.Tensor) and value.device.type == "npu" else value
    )


for _name in (
    "detach",
    "view",
    "view.dtype",
    "slice.Tensor",
    "select.int",
    "permute",
    "mul.Tensor",
):
    _same_on_host(_name)


class Stream:
    """In order by nature: everything is done at once."""

    def __init__(self, name: str) -> None:
        self.name = name

    def synchronize(self) -> None:
        events.append(f"waited for {self.name}")


_of_thread = threading.local()
_default = Stream("default")


def use(stream: Stream) -> None:
    """Make a stream the current one of this thread."""
    _of_thread.stream = stream


def _current_stream(device: Any = None) -> Stream:
    return getattr(_of_thread, "stream", _default)


torch.accelerator.current_stream = _current_stream
torch.accelerator.set_stream = use
