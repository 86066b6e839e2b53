"""The store actors of an instance, seen from one process: found, made, called, ended.

The errors of Ray's calls are translated here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import ray as untyped_ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    ObjectStoreFullError,
    RayActorError,
)
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tq_redis.config import Config
from tq_redis.data.calls import in_thread
from tq_redis.deadline import Deadline
from tq_redis.errors import DeadlineError, NotInitializedError, StoreFullError
from tq_redis.store import ray_actor

ray: Any = untyped_ray  # its own types are partial

RAY_NAMESPACE = "tq_redis"
_RETRY_S = 0.05


class StoreGoneError(Exception):
    """No store actor runs on that node."""


class Stores:
    """The stores of one instance, one a node."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._known: dict[str, Any] = {}

    async def nodes(self, deadline: Deadline) -> list[str]:
        """The nodes that have a store."""
        if not ray.is_initialized():  # any call would start a new Ray
            return []
        names = await ray_call(deadline, _store_names, self._config.redis.namespace)
        return [name.rpartition(":")[2] for name in names]

    async def end_all(self, deadline: Deadline) -> None:
        """End the stores, with all their blocks."""
        if not ray.is_initialized():
            return
        await ray_call(deadline, _kill_stores, self._config.redis.namespace)
        self.forget()

    def forget(self) -> None:
        """Let go of the known stores; they stay."""
        self._known.clear()

    async def ask(
        self,
        node: str,
        call: Callable[[Any], Any],
        deadline: Deadline,
        *,
        create: bool = False,
    ) -> Any:
        """The answer of a node's store; with ``create``, the store is made when there is none.

        Raises:
            StoreGoneError: there is no store.
            DeadlineError: no answer in time.
            NotInitializedError: a store is to be made, but Ray was shut down; or the node is in
                another Ray cluster.
        """
        if not ray.is_initialized():  # any call would start a new Ray
            if create:
                raise NotInitializedError(
                    "Ray was shut down in this process. Call tq_redis.close() and init() again."
                )
            raise StoreGoneError
        while True:
            known = node in self._known
            try:
                if not known:
                    self._known[node] = await ray_call(deadline, self._store, node, create)
                return await _answer(call(self._known[node]), deadline)
            except ActorUnavailableError as error:
                await _pause(node, deadline, error)
            except RayActorError as error:
                # A handle that was known may be of an earlier store; look again.
                self._known.pop(node, None)
                if create:
                    await _pause(node, deadline, error)
                elif not known:
                    raise StoreGoneError from None

    def _store(self, node: str, create: bool) -> Any:
        name = f"{_prefix(self._config.redis.namespace)}{node}"
        if not create:
            try:
                return ray.get_actor(name, namespace=RAY_NAMESPACE)
            except ValueError:
                _require_own(node)
                raise StoreGoneError from None
        actor: Any = ray.remote(ray_actor.Store)
        return actor.options(
            name=name,
            namespace=RAY_NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=0,
            max_concurrency=ray_actor.CALLS,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(
            msgspec.json.encode(self._config).decode(),
            self._config.idle_ttl_s,
            self._config.data.curve,
        )


def running_instances(timeout: float = 5.0) -> dict[str, str]:
    """The instances whose stores run in this Ray cluster.

    Blocks for up to ``timeout`` seconds; stores that do not answer in time are left out.

    Returns:
        Redis namespace -> settings, as JSON.
    """
    stores = {name.split(":")[1]: name for name in _store_names()}
    answers: dict[str, Any] = {}
    for namespace, name in stores.items():
        try:
            store = ray.get_actor(name, namespace=RAY_NAMESPACE)
        except ValueError:  # ended since it was listed
            continue
        answers[namespace] = store.describe.remote()
    ready, _ = ray.wait(list(answers.values()), num_returns=len(answers), timeout=timeout)
    found: dict[str, str] = {}
    for namespace, answer in answers.items():
        if answer in ready:
            try:
                found[namespace] = ray.get(answer)
            except RayActorError:
                continue
    return found


def _require_own(node: str) -> None:
    """Raises:
    NotInitializedError: the node is none of this Ray cluster, whatever it was: the stores of
        another cluster cannot be seen from here, and are no less alive for it.
    """
    if node not in {known["NodeID"] for known in ray.nodes()}:
        raise NotInitializedError(
            f"Node {node}, which keeps blocks of this queue, is in another Ray cluster than this "
            f"process. Join that one with ray.init(address=...), or leave these blocks to those "
            f"who are in it."
        )


def _prefix(namespace: str) -> str:
    return f"store:{namespace}:"


def _store_names(namespace: str | None = None) -> list[str]:
    """Names of the store actors of one Redis namespace, or of all."""
    prefix = "store:" if namespace is None else _prefix(namespace)
    actors: list[Any] = list_named_actors(all_namespaces=True)
    return [
        actor["name"]
        for actor in actors
        if actor["namespace"] == RAY_NAMESPACE and actor["name"].startswith(prefix)
    ]


def _kill_stores(namespace: str) -> None:
    for name in _store_names(namespace):
        try:
            ray.kill(ray.get_actor(name, namespace=RAY_NAMESPACE))
        except ValueError:  # ended since it was listed
            continue


async def _answer(ref: Any, deadline: Deadline) -> Any:
    try:
        async with asyncio.timeout(deadline.remaining):
            return await ref
    except TimeoutError:
        raise _late("A store", deadline) from None


async def ray_call(deadline: Deadline, call: Callable[..., Any], *args: Any) -> Any:
    """Run a call of Ray that blocks, and stop waiting for it at the deadline."""
    try:
        return await in_thread(deadline, "Ray did not answer", lambda: call(*args))
    except GetTimeoutError:
        raise _late("Ray", deadline) from None
    except ObjectStoreFullError as error:
        raise StoreFullError(
            "Ray's object store is full. Consume or clear, then retry", deadline=deadline.seconds
        ) from error


async def _pause(node: str, deadline: Deadline, reason: Exception) -> None:
    if deadline.passed:
        raise _late(f"The store on node {node}", deadline) from reason
    await asyncio.sleep(min(_RETRY_S, deadline.remaining))


def _late(who: str, deadline: Deadline) -> DeadlineError:
    return DeadlineError(
        f"{who} did not answer within the deadline of {deadline.seconds} s",
        deadline=deadline.seconds,
    )
