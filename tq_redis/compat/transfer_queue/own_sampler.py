"""A sampler of the user's own: one object for all processes, which remembers what it chose."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tq_redis import metadata as strict
from tq_redis.client.kv import AsyncKVClient
from tq_redis.client.portal import if_lost
from tq_redis.compat.transfer_queue.sampler.base import BaseSampler, Choice
from tq_redis.control.records import Claimed, Ready, Taken, Wanted
from tq_redis.deadline import Deadline
from tq_redis.errors import DataLostError, DeadlineError, InputError, shorten

_RAY_NAMESPACE = "tq_redis"
# At least so long does a claim wait for Redis to answer.
_ANSWER_S = 5.0


@dataclass(frozen=True)
class PartitionView:
    """What a sampler is told of a partition.

    Attributes:
        partition_id: its name.
        tags: sample -> tags, of those that are ready.
    """

    partition_id: str
    tags: Mapping[int, Mapping[str, Any]]

    def get_custom_meta(self, indexes: Sequence[int]) -> dict[int, Mapping[str, Any]]:
        """Sample -> tags."""
        return {sample: self.tags[sample] for sample in indexes if sample in self.tags}


class Chooser:
    """Asks the sampler. Lives in an actor, or in the process itself where there is no Ray."""

    def __init__(self, sampler: BaseSampler) -> None:
        self._sampler = sampler

    def choose(
        self,
        ready: list[int],
        tags: list[dict[str, Any]],
        batch_size: int,
        partition: str,
        task: str,
        config: Mapping[str, Any],
    ) -> Choice:
        """What the sampler chooses; nothing where too few samples are ready, unless it has chosen
        this batch before."""
        names = {**config, "partition_id": partition, "task_name": task}
        cached = self._sampler.has_cached_result(partition, task, config)
        if len(ready) < batch_size and not cached:
            return [], []
        view = PartitionView(partition, dict(zip(ready, tags, strict=True)))
        return self._sampler(ready, batch_size, **names, partition=view)

    def clear_cache(self, partition: str) -> None:
        """The partition was cleared."""
        self._sampler.clear_cache(partition)


_here: Chooser | None = None
_actor: Any = None


def start_chooser(sampler: BaseSampler, namespace: str, *, in_ray: bool) -> None:
    """Make the one object that serves the queue of this namespace. It ends with this process."""
    global _here, _actor
    if not in_ray:
        _here = Chooser(sampler)
        return
    _actor = (
        _ray()
        .remote(Chooser)
        .options(name=_name(namespace), namespace=_RAY_NAMESPACE, num_cpus=0)
        .remote(sampler)
    )


def stop_chooser() -> None:
    """End what :func:`start_chooser` made."""
    global _here, _actor
    if _actor is not None:
        _ray().kill(_actor)
    _here, _actor = None, None


async def forget_partition(core: AsyncKVClient, partition: str) -> None:
    """Tell the sampler that a partition was cleared."""
    await _ask(core, "clear_cache", partition)


async def fetch_chosen(
    core: AsyncKVClient,
    fields: Sequence[str],
    batch_size: int,
    partition: str,
    task: str,
    config: Mapping[str, Any],
    wait: Deadline,
) -> strict.BatchMeta:
    """Claim what the sampler chooses; an empty batch if ``wait`` is 0 and it chooses nothing.

    Raises:
        InputError: it chose what cannot be claimed.
        DeadlineError: it chose nothing until ``wait`` passed.
        DataLostError: the process that kept the sampler died, and with it what it remembered.
    """
    wanted = Wanted(task, fields, batch_size)
    while True:
        ready, standing = await core.control.ready(partition, wanted, core.name, _answer(wait))
        assert ready is not None  # only draws are remembered
        chosen, consumed = await _ask(
            core,
            "choose",
            ready.ids,
            ready.tags,
            batch_size,
            partition,
            task,
            dict(config),
        )
        if chosen:
            if await _consume(core, partition, wanted, ready, consumed, _answer(wait)):
                return await _described(core, partition, fields, chosen, _answer(wait))
        elif not wait.seconds:
            return strict.BatchMeta.empty()
        elif wait.passed:
            raise DeadlineError(
                f"Task {task!r} waited {wait.seconds:g} s for {batch_size} samples of "
                f"{partition!r} with fields {list(fields)}: {len(ready.ids)} are ready, and the "
                f"sampler chose none",
                deadline=wait.seconds,
            )
        else:
            await core.control.wait(partition, standing.event, Deadline(wait.remaining))


def _answer(wait: Deadline) -> Deadline:
    """For one call to Redis: each has its own, as the sampler's process takes seconds to start."""
    return Deadline(max(wait.remaining, _ANSWER_S))


async def _consume(
    core: AsyncKVClient,
    partition: str,
    wanted: Wanted,
    ready: Ready,
    consumed: Sequence[int],
    deadline: Deadline,
) -> bool:
    """Mark as consumed what is not yet; False if another consumer was faster."""
    open_rows = set(ready.ids)
    ids = [sample for sample in dict.fromkeys(consumed) if sample in open_rows]
    if not ids:
        return True
    claimed = await core.control.claim_chosen(partition, wanted, core.name, ids, deadline)
    if isinstance(claimed, Claimed):
        if_lost(partial(core.control.take_back, partition, wanted, claimed))
    return not isinstance(claimed, Taken)


async def _described(
    core: AsyncKVClient,
    partition: str,
    fields: Sequence[str],
    ids: Sequence[int],
    deadline: Deadline,
) -> strict.BatchMeta:
    rows = await core.control.describe(partition, deadline, ids=list(ids), fields=fields)
    gone = [sample for sample, found in zip(ids, rows.ids, strict=True) if not found]
    if gone:
        raise InputError(f"The sampler chose samples {shorten(gone)}, which are not there")
    return strict.BatchMeta(rows.ids, partition, rows.schema, custom_meta=rows.tags)


async def _ask(core: AsyncKVClient, call: str, *arguments: Any) -> Any:
    if _here is not None:
        return getattr(_here, call)(*arguments)
    ray = _ray()
    name = _name(core.config.redis.namespace)
    deadline = Deadline(core.config.timeout_s)  # its process may have to start first
    try:
        actor = await asyncio.to_thread(ray.get_actor, name, namespace=_RAY_NAMESPACE)
        return await asyncio.wait_for(getattr(actor, call).remote(*arguments), deadline.remaining)
    except TimeoutError as error:
        raise DeadlineError(
            f"The sampler of this queue ({name}) did not answer", deadline=deadline.seconds
        ) from error
    except (ValueError, ray.exceptions.RayActorError) as error:
        raise DataLostError(
            f"The sampler of this queue ({name}) is gone, with the process that called init. "
            f"Call init again there"
        ) from error


def _ray() -> Any:
    # Imported late: the memory backend needs no Ray. Its own types are partial.
    import ray

    return ray


def _name(namespace: str) -> str:
    return f"tq_redis_sampler:{namespace}"
