"""Where the bytes are."""

from __future__ import annotations

from collections.abc import Callable

from tq_redis.config import Config
from tq_redis.data.base import Backend, Column, Parser, Run, StoreUsage, WrittenBlock
from tq_redis.data.plane import DataPlane
from tq_redis.store.units import Directory

__all__ = [
    "Column",
    "DataPlane",
    "Directory",
    "Parser",
    "Run",
    "StoreUsage",
    "WrittenBlock",
    "open_data_plane",
]


def open_data_plane(config: Config, directory: Directory) -> DataPlane:
    """The backends that the settings name, as this process's client of them.

    Args:
        directory: where storage units are listed.
    """

    # Imported where they are opened, so that each does without the others' libraries.
    def ray() -> Backend:
        from tq_redis.data.ray_store import RayBackend

        return RayBackend(config)

    def zmq() -> Backend:
        from tq_redis.data.zmq_store import ZmqBackend

        return ZmqBackend(config, directory)

    def memory() -> Backend:
        from tq_redis.data.memory import MemoryBackend

        return MemoryBackend(config)

    openers: dict[str, Callable[[], Backend]] = {"ray": ray, "zmq": zmq, "memory": memory}
    return DataPlane(config.data, openers)
