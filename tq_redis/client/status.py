"""Status: what is there, produced and consumed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tq_redis.client.core import ClientCore, distinct
from tq_redis.errors import PartitionNotFoundError


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

        Raises:
            PartitionNotFoundError
        """
        rows = await self.control.describe(
            partition_id, self._deadline(timeout), fields=(), task=task_name
        )
        return torch.tensor(rows.ids), torch.tensor(rows.consumed, dtype=torch.int8)

    async def check_production_status(
        self, data_fields: Sequence[str], partition_id: str, *, timeout: float | None = None
    ) -> bool:
        """Whether all samples of the partition have all the fields; False where it has none."""
        samples, counts = await self._counts(
            partition_id, [f"produced:{name}" for name in distinct(data_fields)], timeout
        )
        return samples > 0 and all(count == samples for count in counts)

    async def check_consumption_status(
        self, task_name: str, partition_id: str, *, timeout: float | None = None
    ) -> bool:
        """Whether the task consumed all samples of the partition; False where it has none."""
        samples, counts = await self._counts(partition_id, [f"consumed:{task_name}"], timeout)
        return samples > 0 and counts[0] == samples

    async def _counts(
        self, partition: str, names: Sequence[str], timeout: float | None
    ) -> tuple[int, list[int]]:
        try:
            summary = await self.control.summary(partition, self._deadline(timeout))
        except PartitionNotFoundError:
            return 0, [0] * len(names)
        return int(summary["samples"]), [int(summary.get(name, 0)) for name in names]
