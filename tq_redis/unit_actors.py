"""Storage units as Ray actors, for who wants them started with the queue.

A placement group finds the nodes for them, all or none. It is gone once they run: each holds by
itself what its bundle held, so nothing of it can stay behind, and units outlive who started them.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import ray as untyped_ray
from ray.exceptions import ActorDiedError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tq_redis.config import Config, DataConfig
from tq_redis.deadline import Deadline
from tq_redis.errors import ConfigError, DeadlineError
from tq_redis.storage_unit import StorageUnit
from tq_redis.store.parsers import BlockParser

ray: Any = untyped_ray  # its own types are partial

RAY_NAMESPACE = "tq_redis"

# To strike an entry takes a millisecond, if the Redis of an instance that died is still there.
_STRIKE_S = 2.0

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
    """Start as many as ``data.units`` says, on nodes as ``data.placement`` says, or find them. What
    an instance with other settings left in the namespace is ended. Blocks.

    Args:
        load: imports the parsers in ``data.parsers``, in the units.

    Returns:
        Their ids.

    Raises:
        ConfigError: the nodes that there are cannot take them, or one could not start.
        DeadlineError: others use what the nodes have.
        TimeoutError: not within so many seconds.
    """
    deadline = Deadline(0.9 * within_s)  # so that this call says what is wrong, not its caller
    names = _names(config)
    if set(_running(config)) != set(names):
        end_units(config, min(_STRIKE_S, deadline.remaining))
        nodes = _find_nodes(config.data, deadline)
        _start(config, dict(zip(names, nodes, strict=True)), load)
    try:
        actors = [ray.get_actor(name, namespace=RAY_NAMESPACE) for name in names]
        return ray.get([actor.id.remote() for actor in actors], timeout=deadline.remaining)
    except (ActorDiedError, ValueError) as error:
        raise ConfigError(f"A storage unit could not start: {error}") from error


def end_units(config: Config, within_s: float) -> None:
    """End the units of a namespace. Blocks; after so many seconds, also those are ended that have
    not struck their entries.
    """
    actors: list[Any] = []
    for name in _running(config):
        with suppress(ValueError):  # ended since it was listed
            actors.append(ray.get_actor(name, namespace=RAY_NAMESPACE))
    stopped = [actor.stop.remote() for actor in actors]
    ray.wait(stopped, num_returns=len(stopped), timeout=0.8 * within_s)
    for actor in actors:
        ray.kill(actor)


def _start(config: Config, nodes: Mapping[str, str], load: Load) -> None:
    placement = config.data.placement
    more = dict(placement.resources)
    reserved = {"num_cpus": placement.cpus, "memory": more.pop("memory", None), "resources": more}
    actor: Any = ray.remote(UnitActor)
    for name, node in nodes.items():
        actor.options(
            name=name,
            namespace=RAY_NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            # Elsewhere only when that node is gone.
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
            **reserved,
        ).remote(msgspec.json.encode(config).decode(), load if config.data.parsers else None)


def _find_nodes(data: DataConfig, deadline: Deadline) -> list[str]:
    """A node for each unit, as a placement group of Ray finds them.

    Raises:
        ConfigError: the nodes that there are can never take them.
        DeadlineError: they cannot take them now.
    """
    bundle = {"CPU": data.placement.cpus, **data.placement.resources}
    bundle = {name: amount for name, amount in bundle.items() if amount}
    _require_room(data, bundle)
    # An empty one is no bundle for Ray: a byte of memory stands in.
    group = ray.util.placement_group(
        [bundle or {"memory": 1}] * data.units, data.placement.strategy
    )
    try:
        if not group.wait(deadline.remaining):
            free = ray.available_resources()
            raise DeadlineError(
                f"Ray found no nodes for {data.units} storage units (data.units) within "
                f"{deadline.seconds:g} s: each takes {bundle}, and others use so much of it that "
                f"{ {name: free.get(name, 0) for name in bundle} } is free. End them, or change "
                f"data.units or data.placement",
                deadline=deadline.seconds,
            )
        found: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
        return [found[number] for number in range(data.units)]
    finally:
        ray.util.remove_placement_group(group)


def _require_room(data: DataConfig, bundle: Mapping[str, float]) -> None:
    """Raises:
    ConfigError: the nodes that there are have no room for so many bundles, were they empty.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    rooms = [_room(node, bundle, data.units) for node in nodes]
    strategy = data.placement.strategy
    place, where = sum(rooms), "of its node"
    if strategy == "STRICT_SPREAD":
        place, where = sum(room > 0 for room in rooms), "of a node of its own"
    elif strategy == "STRICT_PACK":
        place, where = max(rooms), "of the one node that all share"
    if place < data.units:
        raise ConfigError(
            f"Only {place} of {data.units} storage units (data.units) can be placed "
            f"{strategy}: each takes {dict(bundle) or 'nothing'} {where}, and this Ray cluster "
            f"has {len(nodes)} nodes, {sum(room > 0 for room in rooms)} of them with that much. "
            f"Start more nodes or fewer units, or change data.placement"
        )


def _room(node: Mapping[str, float], bundle: Mapping[str, float], most: int) -> int:
    """How many bundles a node could take, up to ``most``. Ray counts in ten-thousandths."""
    counts = (
        round(node.get(name, 0) * 10_000) // round(amount * 10_000)
        for name, amount in bundle.items()
    )
    return min([most, *counts])


def _names(config: Config) -> list[str]:
    """Of the units: other settings make other units."""
    settings = hashlib.sha256(msgspec.json.encode(config)).hexdigest()[:12]
    return [f"{_prefix(config)}{settings}:{number}" for number in range(config.data.units)]


def _running(config: Config) -> list[str]:
    """The names of the units of a namespace."""
    listed: list[Any] = list_named_actors(all_namespaces=True)
    return [
        entry["name"]
        for entry in listed
        if entry["namespace"] == RAY_NAMESPACE and entry["name"].startswith(_prefix(config))
    ]


def _prefix(config: Config) -> str:
    return f"unit:{config.redis.namespace}:"
