"""Streaming datasets and their loader."""

from tq_redis.compat.transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from tq_redis.compat.transfer_queue.dataloader.streaming_dataset import StreamingDataset

__all__ = ["StreamingDataLoader", "StreamingDataset"]
