"""torch's DataLoader for streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tq_redis import streaming as strict
from tq_redis.compat.transfer_queue.dataloader.streaming_dataset import StreamingDataset


class StreamingDataLoader(strict.StreamingDataLoader):
    """torch's DataLoader for a :class:`StreamingDataset`.

    Args:
        num_workers: processes that fetch; they reach columns in storage units alone, and those of
            one rank take its batches in turns.
        persistent_workers: accepted; every iteration has new workers, so that :meth:`step` reaches
            them.

    The other arguments are those of :class:`torch.utils.data.DataLoader`.

    Raises:
        ConfigError: worker processes could not read a field. A ValueError.
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
        persistent_workers: bool = False,
        pin_memory_device: str = "",
    ) -> None:
        super().__init__(
            dataset,
            num_workers,
            collate_fn,
            pin_memory,
            worker_init_fn,
            multiprocessing_context,
            prefetch_factor,
            pin_memory_device,
        )
