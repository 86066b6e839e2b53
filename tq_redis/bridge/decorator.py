"""tqbridge: a function written for tensors, called with metadata."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from tq_redis.bridge.convert import Form, build, take_apart
from tq_redis.client.columns import rows_of
from tq_redis.data import Column
from tq_redis.data.devices import Device, as_caller, known_device, own_device
from tq_redis.data.given import length
from tq_redis.errors import InputError
from tq_redis.metadata import BatchMeta, KVBatchMeta
from tq_redis.session import get_client

Meta = BatchMeta | KVBatchMeta


class Bridged(Protocol):
    """What :func:`tqbridge` makes of a function: takes batches or their metadata.

    Attributes:
        reads: the fields that the function reads, or None where it reads all it is given.
        may_read: fields that it reads where they are there.
        writes: the fields that it writes, or None where it writes all that it returns.
        may_write: fields that it writes where it returns them.
        tags: outputs that become tags of the samples.
    """

    reads: tuple[str, ...] | None
    may_read: tuple[str, ...]
    writes: tuple[str, ...] | None
    may_write: tuple[str, ...]
    tags: tuple[str, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def tqbridge(
    dispatch_mode: Any = None,
    put_data: bool = True,
    *,
    reads: Sequence[str] | None = None,
    may_read: Sequence[str] = (),
    writes: Sequence[str] | None = None,
    may_write: Sequence[str] = (),
    tags: Sequence[str] = (),
    form: Form | Literal["auto"] = "auto",
    device: Device = "auto",
    overwrite: bool = False,
    timeout: float | None = None,
) -> Callable[[Callable[..., Any]], Bridged]:
    """Let a function that computes on batches be called with their metadata.

    Each argument that is a :class:`BatchMeta` or :class:`KVBatchMeta` is resolved where the
    function runs: into a verl ``DataProto`` (tensors in ``batch``, other columns as object arrays
    in ``non_tensor_batch``, ``extra_info`` in ``meta_info``) or a ``TensorDict``. Columns of the
    output are written under the samples of the first such argument, and its metadata is
    returned, with the output's ``meta_info`` as ``extra_info``. Without such an argument the call
    passes through untouched. Works for coroutine functions too.

    Args:
        dispatch_mode: verl's, as given to ``register``. With a mode that knows a mesh, only ranks
            that the mesh collects from write. :func:`meta_dispatch` sees to that by itself.
        put_data: False: the output is returned as it is, and nothing is written.
        reads: the fields that the function reads, and the only ones that travel; by default those
            in the metadata. Readable as ``function.reads``.
        may_read: fields that travel too, where the metadata has them.
        writes: the fields of the output that are written, all of which it must have; by default
            all it has. Readable as ``function.writes``.
        may_write: fields that are written too, where the output has them.
        tags: outputs with one number or text a row that become tags of the samples instead of
            columns, so that whoever holds the metadata sees them (``custom_meta``).
        form: what to resolve into; ``auto``: a TensorDict where the parameter is annotated as
            one, else a DataProto.
        device: where tensors go, as in ``get_columns``; ``auto``: the process's accelerator, or
            private copies in main memory where it has none.
        overwrite: allow a written field to change its dtype.
        timeout: deadline of each read and of the write, in seconds.

    Raises:
        InputError: the output lacks a field of ``writes`` or has another number of rows than the
            metadata; or this process has no such device.
    """

    def decorate(function: Callable[..., Any]) -> Bridged:
        bridge = _Bridge(
            annotations={
                name: parameter.annotation
                for name, parameter in inspect.signature(function).parameters.items()
            },
            dispatch_mode=dispatch_mode,
            put_data=put_data,
            reads=None if reads is None else tuple(reads),
            may_read=tuple(may_read),
            writes=None if writes is None else tuple(writes),
            may_write=tuple(may_write),
            tags=tuple(tags),
            form=form,
            device=device,
            overwrite=overwrite,
            timeout=timeout,
        )

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            meta = _first_meta(args, kwargs)
            if meta is None:
                return function(*args, **kwargs)
            resolved = bridge.resolve(args, kwargs, bridge.target())
            output = function(*resolved.args, **resolved.kwargs)
            parts = bridge.parts(args, resolved.samples, output)
            return output if parts is None else bridge.write(meta, resolved.samples, parts)

        @functools.wraps(function)
        async def acall(*args: Any, **kwargs: Any) -> Any:
            meta = _first_meta(args, kwargs)
            if meta is None:
                return await function(*args, **kwargs)
            with as_caller():
                resolved = await asyncio.to_thread(bridge.resolve, args, kwargs, bridge.target())
            output = await function(*resolved.args, **resolved.kwargs)
            parts = bridge.parts(args, resolved.samples, output)
            if parts is None:
                return output
            with as_caller():
                return await asyncio.to_thread(bridge.write, meta, resolved.samples, parts)

        wrapper: Any = acall if inspect.iscoroutinefunction(function) else call
        for name in ("reads", "may_read", "writes", "may_write", "tags"):
            setattr(wrapper, name, getattr(bridge, name))
        return wrapper

    return decorate


@dataclass(frozen=True, slots=True)
class _Resolved:
    args: list[Any]
    kwargs: dict[str, Any]
    samples: BatchMeta


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a rank writes: columns, tags of each row, and the values of the whole batch."""

    columns: dict[str, Column]
    tags: list[dict[str, Any]] | None
    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Bridge:
    """What happens before and after the function; see :func:`tqbridge`."""

    annotations: Mapping[str, Any]
    dispatch_mode: Any
    put_data: bool
    reads: tuple[str, ...] | None
    may_read: tuple[str, ...]
    writes: tuple[str, ...] | None
    may_write: tuple[str, ...]
    tags: tuple[str, ...]
    form: Form | Literal["auto"]
    device: Device
    overwrite: bool
    timeout: float | None

    def target(self) -> torch.device:
        """The device; asked for on the caller's thread, to which current devices belong."""
        return own_device() if self.device == "auto" else known_device(self.device)

    def resolve(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
    ) -> _Resolved:
        """The arguments with batches in place of metadata."""
        names = [*self.annotations, *[""] * len(args)]
        samples: list[BatchMeta] = []

        def one(name: str, value: Any) -> Any:
            if not isinstance(value, Meta):
                return value
            samples.append(_samples_of(value))
            return self._batch(name, samples[-1], device)

        resolved = [one(name, value) for name, value in zip(names, args, strict=False)]
        keywords = {name: one(name, value) for name, value in kwargs.items()}
        return _Resolved(resolved, keywords, samples[0])

    def parts(self, args: Sequence[Any], samples: BatchMeta, output: Any) -> _Parts | None:
        """What this rank writes of the output; None where the output is no batch.

        On the caller's thread: cutting off the padding may be work for the device.
        """
        found = take_apart(output) if self.put_data else None
        if found is None:
            return None
        columns, info = found
        columns = self._declared(columns, samples)
        rows = samples.size - samples.padding
        if not rows or samples.read_only or not self._collects(args):
            return _Parts({}, None, info)
        if samples.padding:
            columns = {name: rows_of(column, 0, rows) for name, column in columns.items()}
        tags = {name: _values(columns.pop(name)) for name in self.tags if name in columns}
        by_row = [dict(zip(tags, row, strict=True)) for row in zip(*tags.values(), strict=True)]
        return _Parts(columns, by_row if tags else None, info)

    def write(self, meta: Meta, samples: BatchMeta, parts: _Parts) -> Meta:
        """Write the columns and tags, and return the metadata."""
        real = samples.unpadded()
        real.extra_info = dict(parts.info)
        if parts.columns:
            real = get_client().put(
                parts.columns,
                real,
                tags=parts.tags,
                overwrite=self.overwrite,
                timeout=self.timeout,
            )
        elif parts.tags is not None:
            real = get_client().merge_custom_meta(real, parts.tags, timeout=self.timeout)
        if isinstance(meta, BatchMeta):
            return real
        fields = sorted({*(meta.fields or ()), *real.field_names})
        none: list[dict[str, Any]] = [{}] * meta.size
        tags = [{**old, **more} for old, more in zip(meta.tags, parts.tags or none, strict=True)]
        return KVBatchMeta(meta.keys, tags, meta.partition_id, fields, real.extra_info)

    def _batch(self, name: str, samples: BatchMeta, device: torch.device) -> Any:
        columns = get_client().get_columns(
            samples, self._fields_of(samples), device=device, timeout=self.timeout
        )
        return build(self._form_of(name), columns, samples.size, samples.extra_info)

    def _fields_of(self, samples: BatchMeta) -> Sequence[str] | None:
        if self.reads is None:
            return None
        there = set(samples.field_names)
        return (*self.reads, *(name for name in self.may_read if name in there))

    def _form_of(self, name: str) -> Form:
        if self.form != "auto":
            return self.form
        annotation = self.annotations.get(name)
        text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
        return "tensordict" if text.endswith("TensorDict") else "dataproto"

    def _declared(self, columns: dict[str, Column], samples: BatchMeta) -> dict[str, Column]:
        if self.writes is not None and not samples.read_only:
            must = (*self.writes, *self.tags)
            lacking = [name for name in must if name not in columns]
            if lacking:
                raise InputError(
                    f"The output lacks the declared fields {lacking}; it has {sorted(columns)}",
                    fields=lacking,
                )
            declared = {*must, *self.may_write}
            columns = {name: column for name, column in columns.items() if name in declared}
        for name, column in columns.items():
            if length(column) != samples.size:
                raise InputError(
                    f"Output {name!r} has {length(column)} rows for {samples.size} samples",
                    fields=[name],
                )
        return columns

    def _collects(self, args: Sequence[Any]) -> bool:
        """Whether this rank writes, as far as verl's dispatch mode says."""
        mode: Any = self.dispatch_mode
        if not hasattr(mode, "keys") or not args:
            return True
        mesh: tuple[Any, ...] = getattr(mode["collect_fn"], "args", ())  # of a functools.partial
        ask = getattr(args[0], "query_collect_info", None)
        return ask is None or not mesh or bool(ask(mesh[0]))


def _first_meta(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Meta | None:
    return next((v for v in (*args, *kwargs.values()) if isinstance(v, Meta)), None)


def _samples_of(meta: Meta) -> BatchMeta:
    if isinstance(meta, BatchMeta):
        return meta
    if meta.partition_id is None:
        raise InputError("The KVBatchMeta names no partition")
    samples = get_client().kv_retrieve_meta(meta.keys, meta.partition_id)
    if meta.fields is not None:
        samples = samples.select_fields(meta.fields)
    samples.extra_info = dict(meta.extra_info)
    return samples


def _values(column: Column) -> list[Any]:
    untyped: Any = column
    return untyped.tolist() if isinstance(column, torch.Tensor) else list(untyped)
