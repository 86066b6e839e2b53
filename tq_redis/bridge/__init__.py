"""How training code meets the queue: metadata in, tensors inside the worker, metadata out."""

from tq_redis.bridge.decorator import tqbridge
from tq_redis.bridge.dispatch import MetaFuture, call_actors, concat_metas, meta_dispatch

__all__ = ["MetaFuture", "call_actors", "concat_metas", "meta_dispatch", "tqbridge"]
