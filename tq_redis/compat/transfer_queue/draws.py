"""Claiming with the sampler of the queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tq_redis import metadata as strict
from tq_redis import samplers
from tq_redis.client.kv import AsyncKVClient
from tq_redis.compat.transfer_queue.errors import RequestError, RequestTimeoutError
from tq_redis.compat.transfer_queue.metadata import BatchMeta
from tq_redis.compat.transfer_queue.metadata.schema import from_strict
from tq_redis.compat.transfer_queue.own_sampler import fetch_chosen
from tq_redis.compat.transfer_queue.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    from_spec,
)
from tq_redis.compat.transfer_queue.settings import Note
from tq_redis.deadline import Deadline
from tq_redis.errors import CannotFillError, DeadlineError, EndOfStreamError, InputError

# What transfer_queue waits by default before it says that there are too few samples.
_WAIT_S = 5.0


async def fetch(
    core: AsyncKVClient,
    note: Note,
    fields: Sequence[str],
    batch_size: int,
    partition: str,
    task: str,
    config: Mapping[str, Any],
) -> BatchMeta:
    """Claim a batch, as ``get_meta`` describes it.

    Raises:
        RequestError, RequestTimeoutError
    """
    wait = Deadline(0.0 if note.polling_mode else _WAIT_S)
    try:
        if not note.sampler:
            found = await fetch_chosen(core, fields, batch_size, partition, task, config, wait)
        else:
            sampler, draw = _strict_sampler(from_spec(note.sampler), config)
            found = await core.get_meta(
                fields,
                batch_size,
                partition,
                "fetch",
                task,
                draw,
                sampler=sampler,
                timeout=wait.seconds,
            )
    except InputError as error:
        raise RequestError(error.message, partition=partition, fields=fields) from error
    except (DeadlineError, EndOfStreamError, CannotFillError) as error:
        if note.polling_mode and not isinstance(error, DeadlineError):
            return BatchMeta.empty()
        raise RequestTimeoutError(
            error.message, partition=partition, fields=fields, deadline=wait.seconds
        ) from error
    return _lenient(found)


def _lenient(found: strict.BatchMeta) -> BatchMeta:
    meta = BatchMeta(
        found.global_indexes,
        found.partition_ids,
        from_strict(found.field_schema),
        found.production_status,
        custom_meta=found.custom_meta,
    )
    meta.note_tags()
    return meta


def _strict_sampler(
    sampler: BaseSampler, config: Mapping[str, Any]
) -> tuple[samplers.Sampler, dict[str, Any]]:
    """The sampler of the queue that does the same, and the name of the draw."""
    rank, index = config.get("dp_rank"), config.get("batch_index")
    if isinstance(sampler, SeqlenBalancedSampler):
        return _Balanced(sampler), {"dp_rank": rank or 0, "batch_index": index or 0}
    named = {} if rank is None else {"dp_rank": rank, "batch_index": index or 0}
    if isinstance(sampler, GRPOGroupNSampler):
        return _Groups(sampler), named
    if isinstance(sampler, RankAwareSampler):
        return samplers.RankAwareSampler(), named
    return samplers.SequentialSampler(), {}


class _Groups(samplers.BaseSampler):
    """Groups of neighbours; without memory, which is the draw's."""

    def __init__(self, rule: GRPOGroupNSampler) -> None:
        self._size = rule.n_samples_per_prompt

    def sample(
        self, ready: samplers.Ready, batch_size: int, **sampling_config: Any
    ) -> Sequence[int]:
        return GRPOGroupNSampler(self._size).sample(ready.ids, batch_size)[0]


class _Balanced(samplers.SeqlenBalancedSampler):
    """Groups of neighbours, dealt out to ranks."""

    def __init__(self, rule: SeqlenBalancedSampler) -> None:
        super().__init__(rule.n_samples_per_prompt, rule.dp_size)

    def shares(self, ready: samplers.Ready, batch_size: int, ranks: int) -> list[list[int]]:
        rule = SeqlenBalancedSampler(self.n_samples_per_prompt, ranks)
        return rule.shares(ready.ids, batch_size, dict(zip(ready.ids, ready.tags, strict=True)))
