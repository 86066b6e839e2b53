"""torch's DataLoader for streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from tq_redis.errors import InputError, TQError
from tq_redis.session import get_client, is_initialized
from tq_redis.streaming.dataset import StreamingDataset, require_units


class StreamingDataLoader(DataLoader[Any]):
    """torch's DataLoader for a :class:`StreamingDataset`, which makes the batches.

    Worker processes (``num_workers``) open clients of their own, by Redis alone. They reach columns
    in storage units, not those in Ray's object store. Each takes batches of its own; with
    ``dp_rank`` they number them in turns, so that all loaders of a rank need equally many workers.
    They fetch ahead (``prefetch_factor``): what they have claimed without a lease is lost if
    iterating is broken off, and that takes five seconds if one of them is waiting for samples.

    Every iteration has new worker processes, which begin with the first batch: with ``dp_rank``,
    the same as before; without, what is not consumed yet.

    Args:
        dataset: what is loaded.
        num_workers: how many processes; 0: this one.
        collate_fn: applied to each ``(TensorDict, BatchMeta)``; by default it stays as it is.
        pin_memory, worker_init_fn, multiprocessing_context, prefetch_factor, pin_memory_device: as
            of :class:`torch.utils.data.DataLoader`.

    Raises:
        ConfigError: worker processes could not read a field.
    """

    def __init__(
        self,
        dataset: StreamingDataset,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        pin_memory_device: str = "",
    ) -> None:
        if num_workers and is_initialized():
            require_units(get_client(dataset.config), dataset.data_fields)
        self._stream = dataset
        collate: Any = _WithMetadata(collate_fn)
        super().__init__(  # pyright: ignore[reportUnknownMemberType]
            dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=collate,
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            pin_memory_device=pin_memory_device,
        )

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        acknowledges = self.num_workers > 0 and self._stream.lease is not None
        pieces = super().__iter__()
        while True:
            try:
                meta, item = next(pieces)
            except StopIteration:
                return
            except TQError as error:
                if not self.num_workers:
                    raise
                # Else torch's frames keep the worker processes until a garbage collection, which
                # then waits for them. The worker's own traceback is in the message.
                raise error.with_traceback(None) from None
            yield item
            if acknowledges:
                get_client(self._stream.config).ack(meta)

    def reset(self) -> None:
        """Begin again with the first batch.

        Raises:
            InputError: there are worker processes and no ``dp_rank``, so batches have no names.
        """
        if self.num_workers and self._stream.dp_rank is None:
            raise InputError(
                "reset with worker processes needs a dataset with dp_rank: they have what they "
                "fetched, and batches without a rank have no names to get them by again"
            )
        self._stream.reset()

    def step(self, partition_id: str) -> None:
        """Go to another partition, with the next iteration."""
        self._stream.step(partition_id)

    def get_buffer(self) -> list[Any]:
        """The batches that this process fetched; worker processes keep their own."""
        return self._stream.buffer


class _WithMetadata:
    """What ``collate_fn`` makes of a micro-batch, beside its metadata."""

    def __init__(self, collate: Callable[[Any], Any] | None) -> None:
        self._collate = collate

    def __call__(self, piece: tuple[Any, Any]) -> tuple[Any, Any]:
        return piece[1], piece if self._collate is None else self._collate(piece)
