"""Datasets for torch's DataLoader: what a task may work on, as it gets ready."""

from tq_redis.streaming.batches import chunk_batch_fn, default_fetch_batch_fn
from tq_redis.streaming.dataset import StreamingDataset
from tq_redis.streaming.loader import StreamingDataLoader

__all__ = ["StreamingDataLoader", "StreamingDataset", "chunk_batch_fn", "default_fetch_batch_fn"]
