"""How a queue stands, for Prometheus: read from Redis whenever it asks, and never in between."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tq_redis.config import Config
from tq_redis.control.plane import ControlPlane
from tq_redis.control.shards import Shards
from tq_redis.control.standing import Standing, standing_of
from tq_redis.deadline import Deadline
from tq_redis.errors import ConfigError, PartitionNotFoundError, TQError

_log = logging.getLogger(__name__)

MetricsOf = Callable[[Mapping[str, Standing]], Iterator[Metric]]

# Prometheus waits ten seconds by default.
_ANSWER_S = 5.0


class MetricsServer:
    """Serves ``/metrics`` over HTTP, from construction to :meth:`close`.

    Args:
        config: of the queue; ``redis.url`` is needed.
        host: the address of this host to listen at.
        port: 0: one that is free.
        also: further metrics of the partitions, by name.

    Attributes:
        endpoint: ``host:port``.

    Raises:
        ConfigError: no address of Redis, or none to listen at.
        ServerUnavailableError, AuthenticationError: Redis cannot be reached.
    """

    def __init__(
        self,
        config: Config,
        host: str = "127.0.0.1",
        port: int = 0,
        also: MetricsOf | None = None,
    ) -> None:
        if config.redis.url is None:
            raise ConfigError("Which Redis? Give --url or set TQ_REDIS_URL.")
        asyncio.run(_standings(config))
        registry = CollectorRegistry()
        own: tuple[MetricsOf, ...] = (_of_partitions, _of_tasks)
        registry.register(_Queue(config, own if also is None else (*own, also)))
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(
                f"Metrics cannot be served at {host}:{port}: {error}. Choose an address of this "
                f"host, and port 0 for one that is free."
            ) from error
        self.endpoint = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


async def _standings(config: Config) -> dict[str, Standing]:
    """By partition, over a connection of its own: scrapes are rare, and come in any thread."""
    deadline = Deadline(_ANSWER_S)
    servers = Shards(config.redis)
    control = ControlPlane(servers, config.redis.namespace, config.idle_ttl_s)
    found: dict[str, Standing] = {}
    try:
        await servers.learn(control.keys, deadline)
        for name in await control.partitions(deadline):
            with suppress(PartitionNotFoundError):  # cleared since it was listed
                found[name] = await standing_of(control, name, deadline)
    finally:
        await control.close()
    return found


class _Queue(Collector):
    """All partitions of a namespace, as they stand when they are collected."""

    def __init__(self, config: Config, kinds: Sequence[MetricsOf]) -> None:
        self._config = config
        self._kinds = kinds

    def describe(self) -> list[Metric]:
        """Nothing, so that registering reads nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("tq_up", "Whether Redis answered.")
        try:
            standings = asyncio.run(_standings(self._config))
        except TQError as error:
            _log.warning("No metrics: %s", error)
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        yield up
        yield GaugeMetricFamily("tq_partitions", "Partitions.", len(standings))
        for kind in self._kinds:
            yield from kind(standings)


def _of_partitions(standings: Mapping[str, Standing]) -> Iterator[Metric]:
    samples = _gauge("partition_samples", "Samples in the partition.")
    made = _gauge("partition_samples_made", "Samples that were ever made in it.")
    expected = _gauge(
        "partition_samples_expected", "Samples that will be made, where that is known."
    )
    nbytes = _gauge("partition_bytes", "Bytes of its blocks in stores.")
    produced = _gauge("partition_produced", "Samples that have the field.", "field")
    for name, standing in standings.items():
        samples.add_metric([name], standing.samples)
        made.add_metric([name], standing.made)
        nbytes.add_metric([name], standing.nbytes)
        if standing.expected is not None:
            expected.add_metric([name], standing.expected)
        for field, count in standing.produced.items():
            produced.add_metric([name, field], count)
    yield from (samples, made, expected, nbytes, produced)


def _of_tasks(standings: Mapping[str, Standing]) -> Iterator[Metric]:
    ready = _gauge("task_ready", "Samples that the task may claim now.", "task", "fields")
    leased = _gauge("task_leased", "Samples that its consumers hold with a lease.", "task")
    consumed = _gauge("task_consumed", "Samples that it has consumed.", "task")
    aside = _gauge("task_set_aside", "Samples delivered too often, never acknowledged.", "task")
    waiting = _gauge("task_waiting", "Consumers that wait for samples.", "task")
    waited = _gauge("task_oldest_wait_seconds", "How long the first of them has waited.", "task")
    unconsumed = _gauge("task_unconsumed", "Samples that it has not consumed.", "task")
    limit = _gauge("task_limit", "How many it may leave so, where it has a limit.", "task")
    evicted = _gauge("task_evicted", "Samples cleared because of its limit, so far.", "task")
    for name, standing in standings.items():
        for task, state in standing.tasks.items():
            for fields, count in state.ready.items():
                ready.add_metric([name, task, fields], count)
            leased.add_metric([name, task], state.claimed)
            consumed.add_metric([name, task], state.consumed)
            aside.add_metric([name, task], state.set_aside)
            unconsumed.add_metric([name, task], state.unconsumed)
            if state.limit is not None:
                limit.add_metric([name, task], state.limit.samples)
            evicted.add_metric([name, task], state.evicted)
            waiting.add_metric([name, task], len(state.waiters))
            waited.add_metric([name, task], state.waiters[0].waited_s if state.waiters else 0)
    yield from (ready, leased, consumed, aside, unconsumed, limit, evicted, waiting, waited)


def _gauge(name: str, says: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"tq_{name}", says, labels=["partition", *labels])
