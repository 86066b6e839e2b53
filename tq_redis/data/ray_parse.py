"""Parsers of columns, run where their result is kept: in a Ray task on some node, which puts what
comes out into the store of that node."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import ray as untyped_ray
from ray.exceptions import RayTaskError, WorkerCrashedError

from tq_redis.config import Config
from tq_redis.data.base import Column, Parser, WrittenBlock
from tq_redis.data.codec import encode
from tq_redis.deadline import Deadline
from tq_redis.errors import DeadlineError, TQError

ray: Any = untyped_ray  # its own types are partial


async def parse_and_write(
    config: Config,
    partition: str,
    columns: Mapping[str, Column],
    parser: Parser,
    deadline: Deadline,
) -> list[WrittenBlock]:
    """What was written, in the store of the node that Ray chose.

    Raises:
        DeadlineError: it was not done in time. The task is told to stop.
        TQError: the process that ran the parser died.
        Exception: what the parser raised.
    """
    task: Any = ray.remote(_parse_and_write).options(
        num_cpus=0, max_retries=0, scheduling_strategy="SPREAD", name="tq_redis data_parser"
    )
    ref = task.remote(config, partition, dict(columns), parser, deadline.remaining)
    try:
        async with asyncio.timeout(deadline.remaining):
            return await ref
    except TimeoutError:
        ray.cancel(ref)
        raise _late(partition, columns, deadline) from None
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, TQError) else error) from None
    except WorkerCrashedError as error:
        raise TQError(
            f"The process that ran data_parser died; nothing was written: {error}",
            partition=partition,
            fields=list(columns),
        ) from error


def _parse_and_write(
    config: Config, partition: str, columns: dict[str, Column], parser: Parser, seconds: float
) -> list[WrittenBlock]:
    from tq_redis.data.ray_store import RayBackend

    deadline = Deadline(seconds)

    async def write() -> list[WrittenBlock]:
        data = config.data
        made = parser(columns)
        if deadline.passed:  # nobody waits for it any more; the queue itself may have ended
            raise _late(partition, columns, deadline)
        blocks = encode(made, block_bytes=data.block_bytes, allow_pickle=data.pickle)
        backend = RayBackend(config)
        try:
            handles = await backend.write(partition, blocks, deadline)
        finally:
            await backend.close()
        return [block.written(handle) for block, handle in zip(blocks, handles, strict=True)]

    return asyncio.run(write())


def _late(partition: str, columns: Mapping[str, Column], deadline: Deadline) -> DeadlineError:
    return DeadlineError(
        f"data_parser did not end within the deadline of {deadline.seconds:g} s",
        partition=partition,
        fields=list(columns),
        deadline=deadline.seconds,
    )
