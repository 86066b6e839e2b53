"""A step without the queue: the driver holds every column, as verl's own trainer does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy
import torch
from tensordict import TensorDict
from verl import DataProto

from recipe.ppo.step import Columns, Step


class PlainStep(Step):
    """Batches that go to the workers and come back: what the queue is compared with.

    Args:
        name: of the step.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # One for each put: the samples of a later one have been through fewer tasks.
        self._parts: list[DataProto] = []
        self._given: dict[str, int] = defaultdict(int)
        self._sources: dict[int, list[DataProto]] = {}

    def _put(self, columns: Columns) -> None:
        rows = len(columns["uid"])
        part = DataProto(batch=TensorDict({}, batch_size=[rows]))
        for name, values in columns.items():
            part.non_tensor_batch[name] = numpy.empty(rows, dtype=object)
            part.non_tensor_batch[name][:] = values
        self._parts.append(part)

    def _batch(
        self, task: str, method: Any, info: Mapping[str, Any]
    ) -> AbstractContextManager[DataProto]:
        parts = self._parts[self._given[task] :]
        self._given[task] = len(self._parts)
        batch = DataProto.concat([_select(part, method) for part in parts])
        batch.meta_info = dict(info)
        self._sources[id(batch)] = parts
        return nullcontext(batch)

    def _take(self, method: Any, batch: DataProto, output: DataProto) -> Mapping[str, Any]:
        names = (*method.writes, *method.may_write, *method.tags)
        start = 0
        for part in self._sources.pop(id(batch)):
            rows = slice(start, start + len(part))
            start = rows.stop
            for name in names:
                if name in output.non_tensor_batch:
                    part.non_tensor_batch[name] = output.non_tensor_batch[name][rows]
                elif output.batch is not None and name in output.batch:
                    part.batch[name] = output.batch[name][rows]
        return output.meta_info

    def _lengths(self) -> list[int]:
        return torch.cat([part.batch["total_lengths"] for part in self._parts]).tolist()

    def _reorder(self, rows: Sequence[int]) -> None:
        whole = DataProto.concat(self._parts)
        whole.reorder(torch.tensor(rows))
        self._parts = [whole]
        self._given = defaultdict(int, dict.fromkeys(self._given, 1))

    def close(self) -> None:
        self._parts = []


def _select(part: DataProto, method: Any) -> DataProto:
    names = (*method.reads, *method.may_read)
    return part.select(
        batch_keys=[name for name in names if name in part.batch],
        non_tensor_batch_keys=[name for name in names if name in part.non_tensor_batch],
    )
