"""Devices, as torch has them: which there are, whose streams count, and memory to go through.

Nothing here is of one maker: torch knows CUDA, NPU (with torch_npu installed) and others by one
interface, ``torch.accelerator``.

Streams belong to threads, and the client works in threads of its own. So a call notes what torch
calls current in its caller's thread (:func:`as_caller`), and copies run on those streams
(:func:`callers_stream`): they come after all that the caller had given to its current stream, and
before what it gives to it later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from tq_redis.errors import InputError

Device = str | torch.device


@dataclass(frozen=True, slots=True)
class _Caller:
    """What torch calls current in a thread.

    Attributes:
        index: number of the device.
        streams: of each device.
    """

    index: int
    streams: tuple[torch.Stream, ...]


_caller: ContextVar[_Caller | None] = ContextVar("tq_redis_devices_caller", default=None)


@contextmanager
def as_caller() -> Generator[None]:
    """What starts in this context, in whatever thread, copies on the streams that are current here.

    Inside another one, the outer one holds.
    """
    if _caller.get() is not None or not _in_use():
        yield
        return
    accelerator = torch.accelerator
    streams = tuple(map(accelerator.current_stream, range(accelerator.device_count())))
    token = _caller.set(_Caller(accelerator.current_device_index(), streams))
    try:
        yield
    finally:
        _caller.reset(token)


def _in_use() -> bool:
    """Whether this process has begun to use its accelerator. Before, all streams are the default
    ones, and to ask for them would begin it."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return False
    initialized = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    return initialized is None or initialized()


@contextmanager
def callers_stream(device: torch.device) -> Generator[torch.Stream]:
    """Make the caller's stream of a device current in this thread, which is one of ours."""
    caller = _caller.get()
    before = torch.accelerator.current_stream(device)
    if caller is None:
        yield before
        return
    torch.accelerator.set_stream(caller.streams[device.index])
    try:
        yield caller.streams[device.index]
    finally:
        # The device stays current: to go back to another one may make torch use that one too.
        torch.accelerator.set_stream(before)


def own_device() -> torch.device:
    """The accelerator of this process (NPU, GPU, ...), or the CPU where it has none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, _current_index())


def known_device(device: Device) -> torch.device:
    """The device that is meant, with its number unless it is the CPU.

    Raises:
        InputError: torch does not know it, or this process has no such device.
    """
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise _no_such(device) from error
    if wanted.type == "cpu":
        return torch.device("cpu")
    own = torch.accelerator.current_accelerator(check_available=True)
    if own is None or own.type != wanted.type:
        raise _no_such(device)
    named: int | None = wanted.index  # torch's types leave None out
    index = _current_index() if named is None else named  # pyright: ignore[reportUnnecessaryComparison]
    if index >= torch.accelerator.device_count():
        raise _no_such(device)
    return torch.device(wanted.type, index)


async def destination(device: Device | None) -> torch.device | None:
    """The device that columns are to go to; None where they stay in main memory.

    Raises:
        InputError: as :func:`known_device`.
    """
    if device is None or str(device) == "cpu":
        return None
    # Not on the event loop: an accelerator takes seconds to wake up.
    known = await asyncio.to_thread(known_device, device)
    return None if known.type == "cpu" else known


def _current_index() -> int:
    caller = _caller.get()
    return torch.accelerator.current_device_index() if caller is None else caller.index


def _no_such(device: object) -> InputError:
    own = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if own is None else torch.accelerator.device_count()
    there = ["cpu", *(f"{own and own.type}:{index}" for index in range(count))]
    return InputError(
        f"device={str(device)!r} is not available in this process, which has {', '.join(there)}. "
        "Torch knows some accelerators only with their package installed (torch_npu for npu)"
    )


def pinned(nbytes: int) -> torch.Tensor | None:
    """Flat uint8 memory that a device reads and writes by itself; None where there is none (left).

    Torch keeps it for as long as copies from and to it are under way, also if it is dropped.
    """
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return None


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements in main memory, after all that the caller had given to its stream.

    Args:
        tensor: dense. One that is in main memory is returned as it is.

    Returns:
        Of one on an accelerator, a contiguous copy in pinned memory, if there is any.
    """
    device = tensor.device
    if device.type == "cpu":
        return tensor
    own = torch.accelerator.current_accelerator()
    if own is None or own.type != device.type:
        return tensor.cpu()
    if _caller.get() is None:  # nobody said on which stream the tensor is made
        torch.accelerator.synchronize(device)
    with callers_stream(device) as stream:
        plain = tensor.resolve_conj().resolve_neg().contiguous()
        memory = pinned(plain.nbytes)
        if memory is None or not plain.nbytes:
            return plain.cpu()
        copy = memory.view(plain.dtype).view(plain.shape)
        copy.copy_(plain, non_blocking=True)
        stream.synchronize()
        return copy
