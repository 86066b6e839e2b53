"""Metadata as transfer_queue has it: rows of several partitions, schemas as dictionaries."""

from tq_redis.compat.transfer_queue.metadata.batch import BatchMeta
from tq_redis.compat.transfer_queue.metadata.kv import KVBatchMeta
from tq_redis.compat.transfer_queue.metadata.schema import extract_field_schema

__all__ = ["BatchMeta", "KVBatchMeta", "extract_field_schema"]
