"""A step whose columns are in the queue: the driver holds references and tags."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from recipe.ppo.step import Columns, Step
from tq_redis import BatchMeta, Client, ConfigError, DataLostError
from tq_redis.samplers import Sampler

_PRODUCED = "produced:"


class QueueStep(Step):
    """A partition that lives as long as the step.

    Args:
        client: of the queue.
        name: of the step and the partition.
        lease_s: seconds for which a task's samples are its own until it is done; None: they are
            consumed when they are given out.
        sampler: in which order a task gets the samples, until the step is balanced.
        left: a killed run left the partition. Its samples are taken over, and tasks are done only
            on those that lack what the task writes.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        *,
        lease_s: float | None = None,
        sampler: Sampler | None = None,
        left: bool = False,
    ) -> None:
        super().__init__(name)
        self._client = client
        self._lease_s = lease_s
        self._sampler = sampler
        self._left = left
        self._fields: set[str] = set()
        self._given: dict[str, int] = defaultdict(int)
        self._place: dict[int, int] = {}
        self._taken_over = False

    def _put(self, columns: Columns) -> None:
        if self._left and not self.size and self._take_over(list(columns["uid"])):
            return
        made = self._client.put(
            dict(columns), partition_id=self.name, group_ids=list(columns["uid"])
        )
        self._fields.update(made.field_names)

    def _batch(
        self, task: str, method: Any, info: Mapping[str, Any]
    ) -> AbstractContextManager[BatchMeta]:
        fields = (*method.reads, *(name for name in method.may_read if name in self._fields))
        meta = self._claim(task, fields)
        return self._held(meta, self._undone(meta, method) if self._taken_over else meta, info)

    @contextmanager
    def _held(
        self, claimed: BatchMeta, meta: BatchMeta, info: Mapping[str, Any]
    ) -> Generator[BatchMeta]:
        """A part of the claimed samples, all of which are done when the block ends."""
        meta.extra_info.update(info)
        with nullcontext() if self._lease_s is None else self._client.hold(claimed):
            yield meta

    def _take_over(self, uids: list[str]) -> bool:
        """Go on with the samples that a killed run left, if they are those of this step."""
        left = self._client.get_meta(("uid",), 0, self.name, mode="force_fetch")
        if self._uids_of(left) != uids:
            self._client.clear_partition(self.name)
            return False
        self._client.reset_consumption(self.name)
        counts = self._client.get_summary(self.name)
        self._fields = {
            name.removeprefix(_PRODUCED)
            for name, count in counts.items()
            if name.startswith(_PRODUCED) and count == left.size
        }
        self._taken_over = True
        return True

    def _uids_of(self, left: BatchMeta) -> list[str]:
        """Empty where samples lack them, or where they are lost."""
        if not left.is_ready:
            return []
        try:
            return list(self._client.get_columns(left, ["uid"])["uid"])
        except DataLostError:
            return []

    def _undone(self, meta: BatchMeta, method: Any) -> BatchMeta:
        """The samples that lack what the method writes; all, where it changes what is there."""
        new = [name for name in method.writes if name not in method.reads]
        if not new:
            return meta
        there = self._client.get_meta(new, 0, self.name, mode="force_fetch")
        done = dict(zip(there.global_indexes, there.production_status, strict=True))
        return meta.select_samples(
            [row for row, sample in enumerate(meta.global_indexes) if not done[sample]]
        )

    def _claim(self, task: str, fields: Sequence[str]) -> BatchMeta:
        size = self.size - self._given[task]
        meta = self._client.get_meta(
            list(fields),
            size,
            self.name,
            task_name=task,
            sampler=self._sampler,
            lease=self._lease_s,
        )
        if meta.size != size:
            raise ConfigError(
                f"tq_redis.step.sampler chose {meta.size} of the {size} samples of {self.name!r} "
                f"for the task {task!r}: it may order them, and must leave none out"
            )
        self._given[task] = self.size
        if self._place:
            rows = range(meta.size)
            meta.reorder(sorted(rows, key=lambda row: self._place[meta.global_indexes[row]]))
        return meta

    def _take(self, method: Any, batch: BatchMeta, output: BatchMeta) -> Mapping[str, Any]:
        self._fields.update(output.field_names)
        return output.extra_info

    def _lengths(self) -> list[int]:
        self._balanced = self._client.get_meta((), self.size, self.name, task_name="balance")
        return [tags["total_lengths"] for tags in self._balanced.custom_meta]

    def _reorder(self, rows: Sequence[int]) -> None:
        ids = self._balanced.global_indexes
        self._place = {ids[row]: place for place, row in enumerate(rows)}

    def close(self) -> None:
        # Also when a task failed: nobody will read the rest of this step.
        self._client.clear_partition(self.name)
