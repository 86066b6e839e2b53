"""tq_redis in the place of transfer_queue."""

from tq_redis.compat.drop_in import install

__all__ = ["install"]
