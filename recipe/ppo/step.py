"""One batch on its way through the tasks of a step, whichever way its columns travel."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from verl.utils import seqlen_balancing
from verl.utils.metric import reduce_metrics

from tq_redis.bridge import MetaFuture

_balancing: Any = seqlen_balancing

Columns = Mapping[str, Sequence[Any]]


class Step(ABC):
    """The samples of a step: made by puts, gone at its end, also when a task failed.

    Args:
        name: of the step, for example ``train_12``.

    Attributes:
        size: samples that were put.
        metrics: means over the workers.
        seconds: that each task took, as the driver sees it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.size = 0
        self.metrics: dict[str, float] = {}
        self.seconds: dict[str, float] = {}

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def put(self, columns: Columns, uids: Sequence[str], repeat: int = 1) -> None:
        """Add each row ``repeat`` times. Those with the same uid answer the same prompt."""
        repeated = {
            name: [value for value in values for _ in range(repeat)]
            for name, values in {**columns, "uid": uids}.items()
        }
        with self.timed("put"):
            self._put(repeated)
        self.size += len(repeated["uid"])

    def run(self, task: str, method: Any, workers: Any, *others: Step, **info: Any) -> Any:
        """Let the workers do a task on the samples that it has not been done on.

        Args:
            task: its name, in the queue and in the metrics.
            method: of the worker class, decorated with tqbridge: says which columns it reads.
            workers: the worker group that runs it.
            others: steps whose samples the method takes as further arguments.
            info: reaches the method as ``meta_info``.

        Returns:
            The ``meta_info`` that the workers return, without the metrics; nothing where no sample
            was left.
        """
        return self.start(task, method, workers, *others, **info)()

    def start(
        self, task: str, method: Any, workers: Any, *others: Step, **info: Any
    ) -> Callable[[], dict[str, Any]]:
        """The same, without waiting for the workers where the method does not block.

        Returns:
            A function that waits for them, and gives what :meth:`run` does. It may be called again.
        """
        with self.timed(task), ExitStack() as held:
            batch = held.enter_context(self._batch(task, method, info))
            further = [held.enter_context(other._batch(task, method, {})) for other in others]
            if not len(batch):
                return dict[str, Any]
            pending = getattr(workers, method.__name__)(batch, *further)
            claims = held.pop_all()
        found: list[dict[str, Any]] = []

        def wait() -> dict[str, Any]:
            if not found:
                with self.timed(task), claims:
                    output = pending.get() if isinstance(pending, MetaFuture) else pending
                    found.append(self._report(self._take(method, batch, output)))
            return found[0]

        return wait

    def balance(self, ranks: int) -> None:
        """Order the samples so that each of ``ranks`` equal parts has as many tokens as others.

        In each part, the shortest samples come first and last: verl's order, which keeps
        pipelines of micro-batches full. Only the number of tokens of each sample is looked at.
        """
        with self.timed("balance"):
            lengths = self._lengths()
            work = _balancing.calculate_workload(torch.tensor(lengths)).tolist()
            parts: list[list[int]] = _balancing.get_seqlen_balanced_partitions(
                work, k_partitions=ranks, equal_size=True
            )
            for part in parts:
                part.sort(key=lambda row: (work[row], row))
                part[:] = part[::2] + part[1::2][::-1]
            self._reorder([row for part in parts for row in part])
        self.metrics |= _balancing.log_seqlen_unbalance(lengths, parts, prefix="global_seqlen")

    @abstractmethod
    def close(self) -> None:
        """Let the samples go."""

    @contextmanager
    def timed(self, task: str) -> Generator[None]:
        """Add the time that the block takes to that of ``task``."""
        start = time.perf_counter()
        yield
        self.seconds[task] = self.seconds.get(task, 0.0) + time.perf_counter() - start

    @abstractmethod
    def _put(self, columns: Columns) -> None: ...

    @abstractmethod
    def _batch(
        self, task: str, method: Any, info: Mapping[str, Any]
    ) -> AbstractContextManager[Any]:
        """What the method takes: the declared columns of the samples left for the task. They are
        done when the block ends, and left again if it fails."""

    @abstractmethod
    def _take(self, method: Any, batch: Any, output: Any) -> Mapping[str, Any]:
        """Keep the declared columns of the output; gives its ``meta_info``."""

    @abstractmethod
    def _lengths(self) -> list[int]:
        """Tokens of each sample."""

    @abstractmethod
    def _reorder(self, rows: Sequence[int]) -> None:
        """The order of the samples for the tasks to come."""

    def _report(self, info: Mapping[str, Any]) -> dict[str, Any]:
        rest = dict(info)
        for name, value in reduce_metrics(dict(rest.pop("metrics", {}))).items():
            self.metrics[name] = float(value)
        return rest
