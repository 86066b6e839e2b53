"""Columns as blocks and back, bit by bit.

A block is a small msgpack header and a list of flat numpy buffers, so that a store can keep the
buffers as they are and a reader can take rows from them without touching the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
import numpy as np
import torch

from tq_redis.data.base import Column, Content, EncodedBlock, Run
from tq_redis.data.calls import in_thread
from tq_redis.data.columns import Buffer, Cuttable, check_columns, cuttable
from tq_redis.data.devices import callers_stream
from tq_redis.data.gather import Gatherer, Source
from tq_redis.data.spans import Span, spans_of
from tq_redis.data.values import UnsupportedValueError
from tq_redis.deadline import Deadline
from tq_redis.errors import InputError
from tq_redis.metadata.schema import FieldSchema

# Subclasses of tensors answer what is asked here as plain ones do; a nested one takes 10 to 30 us
# of Python each time. See https://docs.pytorch.org/docs/stable/notes/extending.html
_AS_PLAIN = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateUsage]

# What is encoded or decoded on the event loop itself: half a millisecond at most.
_LIGHT_BYTES = 64 << 10
_LIGHT_ROWS = 4096
_LIGHT_VALUES = 512
# What a value costs beside its characters, in the time that bytes take.
_VALUE_BYTES = 64


# A thread that copies columns waits for nothing else.
NOT_COPIED = "Columns were not copied, or a device did not finish what it had to do before,"


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """One field of a block: what it holds, and which buffers are its own.

    ``device`` is the type of the device that it was put from, ``cuda`` for example. Nothing depends
    on it; blocks of earlier versions do not say.
    """

    field: str
    schema: FieldSchema
    buffers: int
    device: str = "cpu"


class _Header(msgspec.Struct, frozen=True, array_like=True):
    rows: int
    parts: list[_Part]


class StoredBlock:
    """A block as a reader sees it.

    Attributes:
        rows: number of rows.
        nbytes: bytes of the rows.
        origins: field -> type of the device that it was put from.
    """

    def __init__(self, header: bytes, buffers: Sequence[Buffer]) -> None:
        decoded = msgspec.msgpack.decode(header, type=_Header)
        self.rows = decoded.rows
        self.nbytes = sum(buffer.nbytes for buffer in buffers)
        self.origins = {part.field: part.device for part in decoded.parts}
        self._fields: dict[str, tuple[FieldSchema, Sequence[Buffer]]] = {}
        at = 0
        for part in decoded.parts:
            self._fields[part.field] = (part.schema, buffers[at : at + part.buffers])
            at += part.buffers

    def source(self, field: str, span: Span) -> Source:
        """The rows of one field that a span names.

        Raises:
            InputError: the block has no such field or not that many rows.
        """
        if field not in self._fields:
            raise InputError(f"Block {span.handle} holds no field {field!r}", fields=(field,))
        if span.high > self.rows or span.low < 0:
            raise InputError(f"Block {span.handle} has only {self.rows} rows", fields=(field,))
        schema, buffers = self._fields[field]
        return Source(schema, self.rows, buffers, span)


def encoded(content: Content) -> EncodedBlock:
    """A block that was stored before, ready to be stored again."""
    header, buffers = content
    decoded = msgspec.msgpack.decode(header, type=_Header)
    schema = {part.field: part.schema for part in decoded.parts}
    return EncodedBlock(schema, 0, decoded.rows, header, list(buffers))


def encode(
    columns: Mapping[str, Column],
    *,
    block_bytes: int,
    allow_pickle: bool,
    group_of: Callable[[str], str] = lambda field: "",
) -> list[EncodedBlock]:
    """Check the columns of a put and cut them into blocks.

    Neighbouring fields that take up to ``block_bytes`` together become one block; a larger field
    is cut by rows into several. So a reader pulls little that it does not need, and there are few
    blocks.

    Args:
        group_of: fields with different answers never share a block.

    Raises:
        InputError: a column cannot be stored; it names the field (and row).
    """
    groups: dict[str, dict[str, Cuttable]] = {}
    with _AS_PLAIN():
        rows = check_columns(columns)
        for field, column in columns.items():
            ready = cuttable(field, column, allow_pickle=allow_pickle)
            groups.setdefault(group_of(field), {})[field] = ready
    return [
        _block(part, first, last)
        for group in groups.values()
        for part in _parts(group, block_bytes)
        for first, last in _cuts(part, rows, block_bytes)
    ]


def _parts(group: Mapping[str, Cuttable], block_bytes: int) -> list[dict[str, Cuttable]]:
    """Neighbouring fields that fit into one block together; a large field alone."""
    parts: list[dict[str, Cuttable]] = []
    room = 0
    for field, column in group.items():
        nbytes = int(column.ends[-1])
        if nbytes > room or not parts:
            parts.append({})
            room = block_bytes
        parts[-1][field] = column
        room -= nbytes
    return parts


def is_light(columns: Mapping[str, Column]) -> bool:
    """Whether :func:`encode` takes so little time that a thread of its own would cost more: 0.2 to
    1 ms, there and back."""
    left = float(_LIGHT_BYTES)
    with _AS_PLAIN():
        for column in columns.values():
            left -= _weight(column)
            if left < 0:
                return False
    return True


def _weight(column: Column) -> float:
    """Bytes of a column, or infinity where it takes long to say."""
    if isinstance(column, torch.Tensor):
        plain = column.values() if column.layout == torch.jagged else column
        if plain.is_nested or plain.layout != torch.strided or plain.device.type != "cpu":
            return math.inf
        return plain.nbytes
    if len(column) > _LIGHT_VALUES:
        return math.inf
    return sum(_VALUE_BYTES + len(v) if isinstance(v, str | bytes) else _size(v) for v in column)


def _size(value: Any) -> float:
    return _VALUE_BYTES if value is None or isinstance(value, int | float) else math.inf


async def decoded(
    wanted: Mapping[str, Sequence[Run]],
    blocks: Mapping[str, StoredBlock],
    deadline: Deadline,
    *,
    copy: bool,
    allow_pickle: bool,
    device: torch.device | None = None,
) -> dict[str, Column]:
    """:func:`decode`, in a thread of its own unless that would cost more, by the deadline."""

    def now() -> dict[str, Column]:
        return decode(wanted, blocks, copy=copy, allow_pickle=allow_pickle, device=device)

    rows = sum(count for runs in wanted.values() for _, _, count in runs)
    nbytes = sum(block.nbytes for block in blocks.values())
    if device is None and rows <= _LIGHT_ROWS and nbytes <= _LIGHT_BYTES:
        return now()
    return await in_thread(deadline, NOT_COPIED, now)


def _cuts(part: Mapping[str, Cuttable], rows: int, block_bytes: int) -> list[tuple[int, int]]:
    """Where to cut a part by rows, into blocks of about equal size; only a large field is."""
    ends = next(iter(part.values())).ends
    total = int(ends[-1])
    if len(part) > 1 or total <= block_bytes:
        return [(0, rows)]
    blocks = -(-total // block_bytes)
    limits = [total * (block + 1) // blocks for block in range(blocks)]
    lasts = np.unique(np.maximum(np.searchsorted(ends, limits, side="right"), 1))
    lasts[-1] = len(ends)
    return list(zip([0, *lasts[:-1].tolist()], lasts.tolist(), strict=True))


def _block(columns: Mapping[str, Cuttable], first: int, last: int) -> EncodedBlock:
    parts: list[_Part] = []
    buffers: list[Buffer] = []
    for field, column in columns.items():
        cut = column.cut(first, last)
        parts.append(_Part(field, column.schema, len(cut), column.device))
        buffers.extend(cut)
    header = msgspec.msgpack.encode(_Header(last - first, parts))
    schema = {field: column.schema for field, column in columns.items()}
    return EncodedBlock(schema, first, last - first, header, buffers)


def decode(
    wanted: Mapping[str, Sequence[Run]],
    blocks: Mapping[str, StoredBlock],
    *,
    copy: bool,
    allow_pickle: bool,
    device: torch.device | None = None,
) -> dict[str, Column]:
    """The wanted rows of each field; see ``DataPlane.get``.

    Args:
        blocks: handle -> block, for every handle in ``wanted``.
        device: where tensors go, on the stream that is the caller's; None: main memory.

    Raises:
        InputError: a field has no runs, or its runs do not fit the blocks.
    """
    with nullcontext() if device is None else callers_stream(device):
        gatherer = Gatherer(copy=copy, allow_pickle=allow_pickle, device=device)
        return _gathered(gatherer, wanted, blocks)


def _gathered(
    gatherer: Gatherer, wanted: Mapping[str, Sequence[Run]], blocks: Mapping[str, StoredBlock]
) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    spans: dict[tuple[Run, ...], list[Span]] = {}  # fields mostly have the same runs
    for field, runs in wanted.items():
        if not runs:
            raise InputError(f"No rows are wanted of field {field!r}", fields=(field,))
        place = tuple(runs)
        if place not in spans:
            spans[place] = spans_of(runs)
        sources = [blocks[span.handle].source(field, span) for span in spans[place]]
        try:
            columns[field] = gatherer.column(sources)
        except UnsupportedValueError as error:
            raise InputError(f"Field {field!r}: {error}", fields=(field,)) from error
    return columns
