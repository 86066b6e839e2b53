"""A verb's refusal as the error that says what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tq_redis.control.keys import decode
from tq_redis.control.records import Full
from tq_redis.control.replies import ExpectReply, ProduceReply
from tq_redis.deadline import Deadline
from tq_redis.errors import (
    DeadlineError,
    FieldNotFoundError,
    InputError,
    LeaseLostError,
    NotReadyError,
    PartitionEndedError,
    PartitionFullError,
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


def frozen(partition: str, deadline: Deadline) -> DeadlineError:
    """A save held the partition still for longer than the call could wait."""
    return DeadlineError(
        f"A checkpoint of partition {partition!r} is being saved, and the call could not go on "
        f"within its deadline of {deadline.seconds:g} s. Nothing was written; retry, with a "
        f"longer timeout.",
        partition=partition,
        deadline=deadline.seconds,
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


def no_more_samples(partition: str, reply: ProduceReply) -> PartitionEndedError:
    """New rows where no more are to come."""
    if reply.code == "ended":
        return PartitionEndedError(
            f"Partition {partition!r} has ended with {reply.made} samples made; it takes no new "
            f"ones. Put into another partition, or end it later.",
            partition=partition,
        )
    return PartitionEndedError(
        f"Partition {partition!r} expects {reply.expected} samples in all and {reply.made} are "
        f"made; {reply.more} more are too many. Declare more with expect() first.",
        partition=partition,
    )


def cannot_expect(partition: str, samples: int | None, reply: ExpectReply) -> PartitionEndedError:
    """A declaration that what exists contradicts."""
    why = "it has ended" if reply.code == "ended" else "that is fewer"
    return PartitionEndedError(
        f"Partition {partition!r} cannot expect {samples} samples: {reply.made} are made, "
        f"and {why}.",
        partition=partition,
    )


def limit_too_small(
    partition: str, task: str, samples: int | None, consumer: str, count: int
) -> InputError:
    """A limit under which a consumer that waits would wait for ever."""
    return InputError(
        f"Task {task!r} cannot be limited to {samples} samples of partition {partition!r}: "
        f"consumer {consumer!r} waits for {count}. Allow at least as many.",
        partition=partition,
    )


def batch_over_limit(partition: str, task: str, count: int, limit: int) -> InputError:
    """A batch that can never be filled under the task's limit."""
    return InputError(
        f"Task {task!r} asked for {count} samples of partition {partition!r}, but its limit lets "
        f"only {limit} be there for it. Ask for fewer, or raise the limit with limit().",
        partition=partition,
    )


def more_than_limit(partition: str, task: str, rows: int, limit: int) -> InputError:
    """A put that a limit never lets through."""
    return InputError(
        f"A put of {rows} new samples is more than the {limit} that task {task!r} may leave "
        f"unconsumed in partition {partition!r}. Put fewer at a time, or raise the limit with "
        f"limit().",
        partition=partition,
    )


def full(
    partition: str, rows: int, found: Full, hint: str, deadline: Deadline
) -> PartitionFullError:
    """A put waited in vain for a task to consume samples."""
    held = f" ({found.held} of them held with a lease)" if found.held else ""
    return PartitionFullError(
        f"A put of {rows} new samples waited {deadline.seconds:g} s for room in partition "
        f"{partition!r}: task {found.task!r} has {found.unconsumed} samples{held} that it has not "
        f"consumed, and its limit is {found.limit}.{hint} None of them was written. Consume, "
        f"acknowledge or clear samples, raise the limit with limit(), or wait longer.",
        task=found.task,
        limit=found.limit,
        unconsumed=found.unconsumed,
        partition=partition,
        deadline=deadline.seconds,
    )


def lease_lost(partition: str, task: str, rows: Sequence[int]) -> LeaseLostError:
    """The claim holds the rows no longer."""
    return LeaseLostError(
        f"Samples {shorten(rows)} of partition {partition!r} are no longer held for task {task!r}: "
        f"the lease ran out, or consumption was reset. Other consumers may have got them; drop "
        f"the work on them, and take a longer lease or renew it.",
        partition=partition,
        rows=rows,
    )
