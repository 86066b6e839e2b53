"""Storage units as Ray actors, for who wants them started with the queue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import ray as untyped_ray
from ray.exceptions import ActorDiedError
from ray.util import list_named_actors

from tq_redis.config import Config
from tq_redis.errors import ConfigError
from tq_redis.storage_unit import StorageUnit
from tq_redis.store.parsers import BlockParser

ray: Any = untyped_ray  # its own types are partial

RAY_NAMESPACE = "tq_redis"

Load = Callable[[Mapping[str, str]], Mapping[str, BlockParser]]
"""Imports parsers, and torch with them."""


class UnitActor:
    """One storage unit. An actor that Ray starts again is another unit, and empty.

    Args:
        config: settings of the instance, as JSON.
        load: what it offers comes by; None: it offers nothing.
    """

    def __init__(self, config: str, load: Load | None = None) -> None:
        settings = msgspec.json.decode(config, type=Config)
        self._unit = StorageUnit(
            settings,
            host=ray.util.get_node_ip_address(),
            capacity=settings.data.unit_bytes,
            curve=settings.data.curve,
            parsers=None if load is None else load(settings.data.parsers),
        )
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="tq_redis storage unit", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._unit.run(self._stop))
        finally:  # nobody has called for long, or Redis cannot be used
            self._loop.close()
            if not self._stop.is_set():
                ray.kill(ray.get_runtime_context().current_actor)

    def id(self) -> str:
        return self._unit.id

    def stop(self) -> None:
        """Strike the entry, and listen no more."""
        with suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


def start_units(config: Config, within_s: float, load: Load) -> list[str]:
    """Start as many as ``data.units`` says, spread over the nodes, or find them. Blocks.

    Args:
        load: imports the parsers in ``data.parsers``, in the units.

    Returns:
        Their ids.

    Raises:
        ConfigError: one could not start.
        TimeoutError: not within so many seconds.
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
        ).remote(text, load if config.data.parsers else None)
        for number in range(config.data.units)
    ]
    try:
        return ray.get([actor.id.remote() for actor in actors], timeout=within_s)
    except ActorDiedError as error:
        raise ConfigError(f"A storage unit could not start: {error}") from error


def end_units(config: Config, within_s: float) -> None:
    """End the units that :func:`start_units` started. Blocks; after so many seconds, also those are
    ended that have not struck their entries.
    """
    actors: list[Any] = []
    listed: list[Any] = list_named_actors(all_namespaces=True)
    for entry in listed:
        if entry["namespace"] == RAY_NAMESPACE and entry["name"].startswith(_prefix(config)):
            with suppress(ValueError):  # ended since it was listed
                actors.append(ray.get_actor(entry["name"], namespace=RAY_NAMESPACE))
    stopped = [actor.stop.remote() for actor in actors]
    ray.wait(stopped, num_returns=len(stopped), timeout=0.8 * within_s)
    for actor in actors:
        ray.kill(actor)


def _prefix(config: Config) -> str:
    return f"unit:{config.redis.namespace}:"
