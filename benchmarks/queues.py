"""The two queues behind one face, so that one piece of code is the same work for both.

Both have a client with the same calls for the same things; what differs is how they start and how a
consumer waits.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDict

# transfer_queue has no wait that leaves its controller free; a consumer asks again and again. Its
# own StreamingDataset pauses a second between two questions; this is kinder to its latency.
POLL_S = 0.001
WAIT_S = 30.0


class Queue(ABC):
    """A queue, started or attached to.

    Attributes:
        client: the queue's own client; both have the calls used here.
        module: the queue's package, for the calls by key.
    """

    name: str
    client: Any
    module: Any

    @abstractmethod
    def start(self) -> None:
        """Start it in this process's Ray."""

    @abstractmethod
    def attach(self) -> None:
        """Become a client of it in a Ray worker."""

    @abstractmethod
    def end(self) -> None:
        """End what :meth:`start` started."""

    @abstractmethod
    def claim(self, partition: str, fields: Sequence[str], count: int, task: str) -> Any:
        """Metadata of ``count`` samples for ``task``, without waiting; of none where there are
        fewer."""

    @abstractmethod
    def wait_for(self, partition: str, fields: Sequence[str], count: int, task: str) -> Any:
        """The same, as soon as there are enough."""

    def put(self, rows: TensorDict, partition: str) -> Any:
        """New samples."""
        return self.client.put(rows, partition_id=partition)

    def read(self, meta: Any) -> Any:
        """The columns of samples."""
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


QUEUES: dict[str, type[Queue]] = {queue.name: queue for queue in (TQRedis, TransferQueue)}
