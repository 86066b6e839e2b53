"""A verb's refusal as the error that says what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tq_redis.control.keys import decode
from tq_redis.control.replies import ProduceReply
from tq_redis.errors import (
    FieldNotFoundError,
    NotReadyError,
    PartitionNotFoundError,
    SampleNotFoundError,
    SchemaConflictError,
    nearest,
    shorten,
)


def no_partition(partition: str, known: Iterable[str]) -> PartitionNotFoundError:
    """The partition does not exist; ``known`` are those that do."""
    return PartitionNotFoundError(
        f"Partition {partition!r} does not exist. {nearest(partition, known)}",
        partition=partition,
    )


def no_field(partition: str, name: str, known: Iterable[str]) -> FieldNotFoundError:
    """No sample has the field; ``known`` are those that some have."""
    return FieldNotFoundError(
        f"Partition {partition!r} has no field {name!r}. {nearest(name, known)}",
        partition=partition,
        fields=[name],
    )


def no_samples(partition: str, rows: Sequence[int]) -> SampleNotFoundError:
    """The rows are not there."""
    return SampleNotFoundError(
        f"Partition {partition!r} has no samples {shorten(rows)}: they were cleared, "
        f"and the metadata is stale. Fetch new metadata.",
        partition=partition,
        rows=rows,
    )


def not_ready(partition: str, name: str, rows: Sequence[int]) -> NotReadyError:
    """The rows are there, but do not have the field yet."""
    return NotReadyError(
        f"Field {name!r} of partition {partition!r} is not produced yet in rows "
        f"{shorten(rows)}. Wait for it with get_meta, or leave the field out.",
        partition=partition,
        fields=[name],
        rows=rows,
    )


def conflict(partition: str, reply: ProduceReply) -> SchemaConflictError:
    """A row has the field with another dtype."""
    name = decode(reply.field)
    return SchemaConflictError(
        f"Field {name!r} of partition {partition!r} is {reply.old or 'non-tensor'} in row "
        f"{reply.ids[0]} and would become {reply.new or 'non-tensor'}. "
        f"Convert the column, or pass overwrite=True.",
        partition=partition,
        fields=[name],
        rows=reply.ids,
    )
