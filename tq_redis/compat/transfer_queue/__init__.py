"""A drop-in for the module transfer_queue, version 0.1.11, on tq_redis.

The same names, with the leniency that code written for it counts on: fields and keys that are not
there are passed over, a field may change its dtype, tensors come back jagged. Where transfer_queue
loses or mixes up data, an error is raised instead; it is one of :mod:`tq_redis.errors`, and of the
class that such code catches.
"""

from tq_redis.compat.transfer_queue.client import TransferQueueClient
from tq_redis.compat.transfer_queue.dataloader import StreamingDataLoader, StreamingDataset
from tq_redis.compat.transfer_queue.errors import StorageKeyNotFoundError
from tq_redis.compat.transfer_queue.kv import (
    async_kv_batch_get,
    async_kv_batch_get_by_meta,
    async_kv_batch_put,
    async_kv_clear,
    async_kv_list,
    async_kv_put,
    kv_batch_get,
    kv_batch_get_by_meta,
    kv_batch_put,
    kv_clear,
    kv_list,
    kv_put,
)
from tq_redis.compat.transfer_queue.metadata import BatchMeta, KVBatchMeta
from tq_redis.compat.transfer_queue.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)
from tq_redis.compat.transfer_queue.session import (
    close,
    get_client,
    get_metrics_endpoint,
    init,
    load_checkpoint,
    save_checkpoint,
)

__version__ = "0.1.11"

__all__ = [
    "BaseSampler",
    "BatchMeta",
    "GRPOGroupNSampler",
    "KVBatchMeta",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "StorageKeyNotFoundError",
    "StreamingDataLoader",
    "StreamingDataset",
    "TransferQueueClient",
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_put",
    "close",
    "get_client",
    "get_metrics_endpoint",
    "init",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_put",
    "load_checkpoint",
    "save_checkpoint",
]
