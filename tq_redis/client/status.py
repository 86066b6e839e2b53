"""Status: what is there, produced and consumed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tq_redis.client.core import ClientCore, distinct
from tq_redis.control.standing import Standing, standing_of
from tq_redis.data import StoreUsage
from tq_redis.errors import InputError, PartitionNotFoundError
from tq_redis.metadata import BatchMeta


class StatusCalls(ClientCore):
    """Reading how far the tasks of a partition are. Nothing is changed."""

    async def get_partition_list(self, *, timeout: float | None = None) -> list[str]:
        """Names of the partitions, sorted."""
        return await self.control.partitions(self._deadline(timeout))

    async def get_summary(
        self, partition_id: str, *, timeout: float | None = None
    ) -> dict[str, int | str]:
        """The partition's summary, as ``redis-cli HGETALL`` shows it: ``samples``, ``bytes``,
        ``produced:<field>``, ``consumed:<task>``.

        Raises:
            PartitionNotFoundError
        """
        return await self.control.summary(partition_id, self._deadline(timeout))

    async def get_standing(self, partition_id: str, *, timeout: float | None = None) -> Standing:
        """How far the tasks of a partition are, what each could claim now, and who waits.

        ``tq-redis status`` shows it in a terminal.

        Raises:
            PartitionNotFoundError
        """
        return await standing_of(self.control, partition_id, self._deadline(timeout))

    async def get_store_usage(self, *, timeout: float | None = None) -> list[StoreUsage]:
        """How many blocks and bytes each store keeps, and how many it may: the stores of the Ray
        nodes, and the storage units. Those that do not answer are left out.

        Raises:
            NotInitializedError: this process cannot reach all kinds of stores that the queue has.
        """
        return await self.data.usage(self._deadline(timeout))

    async def get_production_status(
        self, data_fields: Sequence[str], partition_id: str, *, timeout: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample ids (N,) int64 and flags (N, fields) int8: 1 where the cell is produced.

        Raises:
            PartitionNotFoundError, FieldNotFoundError
        """
        deadline = self._deadline(timeout)
        fields = distinct(data_fields)
        rows = await self.control.describe(partition_id, deadline, fields=fields)
        for name in fields:
            if name not in rows.produced:
                await self.control.require_field(partition_id, name, deadline)
        flags = torch.tensor([rows.produced[name] for name in fields], dtype=torch.int8)
        return torch.tensor(rows.ids), flags.T.contiguous()

    async def get_consumption_status(
        self, task_name: str, partition_id: str, *, timeout: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample ids (N,) int64 and flags (N,) int8: 1 where the task consumed the sample.

        Samples that a consumer holds with a lease, or that are set aside, are not consumed.

        Raises:
            PartitionNotFoundError
        """
        rows = await self.control.describe(
            partition_id, self._deadline(timeout), fields=(), task=task_name
        )
        return torch.tensor(rows.ids), torch.tensor(
            [state == "consumed" for state in rows.states], dtype=torch.int8
        )

    async def get_set_aside(
        self, task_name: str, partition_id: str, *, timeout: float | None = None
    ) -> BatchMeta:
        """The samples that were delivered to the task ``config.max_deliveries`` times and never
        acknowledged. They are not given out any more, unless :meth:`reset_consumption` is called.

        Raises:
            PartitionNotFoundError
        """
        rows = await self.control.describe(partition_id, self._deadline(timeout), task=task_name)
        places = [place for place, state in enumerate(rows.states) if state == "aside"]
        kept = {name for name, flags in rows.produced.items() if all(flags[i] for i in places)}
        return BatchMeta(
            [rows.ids[place] for place in places],
            partition_id,
            {name: form for name, form in rows.schema.items() if name in kept},
            custom_meta=[rows.tags[place] for place in places],
        )

    async def check_production_status(
        self, data_fields: Sequence[str], partition_id: str, *, timeout: float | None = None
    ) -> bool:
        """Whether all samples of the partition have all the fields.

        False where it has none, and where it expects more samples than were made.
        """
        counts = [f"produced:{name}" for name in distinct(data_fields)]
        return await self._all_are(counts, partition_id, timeout)

    async def check_consumption_status(
        self, task_name: str, partition_id: str, *, timeout: float | None = None
    ) -> bool:
        """Whether the task consumed all samples of the partition.

        False where it has none, and where it expects more samples than were made.
        """
        return await self._all_are([f"consumed:{task_name}"], partition_id, timeout)

    async def reset_consumption(
        self, partition_id: str, task_name: str | None = None, *, timeout: float | None = None
    ) -> int:
        """Let a task claim all samples again: consumed ones, those set aside, those held by others.

        Consumers that hold samples lose their leases. Samples claimed while this runs stay so. If
        it fails half way, call it again: samples whose holders lost them come back only then.

        Args:
            partition_id: where.
            task_name: the task; None: all that ever claimed there.

        Returns:
            How many samples were given back, summed over tasks.

        Raises:
            PartitionNotFoundError
        """
        deadline = self._deadline(timeout)
        if task_name is not None:
            return await self.control.reset_consumption(partition_id, task_name, deadline)
        summary = await self.control.summary(partition_id, deadline)
        tasks = sorted({n.partition(":")[2] for n in summary if n.startswith(_PER_TASK)})
        return sum([await self.control.reset_consumption(partition_id, t, deadline) for t in tasks])

    # What is to come

    async def expect(
        self, partition_id: str, samples: int, *, timeout: float | None = None
    ) -> None:
        """Declare how many samples will be made in a partition, cleared ones counted too.

        Its consumers are then told the end (:class:`EndOfStreamError`), or that a batch cannot be
        filled any more; a put of more new samples is refused. May be declared before the first put,
        and again with another number.

        Raises:
            InputError: ``samples`` is negative.
            PartitionEndedError: more are made already, or the partition has ended.
        """
        if samples < 0:
            raise InputError(f"samples must not be negative, got {samples}")
        await self.control.expect(partition_id, samples, self._deadline(timeout))

    async def end_partition(self, partition_id: str, *, timeout: float | None = None) -> None:
        """Say that no more samples will be made in a partition. May be repeated.

        Consumers get what there is, and are then told the end (:class:`EndOfStreamError`).
        """
        await self.control.expect(partition_id, None, self._deadline(timeout))

    async def _all_are(self, counts: list[str], partition: str, timeout: float | None) -> bool:
        try:
            summary = await self.control.summary(partition, self._deadline(timeout))
        except PartitionNotFoundError:
            return False
        samples, made = int(summary["samples"]), int(summary.get("made", 0))
        complete = "ended" in summary or made >= int(summary.get("expected", 0))
        return samples > 0 and complete and all(summary.get(n, 0) == samples for n in counts)


_PER_TASK = ("consumed:", "claimed:", "set_aside:")
