"""The data plane on Ray: bytes in its object store, kept alive by one store actor per node.

Life of a block: the producer puts it into the object store of its node (one copy), and the store
actor of that node takes a view of it. A reader asks that actor for references, gets the block
(zero-copy on the same node, pulled once to another one) and copies the rows that it wants. When
the producer has died, Ray refuses its references; the reader then asks the store to put the block
again under its own name. The block is freed when the store has dropped it and the last view that
a reader holds is gone. Small blocks skip the object store: they travel inside the actor's calls.

References travel only inside Ray calls: one that is pickled anywhere else is never freed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import ray as untyped_ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    ObjectStoreFullError,
    RayActorError,
)
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tq_redis.config import Config
from tq_redis.data import ray_actor
from tq_redis.data.base import Column, DataPlane, Run, WrittenBlock
from tq_redis.data.codec import EncodedBlock, StoredBlock, decode, encode
from tq_redis.deadline import Deadline
from tq_redis.errors import (
    DataLostError,
    DeadlineError,
    InputError,
    NotInitializedError,
    shorten,
)

ray: Any = untyped_ray  # its own types are partial
ray.cloudpickle.register_pickle_by_value(ray_actor)

RAY_NAMESPACE = "tq_redis"
SMALL_BYTES = 64 << 10
"""Bytes that one put may send inside its call; Ray puts arguments over 100 KiB by itself."""

_RETRY_S = 0.05
_MINE = 0.9
"""Share of the remaining time that a store may wait, so that its answer still arrives."""


_Entry = tuple[str, int, Any, Any]
"""Name, bytes, reference or None, block if there is no reference: what a store holds."""


class _StoreGoneError(Exception):
    """No store actor runs on that node."""


class RayDataPlane(DataPlane):
    """One process's way to the stores of an instance."""

    def __init__(self, config: Config) -> None:
        if not ray.is_initialized():
            raise NotInitializedError(
                "This process has not joined Ray: call ray.init() first, or set data.backend=memory"
            )
        self._config = config
        self._node: str = ray.get_runtime_context().get_node_id()
        self._stores: dict[str, Any] = {}

    async def start(self, deadline: Deadline) -> None:
        await self._ask(self._node, lambda store: store.describe.remote(), deadline, create=True)

    async def put(
        self, partition: str, columns: Mapping[str, Column], deadline: Deadline
    ) -> list[WrittenBlock]:
        ready = await _in_thread(deadline, self._put_blocks, columns)
        entries = [entry for _, entry in ready]
        fits = await self._ask(
            self._node,
            lambda store: store.hold.remote(partition, entries, deadline.remaining * _MINE),
            deadline,
            create=True,
        )
        written = [self._written(block, name) for block, (name, *_) in ready]
        if not fits:
            await self._raise_full(sum(block.nbytes for block in written), partition, deadline)
        return written

    def _put_blocks(self, columns: Mapping[str, Column]) -> list[tuple[EncodedBlock, _Entry]]:
        data = self._config.data
        room = SMALL_BYTES
        ready: list[tuple[EncodedBlock, _Entry]] = []
        for block in encode(columns, block_bytes=data.block_bytes, allow_pickle=data.pickle):
            name, content = secrets.token_hex(8), (block.header, block.buffers)
            if block.nbytes <= room:
                room -= block.nbytes
                ready.append((block, (name, block.nbytes, None, content)))
            else:
                ready.append((block, (name, block.nbytes, ray.put(content), None)))
        return ready

    def _written(self, block: EncodedBlock, name: str) -> WrittenBlock:
        handle = f"{self._node}/{name}"
        return WrittenBlock(handle, block.fields, block.first_row, block.rows, block.nbytes)

    async def _raise_full(self, nbytes: int, partition: str, deadline: Deadline) -> None:
        used, capacity = await self._ask(self._node, lambda store: store.usage.remote(), deadline)
        if nbytes > capacity:
            raise InputError(
                f"A put of {nbytes} bytes is more than the store of this node may hold "
                f"({capacity}). Put fewer rows at once, or give Ray more object_store_memory",
                partition=partition,
            )
        raise DeadlineError(
            f"The store of this node is full ({used} of {capacity} bytes), and nothing was freed "
            f"within the deadline of {deadline.seconds} s. Consume or clear, then retry",
            partition=partition,
            deadline=deadline.seconds,
        )

    async def get(
        self, wanted: Mapping[str, Sequence[Run]], deadline: Deadline, *, copy: bool = True
    ) -> dict[str, Column]:
        handles = dict.fromkeys(run[0] for runs in wanted.values() for run in runs)
        blocks = await self._fetch(list(handles), deadline)
        allow_pickle = self._config.data.pickle
        return await asyncio.to_thread(decode, wanted, blocks, copy=copy, allow_pickle=allow_pickle)

    async def _fetch(self, handles: list[str], deadline: Deadline) -> dict[str, StoredBlock]:
        """The blocks, adopted by their stores where Ray cannot give the producer's object.

        Ray reports the death of a producer, or keeps waiting for it (seen when it dies while a
        pull runs). So the first try gets half of the time.
        """
        refs = await self._references(handles, "find", deadline)
        blocks = await _arrived(refs, deadline.remaining / 2)
        left = [handle for handle in handles if handle not in blocks]
        if left:
            refs = await self._references(left, "adopt", deadline)
            blocks |= await _arrived(refs, deadline.remaining)
            left = [handle for handle in left if handle not in blocks]
        if left and deadline.passed:
            raise DeadlineError(
                f"Blocks did not arrive within {deadline.seconds} s: {shorten(left)}",
                deadline=deadline.seconds,
            )
        if left:
            raise DataLostError(f"Blocks are lost: {shorten(left)}", handles=left)
        return blocks

    async def _references(
        self, handles: Sequence[str], how: str, deadline: Deadline
    ) -> dict[str, Any]:
        """Handle -> reference, from the stores' ``find`` or ``adopt``."""

        async def of_node(node: str, names: list[str]) -> dict[str, Any]:
            try:
                refs = await self._ask(
                    node, lambda store: getattr(store, how).remote(names), deadline
                )
            except _StoreGoneError:
                refs = [None] * len(names)
            return {f"{node}/{name}": ref for name, ref in zip(names, refs, strict=True)}

        found: dict[str, Any] = {}
        for part in await asyncio.gather(*(of_node(*item) for item in _by_node(handles).items())):
            found |= part
        missing = [handle for handle in handles if found[handle] is None]
        if missing:
            raise DataLostError(
                f"Blocks are gone, or the stores that kept them: {shorten(missing)}",
                handles=missing,
            )
        return found

    async def delete(self, handles: Iterable[str], deadline: Deadline) -> None:
        await self._tell(handles, lambda store, names: store.drop.remote(names), deadline)

    async def confirm(self, handles: Iterable[str], deadline: Deadline) -> None:
        await self._tell(handles, lambda store, names: store.confirm.remote(names), deadline)

    async def _tell(
        self, handles: Iterable[str], call: Callable[[Any, list[str]], Any], deadline: Deadline
    ) -> None:
        """Call the stores of these handles; those that are gone have nothing to do."""

        async def node(node: str, names: list[str]) -> None:
            try:
                await self._ask(node, lambda store: call(store, names), deadline)
            except _StoreGoneError:
                return

        await asyncio.gather(*(node(*item) for item in _by_node(handles).items()))

    async def unconfirmed(self, older_than: float, deadline: Deadline) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in await _in_thread(deadline, _store_names, self._config.redis.namespace):
            node = name.rpartition(":")[2]
            try:
                names = await self._ask(
                    node, lambda store: store.unconfirmed.remote(older_than), deadline
                )
            except _StoreGoneError:
                continue
            for partition, blocks in names.items():
                found.setdefault(partition, []).extend(f"{node}/{block}" for block in blocks)
        return found

    async def shutdown(self, deadline: Deadline) -> None:
        await _in_thread(deadline, _kill_stores, self._config.redis.namespace)
        self._stores.clear()

    async def close(self) -> None:
        self._stores.clear()

    async def _ask(
        self,
        node: str,
        call: Callable[[Any], Any],
        deadline: Deadline,
        *,
        create: bool = False,
    ) -> Any:
        """The answer of a node's store; with ``create``, the store is made when there is none.

        Raises:
            _StoreGoneError: there is no store.
            DeadlineError: no answer in time.
        """
        while True:
            known = node in self._stores
            try:
                if not known:
                    self._stores[node] = await _in_thread(deadline, self._store, node, create)
                return await _answer(call(self._stores[node]), deadline)
            except ActorUnavailableError as error:
                await _pause(node, deadline, error)
            except RayActorError as error:
                # A handle that was known may be of an earlier store; look again.
                self._stores.pop(node, None)
                if create:
                    await _pause(node, deadline, error)
                elif not known:
                    raise _StoreGoneError from None

    def _store(self, node: str, create: bool) -> Any:
        name = f"{_prefix(self._config.redis.namespace)}{node}"
        if not create:
            try:
                return ray.get_actor(name, namespace=RAY_NAMESPACE)
            except ValueError:
                raise _StoreGoneError from None
        actor: Any = ray.remote(ray_actor.Store)
        return actor.options(
            name=name,
            namespace=RAY_NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=0,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(msgspec.json.encode(self._config).decode(), self._config.idle_ttl_s)


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


def _by_node(handles: Iterable[str]) -> dict[str, list[str]]:
    nodes: dict[str, list[str]] = {}
    for handle in handles:
        node, _, name = handle.partition("/")
        nodes.setdefault(node, []).append(name)
    return nodes


async def _arrived(found: Mapping[str, Any], wait_s: float) -> dict[str, StoredBlock]:
    """The blocks that a store sent or that arrive in time; the others are left out."""
    futures: dict[str, asyncio.Future[Any]] = {
        handle: asyncio.wrap_future(ref.future())
        for handle, ref in found.items()
        if isinstance(ref, ray.ObjectRef)
    }
    if futures:
        _, late = await asyncio.wait(futures.values(), timeout=wait_s)
        for future in late:
            future.cancel()
    blocks: dict[str, StoredBlock] = {}
    for handle, block in found.items():
        if handle not in futures:
            blocks[handle] = StoredBlock(*block)
        elif not _is_lost(futures[handle]):
            blocks[handle] = StoredBlock(*futures[handle].result())
    return blocks


def _is_lost(future: asyncio.Future[Any]) -> bool:
    """Whether the block is late, or Ray says that it is lost."""
    return (
        not future.done() or future.cancelled() or isinstance(future.exception(), ObjectLostError)
    )


async def _answer(ref: Any, deadline: Deadline) -> Any:
    try:
        async with asyncio.timeout(deadline.remaining):
            return await ref
    except TimeoutError:
        raise _late("A store", deadline) from None


async def _in_thread(deadline: Deadline, call: Callable[..., Any], *args: Any) -> Any:
    """Run a call of Ray that blocks, and stop waiting for it at the deadline."""
    try:
        async with asyncio.timeout(deadline.remaining):
            return await asyncio.to_thread(call, *args)
    except (TimeoutError, GetTimeoutError):
        raise _late("Ray", deadline) from None
    except ObjectStoreFullError as error:
        raise DeadlineError(
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
