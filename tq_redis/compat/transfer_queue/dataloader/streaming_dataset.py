"""The batches that a task may have, as an iterable dataset of torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict

from tq_redis import streaming as strict
from tq_redis.compat.transfer_queue.client import TransferQueueClient
from tq_redis.compat.transfer_queue.draws import fetch
from tq_redis.compat.transfer_queue.errors import RequestTimeoutError
from tq_redis.compat.transfer_queue.metadata import BatchMeta
from tq_redis.compat.transfer_queue.settings import note_of
from tq_redis.errors import InputError
from tq_redis.session import is_initialized

# A function of the user's own that finds nothing may come back at once.
_PAUSE_S = 0.05


class BatchTypeError(InputError, TypeError):
    """A batch is no TensorDict."""


class StreamingDataset(strict.StreamingDataset):
    """Micro-batches ``(TensorDict, BatchMeta)`` of the samples that a task may have.

    It waits, woken when samples come, however the queue is set (``controller.polling_mode``).

    Args:
        config: what ``init`` was given or returned; its block ``tq_redis`` says where the queue is,
            for processes that have no client.
        batch_size: samples that are fetched at a time.
        micro_batch_size: samples of what is yielded; at most ``batch_size``.
        data_fields: the fields that are wanted.
        partition_id: where; it need not exist yet.
        task_name: who consumes.
        dp_rank: with a sampler that looks at ranks, all datasets of a rank get the same batches.
        should_check_consumption_status: False: the stream does not end. True: it ends when the task
            has had all samples of the partition. One that is still being filled may be at that
            point at any moment; :class:`tq_redis.StreamingDataset` ends when the producer says so.
        fetch_batch_fn: takes the arguments of :func:`default_fetch_batch_fn` by name.
        process_batch_fn: takes those of :func:`chunk_batch_fn`.

    Raises:
        InputError: a number is out of range, or no field is named. A ValueError.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | DictConfig | None,
        batch_size: int,
        micro_batch_size: int,
        data_fields: Sequence[str],
        partition_id: str,
        task_name: str,
        dp_rank: int,
        should_check_consumption_status: bool = False,
        fetch_batch_fn: Callable[..., Any] | None = None,
        process_batch_fn: Callable[..., Iterable[Any]] | None = None,
    ) -> None:
        super().__init__(
            None if is_initialized() else _block(config),
            batch_size,
            micro_batch_size,
            data_fields,
            partition_id,
            task_name,
            dp_rank,
            should_check_consumption_status,
            fetch_batch_fn or default_fetch_batch_fn,
            process_batch_fn or chunk_batch_fn,
        )
        self.sampling_config = {"dp_rank": dp_rank, "task_name": task_name}

    def _connect(self) -> _WaitingClient:
        super()._connect()
        return _WaitingClient("streaming")

    def _fetch(self, client: _WaitingClient, index: int) -> tuple[Any, Any] | None:
        while True:
            finished = self.should_check_consumption_status and client.check_consumption_status(
                self.task_name, self.partition_id
            )
            # A batch that this rank shares may still be there for it.
            client.waits = not finished
            data, meta = self.fetch_batch_fn(
                tq_client=client,
                data_fields=self.data_fields,
                batch_size=self.batch_size,
                partition_id=self.partition_id,
                task_name=self.task_name,
                sampling_config=self.sampling_config,
                batch_index=index,
            )
            if data is not None:
                return data, meta
            if finished:
                return None
            time.sleep(_PAUSE_S)


class _WaitingClient(TransferQueueClient):
    """Waits some seconds for samples, and gives none if there are too few then."""

    waits = True

    def get_meta(
        self,
        data_fields: Sequence[str],
        batch_size: int,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: Mapping[str, Any] | None = None,
    ) -> BatchMeta:
        if mode != "fetch" or not task_name:
            return super().get_meta(
                data_fields, batch_size, partition_id, mode, task_name, sampling_config
            )
        core = self._core.core
        note = replace(note_of(core.config), polling_mode=not self.waits)
        config = sampling_config or {}
        fields = list(data_fields)
        try:
            return self._portal.run(
                fetch(core, note, fields, batch_size, partition_id, task_name, config)
            )
        except RequestTimeoutError:
            return BatchMeta.empty()


def default_fetch_batch_fn(
    tq_client: TransferQueueClient,
    data_fields: Sequence[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: Mapping[str, Any],
    batch_index: int,
) -> tuple[TensorDict | None, BatchMeta]:
    """A batch and its metadata; None and empty metadata if there are too few samples.

    Args:
        sampling_config: ``dp_rank``, and what else a sampler of the user's own wants.
        batch_index: which of the rank's batches.
    """
    named = {**sampling_config, "batch_index": batch_index, "partition_id": partition_id}
    meta = tq_client.get_meta(
        data_fields, batch_size, partition_id, task_name=task_name, sampling_config=named
    )
    return (tq_client.get_data(meta) if meta.size else None), meta


def chunk_batch_fn(
    td: TensorDict, batch_meta: BatchMeta, micro_batch_size: int = 1
) -> list[tuple[TensorDict, BatchMeta]]:
    """Cut a batch into micro-batches; the last has what is left.

    transfer_queue cuts metadata into equal parts, which do not fit the columns where
    ``micro_batch_size`` is no divisor. Here, each part has the metadata of its rows.

    Raises:
        BatchTypeError: ``td`` is no TensorDict. A TypeError.
        InputError: ``micro_batch_size`` is no positive integer, or larger than the batch; ``td``
            has no batch dimension, or not the rows of ``batch_meta``. A ValueError.
    """
    given: Any = td
    if not isinstance(given, TensorDict):
        raise BatchTypeError(f"Expected a TensorDict, got {type(given).__name__}")
    size: Any = micro_batch_size
    if not isinstance(size, int) or size < 1:
        raise InputError(f"micro_batch_size must be a positive integer, got {size!r}")
    if td.batch_size and size > td.batch_size[0]:
        raise InputError(f"micro_batch_size {size} is larger than the batch, {td.batch_size[0]}")
    cut: Any = strict.chunk_batch_fn  # needs of metadata only what both kinds have
    return cut(td, batch_meta, size)


def _block(config: Mapping[str, Any] | DictConfig | None) -> Any:
    """The settings of the queue in those of transfer_queue."""
    given = OmegaConf.create(dict(config or {}), flags={"allow_objects": True})
    return given.get("tq_redis")
