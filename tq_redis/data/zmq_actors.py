"""Storage units as Ray actors, for who wants them started with the queue."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import ray as untyped_ray
from ray.util import list_named_actors

from tq_redis.config import Config
from tq_redis.storage_unit import StorageUnit

ray: Any = untyped_ray  # its own types are partial

RAY_NAMESPACE = "tq_redis"


class UnitActor:
    """One storage unit. An actor that Ray starts again is another unit, and empty.

    Args:
        config: settings of the instance, as JSON.
    """

    def __init__(self, config: str) -> None:
        settings = msgspec.json.decode(config, type=Config)
        self._unit = StorageUnit(
            settings,
            host=ray.util.get_node_ip_address(),
            capacity=settings.data.unit_bytes,
            curve=settings.data.curve,
        )
        threading.Thread(target=self._run, name="tq_redis storage unit", daemon=True).start()

    def _run(self) -> None:
        asyncio.run(self._unit.run(asyncio.Event()))

    def id(self) -> str:
        return self._unit.id


def start_units(config: Config) -> list[str]:
    """Start as many as ``data.units`` says, spread over the nodes, or find them. Blocks.

    Returns:
        Their ids.
    """
    actor: Any = ray.remote(UnitActor)
    text = msgspec.json.encode(config).decode()
    actors = [
        actor.options(
            name=f"{_prefix(config)}{number}",
            namespace=RAY_NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            scheduling_strategy="SPREAD",
        ).remote(text)
        for number in range(config.data.units)
    ]
    return ray.get([actor.id.remote() for actor in actors])


def end_units(config: Config) -> None:
    """End the units that :func:`start_units` started."""
    listed: list[Any] = list_named_actors(all_namespaces=True)
    for entry in listed:
        if entry["namespace"] == RAY_NAMESPACE and entry["name"].startswith(_prefix(config)):
            try:
                ray.kill(ray.get_actor(entry["name"], namespace=RAY_NAMESPACE))
            except ValueError:  # ended since it was listed
                continue


def _prefix(config: Config) -> str:
    return f"unit:{config.redis.namespace}:"
