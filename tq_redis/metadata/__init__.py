"""What a batch is: pure values, no I/O."""

from tq_redis.metadata.batch import BatchMeta
from tq_redis.metadata.claim import Claim
from tq_redis.metadata.kv import KVBatchMeta
from tq_redis.metadata.schema import FieldSchema

__all__ = ["BatchMeta", "Claim", "FieldSchema", "KVBatchMeta"]
