"""Claiming: which samples a task gets next, and what a consumer that waits is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tq_redis.client.core import ANSWER_S, ClientCore, distinct
from tq_redis.control.records import NotEnough, Write
from tq_redis.deadline import Deadline
from tq_redis.errors import DeadlineError, InputError, nearest
from tq_redis.metadata import BatchMeta

Mode = Literal["fetch", "force_fetch", "insert"]


class ClaimCalls(ClientCore):
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
        timeout: float | None = None,
    ) -> BatchMeta:
        """Metadata of samples.

        Args:
            data_fields: the fields that are wanted.
            batch_size: how many samples.
            partition_id: it need not exist yet.
            mode: ``fetch`` waits until ``batch_size`` samples have all the fields and were not
                consumed by ``task_name``, and marks them consumed; ``force_fetch`` gives all
                samples as they are (``batch_size`` and ``task_name`` do not matter);
                ``insert`` makes ``batch_size`` new samples without fields.
            task_name: who consumes; needed for ``fetch``.
            sampling_config: ``{"n_samples_per_prompt": n}``: only whole groups of n.
            timeout: for ``fetch``, how long to wait for samples; 0: a batch if there is one now,
                else an empty one.

        Returns:
            For ``fetch``: exactly ``batch_size`` samples in ascending order of id (whole groups
            one after the other), or none with ``timeout=0``.

        Raises:
            InputError: an argument is missing or out of range.
            DeadlineError: not enough samples came; says how many there are and what is missing.
            PartitionNotFoundError: for ``force_fetch``.
        """
        if mode == "force_fetch":
            return await self._all_samples(partition_id, data_fields, self._deadline(timeout))
        if batch_size < 1:
            raise InputError(f"batch_size must be positive, got {batch_size}")
        if mode == "insert":
            deadline = self._deadline(timeout)
            written = await self.control.produce(partition_id, Write(batch_size), deadline)
            return BatchMeta(written.ids, partition_id, {}, np.zeros(batch_size, np.int8))
        if mode != "fetch":
            raise InputError(f"mode must be fetch, force_fetch or insert, got {mode!r}")
        if not task_name:
            raise InputError("mode 'fetch' needs task_name: consumption is kept per task")
        fields = distinct(data_fields)
        group_size = _group_size(sampling_config, batch_size)
        return await self._fetch(fields, batch_size, partition_id, task_name, group_size, timeout)

    async def _fetch(
        self,
        fields: list[str],
        count: int,
        partition: str,
        task: str,
        group_size: int,
        timeout: float | None,
    ) -> BatchMeta:
        wait = self._deadline(timeout)
        while True:
            answer = Deadline(max(wait.remaining, ANSWER_S))
            found = await self.control.claim(
                partition, task, fields, count, self.name, answer, group_size=group_size
            )
            if not isinstance(found, NotEnough):
                return BatchMeta(found.ids, partition, found.schema, custom_meta=found.tags)
            if wait.seconds == 0:
                return BatchMeta.empty()
            if wait.passed:
                raise await self._too_few(found, fields, count, partition, task, group_size, wait)
            await self.control.wait(partition, found.event, wait)

    async def _too_few(
        self,
        found: NotEnough,
        fields: list[str],
        count: int,
        partition: str,
        task: str,
        group_size: int,
        wait: Deadline,
    ) -> DeadlineError:
        answer = Deadline(ANSWER_S)
        text = f"Task {task!r} waited {wait.seconds:g} s for {count} samples of {partition!r}"
        if not found.exists:
            known = await self.control.partitions(answer)
            text += f", which does not exist. {nearest(partition, known)}"
        else:
            text += f" with fields {fields}: {found.ready} are ready"
            if group_size:
                text += f", in {found.groups} whole groups of {group_size}"
            known = await self.control.fields(partition, answer)
            summary = await self.control.summary(partition, answer)
            text += f", of {summary['samples']} ({summary.get(f'consumed:{task}', 0)} consumed)."
            for name in fields:
                produced = summary.get(f"produced:{name}", 0)
                if name not in known:
                    text += f" Field {name!r} does not exist. {nearest(name, known)}"
                elif produced != summary["samples"]:
                    text += f" Field {name!r} is produced in {produced}."
        return DeadlineError(text, partition=partition, fields=fields, deadline=wait.seconds)

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


def _group_size(sampling: Mapping[str, Any] | None, batch_size: int) -> int:
    settings = dict(sampling or {})
    size = settings.pop("n_samples_per_prompt", 0)
    if settings:
        raise InputError(
            f"Unknown sampling_config {sorted(settings)}. "
            f"{nearest(sorted(settings)[0], ['n_samples_per_prompt'])}"
        )
    if not isinstance(size, int) or size < 0:
        raise InputError(f"n_samples_per_prompt must be a positive integer, got {size!r}")
    if size and batch_size % size:
        raise InputError(
            f"batch_size {batch_size} is not a multiple of n_samples_per_prompt {size}"
        )
    return size
