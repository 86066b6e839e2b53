"""Where the bytes are."""

from __future__ import annotations

from tq_redis.config import Config
from tq_redis.data.base import Column, DataPlane, Run, WrittenBlock
from tq_redis.data.memory import MemoryDataPlane

__all__ = ["Column", "DataPlane", "Run", "WrittenBlock", "open_data_plane"]


def open_data_plane(config: Config) -> DataPlane:
    """The backend that ``config.data.backend`` names, as this process's client of it.

    Raises:
        NotInitializedError: the backend is ``ray`` and this process has not joined Ray.
    """
    if config.data.backend == "ray":
        # Here, so that the other backend does without Ray.
        from tq_redis.data.ray_store import RayDataPlane

        return RayDataPlane(config)
    return MemoryDataPlane(config)
