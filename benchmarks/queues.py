"""The contenders behind one face, so that one piece of code is the same work for all.

The two queues have a client with the same calls for the same things; what differs is how they start
and how a consumer waits. Beside them stand plain Ray and plain memory, which only carry data.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import ray as untyped_ray
from tensordict import TensorDict

ray: Any = untyped_ray  # its own types are partial

# transfer_queue has no wait that leaves its controller free; a consumer asks again and again. Its
# own StreamingDataset pauses a second between two questions; this is kinder to its latency.
POLL_S = 0.001
WAIT_S = 30.0


class Carrier(ABC):
    """What carries data from one process to another.

    Attributes:
        needs_ray: whether it works inside a Ray.
        has_views: whether its readers can do without a copy.
    """

    name: str
    needs_ray: ClassVar[bool] = True
    has_views: ClassVar[bool] = False

    def start(self) -> None:  # noqa: B027  # not all have something to start
        """Start it in this process's Ray."""

    def attach(self) -> None:  # noqa: B027
        """Become a client of it in a Ray worker."""

    def end(self) -> None:  # noqa: B027
        """End what :meth:`start` started."""

    @abstractmethod
    def put(self, rows: TensorDict, partition: str) -> Any:
        """New samples. What it returns is all that a reader needs, and goes there through Ray."""

    @abstractmethod
    def read(self, meta: Any) -> TensorDict:
        """The columns of samples, in private memory."""

    def view(self, meta: Any) -> TensorDict:
        """The columns of samples, in shared memory where that can be."""
        return self.read(meta)

    @abstractmethod
    def clear_partition(self, partition: str) -> None: ...


class Queue(Carrier):
    """A queue, started or attached to.

    Attributes:
        client: the queue's own client; both have the calls used here.
        module: the queue's package, for the calls by key.
    """

    client: Any
    module: Any

    @abstractmethod
    def claim(self, partition: str, fields: Sequence[str], count: int, task: str) -> Any:
        """Metadata of ``count`` samples for ``task``, without waiting; of none where there are
        fewer."""

    @abstractmethod
    def wait_for(self, partition: str, fields: Sequence[str], count: int, task: str) -> Any:
        """The same, as soon as there are enough."""

    def put(self, rows: TensorDict, partition: str) -> Any:
        return self.client.put(rows, partition_id=partition)

    def read(self, meta: Any) -> TensorDict:
        return self.client.get_data(meta)

    def clear_samples(self, meta: Any) -> None:
        self.client.clear_samples(meta)

    def clear_partition(self, partition: str) -> None:
        self.client.clear_partition(partition)

    def partitions(self) -> list[str]:
        return self.client.get_partition_list()

    def put_keys(
        self,
        keys: list[str],
        partition: str,
        rows: TensorDict | None,
        tags: Sequence[Mapping[str, Any]],
    ) -> None:
        """Samples by key, made or changed; without ``rows`` only their tags."""
        self.module.kv_batch_put(keys=keys, partition_id=partition, fields=rows, tags=list(tags))

    def keys(self, partition: str) -> dict[str, Any]:
        """Key -> tags."""
        return self.module.kv_list(partition_id=partition)[partition]


class TQRedis(Queue):
    """This project as ``pip install`` gives it: with the embedded server, unless ``TQ_REDIS_URL``
    names another one."""

    name = "tq_redis"
    has_views = True

    def __init__(self) -> None:
        import tq_redis

        self.module = tq_redis

    def start(self) -> None:
        self.module.init({"redis": {"namespace": "benchmark"}})
        self.attach()

    def attach(self) -> None:
        self.client = self.module.get_client()

    def end(self) -> None:
        self.module.close()

    def view(self, meta: Any) -> TensorDict:
        return self.client.get_data(meta, copy=False)

    def claim(self, partition: str, fields: Sequence[str], count: int, task: str) -> Any:
        return self.client.get_meta(list(fields), count, partition, task_name=task, timeout=0)

    def wait_for(self, partition: str, fields: Sequence[str], count: int, task: str) -> Any:
        return self.client.get_meta(list(fields), count, partition, task_name=task, timeout=WAIT_S)


class TransferQueue(Queue):
    """The peer with its default backend, SimpleStorage: a controller and two storage units.

    ``polling_mode``: without it, ``get_meta`` of rows that are not there sleeps five seconds in the
    controller's only thread, and then fails.
    """

    name = "transfer_queue"

    def __init__(self) -> None:
        import transfer_queue  # pyright: ignore[reportMissingImports]  # in its own environment

        self.module = transfer_queue

    def start(self) -> None:
        from omegaconf import OmegaConf

        self.module.init(OmegaConf.create({"controller": {"polling_mode": True}}))
        self.client = self.module.get_client()

    def attach(self) -> None:
        self.module.init()
        self.client = self.module.get_client()

    def end(self) -> None:
        self.module.close()

    def claim(self, partition: str, fields: Sequence[str], count: int, task: str) -> Any:
        return self.client.get_meta(list(fields), count, partition, task_name=task)

    def wait_for(self, partition: str, fields: Sequence[str], count: int, task: str) -> Any:
        end = time.monotonic() + WAIT_S
        while not (meta := self.claim(partition, fields, count, task)).size:
            if time.monotonic() > end:
                raise TimeoutError(f"{count} samples of {partition!r} did not come in {WAIT_S} s")
            time.sleep(POLL_S)
        return meta


class PlainRay(Carrier):
    """``ray.put`` of the TensorDict; the reader is handed the reference."""

    name = "plain Ray"

    def put(self, rows: TensorDict, partition: str) -> Any:
        return [ray.put(rows)]  # in a list, or Ray would hand over the TensorDict

    def read(self, meta: Any) -> TensorDict:
        return ray.get(meta[0])

    def clear_partition(self, partition: str) -> None:
        """Ray frees an object when nobody holds a reference."""


class Memory(Carrier):
    """A copy inside one process: what no queue can do without."""

    name = "torch.clone"
    needs_ray = False

    def put(self, rows: TensorDict, partition: str) -> Any:
        return TensorDict({name: column.clone() for name, column in rows.items()}, rows.shape)

    def read(self, meta: Any) -> TensorDict:
        return self.put(meta, "")

    def clear_partition(self, partition: str) -> None:
        """The copy goes with its last name."""


CONTENDERS: dict[str, type[Carrier]] = {
    contender.name: contender for contender in (TQRedis, TransferQueue, PlainRay, Memory)
}
