"""The batches that a task may claim, as an iterable dataset of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from omegaconf import DictConfig
from torch.utils.data import IterableDataset, get_worker_info

from tq_redis.client.core import distinct
from tq_redis.client.fetch import group_size_of
from tq_redis.client.sync import Client
from tq_redis.config import Config, load_config
from tq_redis.errors import (
    CannotFillError,
    ConfigError,
    DeadlineError,
    EndOfStreamError,
    InputError,
)
from tq_redis.samplers import BaseSampler, Ready, Sampler, SeqlenBalancedSampler
from tq_redis.session import get_client, is_initialized
from tq_redis.streaming.batches import chunk_batch_fn, default_fetch_batch_fn, require_positive


class StreamingDataset(IterableDataset[Any]):
    """Micro-batches ``(TensorDict, BatchMeta)`` of the samples that a task may claim.

    Iterating waits for samples, woken by Redis, of a partition that need not exist yet. It ends
    when the task has consumed all that there will be, as ``expect`` or ``end_partition`` declare;
    a queue that is empty is not taken for the end. The last batch is smaller if too few are left.

    An iteration that is broken off goes on where it was, with the next ``iter()``.

    Args:
        config: where the queue is, for processes that have no client yet (``redis.url``,
            ``redis.namespace``); by default, as :func:`tq_redis.get_client` finds it. Worker
            processes attach to the queue of the process that made the dataset.
        batch_size: samples that are claimed at a time.
        micro_batch_size: samples of what is yielded; the last of a batch may have fewer.
        data_fields: the fields that the samples must have, and that are fetched.
        partition_id: where.
        task_name: who consumes.
        dp_rank: None: every sample goes to one of the task's consumers. A number: the batches of
            this rank are numbered from 0 on, and all datasets of the same rank get the same ones,
            also one that is made later.
        should_check_consumption_status: True: iterating stops at the end. False: the stream is not
            meant to end; if it does, that is an :class:`EndOfStreamError`.
        fetch_batch_fn: fetches a batch; takes the arguments of ``default_fetch_batch_fn`` by name,
            and returns columns and metadata. It must wait, not return without samples.
        process_batch_fn: cuts a batch up; takes those of ``chunk_batch_fn``.
        sampler: which samples are taken; by default the oldest.
        lease: None: samples are consumed when they are claimed. A number: seconds for which a batch
            is this consumer's. It is acknowledged when the consumer comes back after the last
            micro-batch; if that does not come in time, others get the samples. It must last for
            fetching and working on a batch, with worker processes also while it lies ready.
        timeout: seconds that a batch is waited for; by default ``timeout_s`` of the settings.

    Attributes:
        buffer: the batches that were fetched, whole, until :meth:`step` drops them. Micro-batches
            of dense columns are views of them.
        batch_index: which of them is yielded now, or next.

    Raises:
        InputError: an argument is out of range.
        ConfigError: this process is a client of another queue than ``config`` names.

    Iterating raises ``DeadlineError`` (no batch came in time), ``LeaseLostError`` (the consumer
    took longer than its lease; others may have got the samples), ``CannotFillError`` (samples are
    left that form no whole group), and what ``get_meta`` and ``get_data`` raise.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | DictConfig | Config | None,
        batch_size: int,
        micro_batch_size: int,
        data_fields: Sequence[str],
        partition_id: str,
        task_name: str,
        dp_rank: int | None = None,
        should_check_consumption_status: bool = True,
        fetch_batch_fn: Callable[..., Any] | None = None,
        process_batch_fn: Callable[..., Iterable[Any]] | None = None,
        *,
        sampler: Sampler | None = None,
        lease: float | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        require_positive(batch_size=batch_size, micro_batch_size=micro_batch_size)
        require_positive(lease=lease, timeout=timeout)
        if not distinct(data_fields):
            raise InputError("data_fields must name at least one field")
        if not partition_id or not task_name:
            raise InputError(
                f"partition_id and task_name must be names, got {partition_id!r} and {task_name!r}"
            )
        if dp_rank is not None and dp_rank < 0:
            raise InputError(f"dp_rank must be an integer from 0 on, or None, got {dp_rank}")
        # With the address of an embedded server, which no environment names to worker processes.
        self.config = get_client(config).config if is_initialized() else load_config(config)
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.data_fields = list(data_fields)
        self.partition_id = partition_id
        self.task_name = task_name
        self.dp_rank = dp_rank
        self.should_check_consumption_status = should_check_consumption_status
        self.fetch_batch_fn: Callable[..., Any] = fetch_batch_fn or default_fetch_batch_fn
        self.process_batch_fn: Callable[..., Any] = process_batch_fn or chunk_batch_fn
        self.sampler = sampler
        self.lease = lease
        self.timeout = timeout
        self.buffer: list[Any] = []
        self.batch_index = 0
        self._pieces_given = 0
        self._acknowledged = 0
        self._restarts = 0

    def __iter__(self) -> Iterator[Any]:
        client = self._connect()
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        restarts = self._restarts
        while True:
            if self.batch_index == len(self.buffer):
                batch = self._fetch(client, first + step * len(self.buffer))
                if batch is None:
                    return
                self.buffer.append(batch)
            data, meta = self.buffer[self.batch_index]
            pieces = self.process_batch_fn(data, meta, micro_batch_size=self.micro_batch_size)
            for piece in islice(pieces, self._pieces_given, None):
                self._pieces_given += 1
                yield piece
                if restarts != self._restarts:
                    return
            # A worker process is asked for the next one long before the consumer is done with this.
            if worker is None and self.lease and self.batch_index == self._acknowledged:
                client.ack(meta)
                self._acknowledged += 1
            self.batch_index += 1
            self._pieces_given = 0

    def reset(self) -> None:
        """Begin again with the first batch of the buffer. An iteration that runs ends."""
        self._restarts += 1
        self.batch_index = self._pieces_given = 0

    def step(self, partition_id: str) -> None:
        """Go to another partition, and forget what was fetched. An iteration that runs ends.

        Samples whose micro-batches were not taken stay consumed; with a lease, they come back.

        Raises:
            InputError: no name.
        """
        if not partition_id:
            raise InputError("step needs the name of a partition")
        self.reset()
        self.buffer = []
        self._acknowledged = 0
        self.partition_id = partition_id

    def _connect(self) -> Any:
        client = get_client(self.config)
        if get_worker_info() is not None:
            require_units(client, self.data_fields)
            # What its parent had fetched is the parent's to yield.
            self.step(self.partition_id)
        return client

    def _fetch(self, client: Any, index: int) -> tuple[Any, Any] | None:
        """The batch of this number; None at the end."""
        named = {} if self.dp_rank is None else {"dp_rank": self.dp_rank, "batch_index": index}
        size = self.batch_size
        while True:
            try:
                return self.fetch_batch_fn(
                    tq_client=client,
                    data_fields=self.data_fields,
                    batch_size=size,
                    partition_id=self.partition_id,
                    task_name=self.task_name,
                    sampling_config=named,
                    batch_index=index,
                    sampler=self.sampler,
                    lease=self.lease,
                    timeout=self.timeout,
                )
            except EndOfStreamError:
                if not self.should_check_consumption_status:
                    raise
                return None
            except CannotFillError as error:
                size = self._size_for(error)
                if not size:
                    return self._end_or(error, client)

    def _size_for(self, error: CannotFillError) -> int:
        """The batch size for what can still come; 0 if that cannot be dealt out."""
        sampler = self.sampler
        ranks = sampler.dp_size if isinstance(sampler, SeqlenBalancedSampler) else 1
        group = group_size_of(sampler) if sampler else 1
        return error.left // (group * ranks) * group

    def _end_or(self, error: CannotFillError, client: Client) -> None:
        """Return at the end, where what is left was others' and they consume it."""
        if not isinstance(self.sampler, SeqlenBalancedSampler):
            raise error
        try:
            client.get_meta(
                self.data_fields,
                1,
                self.partition_id,
                task_name=self.task_name,
                sampler=_TakeNothing(),
                timeout=self.timeout,
            )
        except EndOfStreamError:
            if not self.should_check_consumption_status:
                raise
        except DeadlineError:
            raise error from None


def require_units(client: Client, fields: Iterable[str]) -> None:
    """Raises:
    ConfigError: a field is not kept in storage units, where worker processes can read it.
    """
    for name in fields:
        backend = client.core.data.route(name)
        if backend != "zmq":
            raise ConfigError(
                f"Field {name!r} is kept by the backend {backend!r}, which worker processes of a "
                f"data loader cannot read. Keep it in storage units (data.routes: "
                f"{{{name!r}: 'zmq'}}), or load with num_workers=0.",
                fields=[name],
            )


class _TakeNothing(BaseSampler):
    """For waiting until others have consumed what is left."""

    def sample(self, ready: Ready, batch_size: int, **sampling_config: Any) -> Sequence[int]:
        return ()
