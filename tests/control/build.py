"""Writes for the tests: rows with columns, and blocks that no data plane keeps."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import BlockEntry, Claimed, NotEnough, Wanted, Write
from tq_redis.deadline import Deadline
from tq_redis.metadata import FieldSchema

BLOCK_BYTES = 100


def soon() -> Deadline:
    """Long enough for a busy machine, short enough for a test that hangs."""
    return Deadline(20)


def block(
    rows: int, fields: Sequence[str], *, first_row: int = 0, dtype: str = "float32"
) -> BlockEntry:
    """A block of its own name that holds these fields of ``rows`` rows."""
    handle = f"node/{uuid.uuid4().hex}"
    return BlockEntry(handle, BLOCK_BYTES, first_row, rows, dict.fromkeys(fields, dtype))


def write(
    rows: int,
    fields: Sequence[str] = (),
    *,
    ids: Sequence[int] | None = None,
    keys: Sequence[str] | None = None,
    groups: Sequence[str] | None = None,
    tags: Sequence[Mapping[str, Any]] | None = None,
    dtype: str = "float32",
    overwrite: bool = False,
) -> Write:
    """A write of ``rows`` rows whose fields lie in one block."""
    return Write(
        rows,
        ids=ids,
        keys=keys,
        groups=groups,
        tags=tags,
        blocks=[block(rows, fields, dtype=dtype)] if fields else [],
        schema={name: FieldSchema("dense", dtype, (3,)) for name in fields},
        overwrite=overwrite,
    )


def handle(put: Write) -> str:
    """The handle of a write with one block."""
    (only,) = put.blocks
    return only.handle


async def claim(
    plane: ControlPlane,
    count: int,
    *,
    partition: str = "p",
    task: str = "t",
    fields: Sequence[str] = "x",
    consumer: str = "me",
    **wanted: Any,
) -> Claimed | NotEnough:
    """A claim of fields named by one letter each, with other values of ``Wanted``."""
    asked = Wanted(task, list(fields), count, **wanted)
    return await plane.claim(partition, asked, consumer, soon())


async def claimed(plane: ControlPlane, count: int, **wanted: Any) -> Claimed:
    """A claim that must succeed."""
    found = await claim(plane, count, **wanted)
    assert isinstance(found, Claimed), found
    return found
