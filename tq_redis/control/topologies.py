"""What stands at an address: one server, a master that Sentinels name, or a cluster.

Thin: redis-py's own clients, without their retries, which are made in one place
(:mod:`tq_redis.control.connection`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import redis.asyncio as aioredis
import redis.exceptions as rex
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from tq_redis.control.addresses import Address

_CONNECT_S = 5.0
# A Sentinel answers at once, or the next one is asked.
_SENTINEL_S = 1.0
# A cluster's node answers at once what the map of slots is, or another one is asked.
_MAP_S = 2.0
_UNLIMITED = 2**31


class Topology(Protocol):
    """Connections to what stands at one address. Fails with redis-py's errors, at once."""

    async def execute(self, *words: Any) -> Any:
        """Run a command where its first key lives."""
        ...

    async def pipeline(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Run commands with one key each, in one round trip where one server has them all."""
        ...

    async def execute_at(self, key: str, *words: Any) -> Any:
        """Run a command where ``key`` lives."""
        ...

    async def primaries(self) -> dict[str, Primary]:
        """Every server that writes now, by its address."""
        ...

    def forget(self) -> None:
        """What was known may be wrong: look for the primary anew before the next command."""
        ...

    async def aclose(self) -> None: ...


class Primary(Protocol):
    """One server."""

    async def execute(self, *words: Any) -> Any: ...

    async def queue(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send commands on one connection and return the replies as they came, errors too."""
        ...


def open_topology(address: Address, *, timeout_s: float | None = None) -> Topology:
    """Connections to what stands at ``address``; nothing is sent yet.

    Args:
        timeout_s: time for one answer, where cancelling the call would not do: a cluster's client
            sees a frozen node by it.
    """
    if address.kind == "cluster":
        return _Cluster(address, timeout_s)
    if address.kind == "sentinel":
        return _Sentinel(address)
    return _Single(address)


def _common(address: Address, timeout_s: float | None = None) -> dict[str, Any]:
    """For a client that neither retries nor limits anything by itself."""
    return {
        "client_name": "tq_redis",
        # Else it is 5 s, and makes a task of every command; a call is bounded as a whole.
        "socket_timeout": timeout_s,
        **address.options,
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": _CONNECT_S,
        "max_connections": _UNLIMITED,
        "protocol": 2,
        "driver_info": None,  # else each connection runs CLIENT SETINFO
    }


class _Pipeline(Protocol):
    def execute_command(self, *words: Any) -> object: ...
    async def execute(self) -> list[Any]: ...
    async def __aenter__(self) -> _Pipeline: ...
    async def __aexit__(self, *error: object) -> None: ...


class _Connection(Protocol):
    def pack_commands(self, commands: Sequence[Sequence[Any]]) -> list[bytes]: ...
    async def send_packed_command(self, command: list[bytes]) -> None: ...
    async def read_response(self) -> Any: ...


class _Pool(Protocol):
    async def get_connection(self) -> _Connection: ...
    async def release(self, connection: _Connection) -> None: ...
    async def disconnect(self, inuse_connections: bool = True) -> None: ...


class _Client(Protocol):
    """What is used of redis-py, whose own types leave most of it open."""

    connection_pool: _Pool

    async def execute_command(self, *words: Any) -> Any: ...
    def pipeline(self, *, transaction: bool) -> _Pipeline: ...
    async def aclose(self) -> None: ...


async def _queue(connection: _Connection, commands: Sequence[Sequence[Any]]) -> list[Any]:
    await connection.send_packed_command(connection.pack_commands(commands))
    replies: list[Any] = []
    for _ in commands:
        try:
            replies.append(await connection.read_response())
        except rex.RedisError as error:
            replies.append(error)
    for reply in replies:
        if isinstance(reply, rex.RedisError) and not isinstance(reply, rex.ResponseError):
            raise reply
    return replies


class _Pooled:
    """One server behind a pool of connections."""

    def __init__(self, client: _Client) -> None:
        self._client = client
        self._stale = False

    async def execute(self, *words: Any) -> Any:
        await self._look_again()
        return await self._client.execute_command(*words)

    async def pipeline(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        await self._look_again()
        async with self._client.pipeline(transaction=False) as pipe:
            for words in commands:
                pipe.execute_command(*words)
            return await pipe.execute()

    async def execute_at(self, key: str, *words: Any) -> Any:
        return await self.execute(*words)

    async def queue(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        pool = self._client.connection_pool
        connection = await pool.get_connection()
        try:
            return await _queue(connection, commands)
        finally:
            await pool.release(connection)

    def forget(self) -> None:
        self._stale = True

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _look_again(self) -> None:
        """Let idle connections go: they may lead to a server that is frozen, or no master."""
        if self._stale:
            self._stale = False
            await self._client.connection_pool.disconnect(inuse_connections=False)


class _Single(_Pooled):
    def __init__(self, address: Address) -> None:
        options = _common(address)
        make = cast(Callable[..., Any], aioredis.ConnectionPool)
        super().__init__(cast(Any, aioredis.Redis).from_pool(make(**options)))
        self._shown = address.shown

    async def primaries(self) -> dict[str, Primary]:
        return {self._shown: self}


class _Sentinel(_Pooled):
    """The master of a service, as Sentinels name it whenever a connection is made."""

    def __init__(self, address: Address) -> None:
        options = _common(address)
        options.pop("connection_class", None)
        for name in ("host", "port"):
            options.pop(name, None)
        tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
        ask = {
            **tls,
            **address.sentinel_options,
            "ssl": address.tls,
            "retry": Retry(NoBackoff(), 0),
            "socket_connect_timeout": _SENTINEL_S,
            "socket_timeout": _SENTINEL_S,
            "protocol": 2,
            "driver_info": None,
        }
        self._sentinel: Any = cast(Any, Sentinel)(list(address.hosts), sentinel_kwargs=ask)
        self._service = address.service
        super().__init__(self._sentinel.master_for(address.service, ssl=address.tls, **options))

    async def primaries(self) -> dict[str, Primary]:
        host, port = await self._sentinel.discover_master(self._service)
        return {f"{host}:{port}": self}

    async def aclose(self) -> None:
        await super().aclose()
        await self._sentinel.aclose()


class _Cluster:
    """A cluster; redis-py keeps its map of slots, and follows MOVED, ASK and TRYAGAIN."""

    def __init__(self, address: Address, timeout_s: float | None) -> None:
        options = _common(address, timeout_s)
        for name in ("host", "port", "db", "connection_class"):
            options.pop(name, None)
        nodes = [ClusterNode(host, port) for host, port in address.hosts]
        self._client: Any = cast(Any, RedisCluster)(startup_nodes=nodes, ssl=address.tls, **options)
        self._stale = False
        self._silent: str | None = None

    async def execute(self, *words: Any) -> Any:
        await self._look_again()
        with self._lost_node():
            return await self._client.execute_command(*words)

    async def pipeline(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        await self._look_again()
        with self._lost_node():
            pipe = self._client.pipeline(transaction=False)
            for words in commands:
                pipe.execute_command(*words)
            return await pipe.execute()

    async def execute_at(self, key: str, *words: Any) -> Any:
        await self._look_again()
        node = self._client.get_node_from_key(key)
        with self._lost_node():
            return await self._client.execute_command(*words, target_nodes=node)

    async def primaries(self) -> dict[str, Primary]:
        await self._look_again()
        return {
            node.name: _ClusterNode(self._client, node) for node in self._client.get_primaries()
        }

    def forget(self) -> None:
        self._stale = True

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _look_again(self) -> None:
        """The map of slots, where there is none or it may be wrong. A node that was silent is asked
        last: every question to a frozen node takes as long as its answer may."""
        async with asyncio.timeout(_MAP_S):
            await self._client.initialize(last_failed_node_name=self._silent)
            if self._stale:
                await self._client.nodes_manager.initialize(last_failed_node_name=self._silent)
                self._stale = False

    @contextmanager
    def _lost_node(self) -> Generator[None]:
        """Note who was silent. redis-py 8.1 also trips over an ASK to a node that has no slots yet,
        and over a map of slots that another call throws away meanwhile. Both pass."""
        try:
            yield
        except (AttributeError, KeyError) as error:
            raise rex.TryAgainError("the map of the cluster's slots changed") from error
        except rex.RedisError as error:
            self._silent = getattr(error, "last_failed_node_name", self._silent)
            raise


class _ClusterNode:
    def __init__(self, client: Any, node: Any) -> None:
        self._client = client
        self._node = node

    async def execute(self, *words: Any) -> Any:
        return await self._client.execute_command(*words, target_nodes=self._node)

    async def queue(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        connection = self._node.acquire_connection()
        try:
            await self._node.disconnect_if_needed(connection)
            return await _queue(connection, commands)
        finally:
            self._node.release(connection)
