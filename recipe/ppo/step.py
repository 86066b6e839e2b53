"""One batch on its way through the tasks of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from verl.utils.metric import reduce_metrics

from tq_redis import BatchMeta, Client


class Step:
    """A partition that lives as long as the step: made by the first put, cleared at the end.

    The tensors of the step stay with the workers and in the queue; here are only references to
    them and the metrics that the tasks return.

    Args:
        client: of the queue.
        partition: the partition's name.

    Attributes:
        metrics: means over the workers, and ``timing_s/<task>`` in seconds.
    """

    def __init__(self, client: Client, partition: str) -> None:
        self._client = client
        self.partition = partition
        self.size = 0
        self.metrics: dict[str, float] = {}

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Also when a task failed: nobody will read the rest of this step.
        self._client.clear_partition(self.partition)

    def put(self, columns: Mapping[str, Sequence[Any]], group_ids: list[str]) -> None:
        """Add samples. Those with the same group id answer the same prompt."""
        self._timed(
            "put",
            lambda: self._client.put(
                dict(columns), partition_id=self.partition, group_ids=group_ids
            ),
        )
        self.size += len(group_ids)

    def run(self, name: str, method: Any, workers: Any, **info: Any) -> None:
        """Let the workers take all samples of the step and do one task on them.

        Args:
            name: of the task, in the queue and in the metrics.
            method: of the worker class, decorated with tqbridge: says which columns it reads.
            workers: the worker group that runs it.
            info: reaches the method as ``meta_info``.
        """

        def call() -> BatchMeta:
            meta = self._client.get_meta(
                list(method.reads), self.size, self.partition, task_name=name
            )
            meta.extra_info.update(info)
            return getattr(workers, method.__name__)(meta)

        done = self._timed(name, call)
        for metric, value in reduce_metrics(dict(done.extra_info.get("metrics", {}))).items():
            self.metrics[metric] = float(value)

    def _timed(self, name: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        self.metrics[f"timing_s/{name}"] = time.perf_counter() - start
        return result
