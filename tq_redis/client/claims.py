"""Claiming: which samples a task gets next, and what a consumer that waits is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tq_redis.client.core import distinct
from tq_redis.client.fetch import Fetch, group_size_of
from tq_redis.client.limits import LimitCalls
from tq_redis.control.records import Wanted, Write
from tq_redis.deadline import Deadline
from tq_redis.errors import InputError, nearest
from tq_redis.metadata import BatchMeta
from tq_redis.samplers import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    Sampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)

Mode = Literal["fetch", "force_fetch", "insert"]


class ClaimCalls(LimitCalls):
    """Metadata of samples, to be worked on once per task."""

    async def get_meta(
        self,
        data_fields: Sequence[str],
        batch_size: int,
        partition_id: str,
        mode: Mode = "fetch",
        task_name: str | None = None,
        sampling_config: Mapping[str, Any] | None = None,
        *,
        sampler: Sampler | None = None,
        lease: float | None = None,
        timeout: float | None = None,
    ) -> BatchMeta:
        """Metadata of samples.

        Args:
            data_fields: the fields that are wanted.
            batch_size: how many samples.
            partition_id: it need not exist yet.
            mode: ``fetch`` waits until ``batch_size`` samples have all the fields and may be
                claimed by ``task_name``, and claims them; ``force_fetch`` gives all samples as
                they are (only ``data_fields`` and ``partition_id`` matter); ``insert`` makes
                ``batch_size`` new samples without fields.
            task_name: who consumes; needed for ``fetch``.
            sampling_config: ``dp_rank`` and ``batch_index`` together name a batch: whoever asks for
                it again gets the same samples. Other values go to a sampler of your own.
            sampler: which of the ready samples are taken; by default the oldest.
            lease: None: the samples are consumed at once. Else seconds for which they are this
                consumer's: unless it acknowledges them by then (:meth:`ack`), or renews the lease,
                others get them. A sample that was delivered ``config.max_deliveries`` times is
                set aside instead.
            timeout: for ``fetch``, how long to wait for samples; 0: a batch if there is one now,
                else an empty one. Where a task asks for these fields for the first time, the index
                of what is ready is built first: some seconds for a million samples.

        Returns:
            For ``fetch``: exactly ``batch_size`` samples (a sampler of your own may choose another
            number), in ascending order of id, or whole groups one after the other; none with
            ``timeout=0``.

        Raises:
            InputError: an argument is missing or out of range, or the batch is larger than the
                task's limit (:meth:`limit`).
            PartitionFullError: for ``insert``, there was no room within the limits of tasks.
            DeadlineError: not enough samples came; says how many there are and what is missing.
            EndOfStreamError: the task has consumed all samples that there will be.
            CannotFillError: fewer than ``batch_size`` can still come; ``left`` says how many.
            SampleNotFoundError: samples of the batch named in ``sampling_config`` were cleared.
            NotReadyError: samples of that batch lack a field that it was not drawn for.
            PartitionNotFoundError: for ``force_fetch``.
        """
        if mode == "force_fetch":
            return await self._all_samples(partition_id, data_fields, self._deadline(timeout))
        if batch_size < 1:
            raise InputError(f"batch_size must be positive, got {batch_size}")
        if mode == "insert":
            deadline = self._deadline(timeout)
            ids = await self._register(partition_id, Write(batch_size), deadline)
            return BatchMeta(ids, partition_id, {}, np.zeros(batch_size, np.int8))
        if mode != "fetch":
            raise InputError(f"mode must be fetch, force_fetch or insert, got {mode!r}")
        if not task_name:
            raise InputError("mode 'fetch' needs task_name: consumption is kept per task")
        if lease is not None and not lease > 0:
            raise InputError(f"lease must be positive, got {lease}")
        chooser = sampler or SequentialSampler()
        config = dict(sampling_config or {})
        draw = _draw_name(chooser, config)
        count = _samples_needed(chooser, batch_size)
        wanted = Wanted(
            task_name,
            distinct(data_fields),
            count,
            chooser.n_samples_per_prompt if isinstance(chooser, GRPOGroupNSampler) else 0,
            lease,
            self.config.max_deliveries,
            draw,
            # Only balanced shares are drawn for several ranks at once.
            f"*:{config['batch_index']}" if isinstance(chooser, SeqlenBalancedSampler) else None,
        )
        fetch = Fetch(self, partition_id, wanted, chooser, batch_size, config)
        return await fetch.run(self._deadline(timeout))

    async def _all_samples(
        self, partition: str, fields: Sequence[str], deadline: Deadline
    ) -> BatchMeta:
        rows = await self.control.describe(partition, deadline, fields=distinct(fields))
        flags = np.ones(len(rows.ids), np.int8)
        for produced in rows.produced.values():
            flags &= np.array(produced, np.int8)
        if len(rows.produced) < len(set(fields)):
            flags[:] = 0
        return BatchMeta(rows.ids, partition, rows.schema, flags, custom_meta=rows.tags)


def _draw_name(sampler: Sampler, config: Mapping[str, Any]) -> str | None:
    """Under which name the batch is remembered."""
    numbers = [config.get(name) for name in ("dp_rank", "batch_index")]
    if numbers == [None, None]:
        if isinstance(sampler, RankAwareSampler | SeqlenBalancedSampler):
            raise InputError(
                f"{type(sampler).__name__} needs dp_rank and batch_index in sampling_config"
            )
    elif not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise InputError(
            f"dp_rank and batch_index must both be integers from 0 on, got {numbers[0]!r} "
            f"and {numbers[1]!r}"
        )
    if isinstance(sampler, SeqlenBalancedSampler) and config["dp_rank"] >= sampler.dp_size:
        raise InputError(
            f"dp_rank is {config['dp_rank']} of a SeqlenBalancedSampler for {sampler.dp_size} ranks"
        )
    extra = sorted(config.keys() - {"dp_rank", "batch_index"})
    if extra and not isinstance(sampler, BaseSampler):
        raise InputError(
            f"Unknown sampling_config {extra}. {nearest(extra[0], ['dp_rank', 'batch_index'])}"
        )
    return None if numbers == [None, None] else f"{numbers[0]}:{numbers[1]}"


def _samples_needed(sampler: Sampler, batch_size: int) -> int:
    """How many samples must be ready."""
    size = group_size_of(sampler)
    if batch_size % size:
        raise InputError(
            f"batch_size {batch_size} is not a multiple of n_samples_per_prompt {size}"
        )
    return batch_size * (sampler.dp_size if isinstance(sampler, SeqlenBalancedSampler) else 1)
