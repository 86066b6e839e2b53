"""tq_redis: a sample queue for reinforcement-learning post-training.

Who has what and who may take it is state in Redis; tensors stay in Ray's object store; a trainer
passes a small :class:`BatchMeta` around.
"""

from tq_redis.client.sync import Client
from tq_redis.config import Config, DataConfig, RedisConfig
from tq_redis.errors import (
    AuthenticationError,
    ClosedError,
    ConfigError,
    DataLostError,
    DeadlineError,
    FieldNotFoundError,
    InputError,
    KeyNotFoundError,
    NotFoundError,
    NotInitializedError,
    NotReadyError,
    PartitionNotFoundError,
    SampleNotFoundError,
    SchemaConflictError,
    ServerError,
    ServerFullError,
    ServerPolicyError,
    ServerUnavailableError,
    StoreFullError,
    TQError,
)
from tq_redis.kv import (
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
from tq_redis.metadata import BatchMeta, FieldSchema, KVBatchMeta
from tq_redis.session import check_server, close, get_client, init, progress_command

__version__ = "0.1.0"

__all__ = [
    "AuthenticationError",
    "BatchMeta",
    "Client",
    "ClosedError",
    "Config",
    "ConfigError",
    "DataConfig",
    "DataLostError",
    "DeadlineError",
    "FieldNotFoundError",
    "FieldSchema",
    "InputError",
    "KVBatchMeta",
    "KeyNotFoundError",
    "NotFoundError",
    "NotInitializedError",
    "NotReadyError",
    "PartitionNotFoundError",
    "RedisConfig",
    "SampleNotFoundError",
    "SchemaConflictError",
    "ServerError",
    "ServerFullError",
    "ServerPolicyError",
    "ServerUnavailableError",
    "StoreFullError",
    "TQError",
    "__version__",
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_put",
    "check_server",
    "close",
    "get_client",
    "init",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_put",
    "progress_command",
]
