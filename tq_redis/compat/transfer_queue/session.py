"""init, close and what belongs to the queue as a whole."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tq_redis import session as strict
from tq_redis.client.sync import Client
from tq_redis.compat.transfer_queue.errors import CheckpointNotFoundError, NotConnectedError
from tq_redis.compat.transfer_queue.metrics import gauges
from tq_redis.compat.transfer_queue.own_sampler import start_chooser, stop_chooser
from tq_redis.compat.transfer_queue.sampler import is_built_in, sampler_from
from tq_redis.compat.transfer_queue.settings import (
    CHECKPOINT_S,
    Settings,
    log_ignored,
    merged,
    strict_settings,
)
from tq_redis.config import Config
from tq_redis.errors import NotInitializedError, shorten
from tq_redis.metrics import MetricsServer

if TYPE_CHECKING:
    from tq_redis.compat.transfer_queue.client import TransferQueueClient

_log = logging.getLogger(__name__)

_metrics: MetricsServer | None = None


def init(conf: Settings = None) -> Settings:
    """Make this process a client: attach to the queue that runs, or start one.

    Without ``conf``, any queue of this Ray cluster is attached to. With it, one of its namespace;
    if the process that owned that one died, this process takes its place and drops the samples
    that it left, unless ``resume`` is true in ``conf``. Where ``announce`` is true, it prints how
    redis-cli shows the samples of verl's training.

    Args:
        conf: as for transfer_queue; the block ``tq_redis`` in it has the settings of
            :class:`tq_redis.Config`. An attached process uses those that the queue runs with.

    Returns:
        All settings, where this call started a queue; else ``conf``.

    Raises:
        ConfigError, ServerUnavailableError, AuthenticationError, ServerPolicyError: as
            :func:`tq_redis.init`.
        SamplerNotFoundError: ``controller.sampler`` names none.
    """
    if strict.is_initialized() or (not conf and _attach()):
        return conf
    complete = merged(conf)
    sampler = sampler_from(complete.controller.sampler)
    log_ignored(conf)
    config = strict.init(strict_settings(complete, sampler))
    if not strict.is_owner():
        return conf
    try:
        if not is_built_in(sampler):
            in_ray = "memory" not in config.data.backends
            start_chooser(sampler, config.redis.namespace, in_ray=in_ray)
        if complete.metrics.enabled:
            _serve_metrics(config, complete.metrics.port)
        if not complete.get("resume", False):
            _drop_left_behind()
        if complete.get("announce", False):
            click.echo(f"The samples, as redis-cli shows them: {strict.progress_command('train')}")
    except BaseException:
        close()
        raise
    return complete


def close() -> None:
    """End what this process started; idempotent. A process that only attached ends nothing."""
    global _metrics
    server, _metrics = _metrics, None
    if server is not None:
        server.close()
    stop_chooser()
    strict.close()


def get_client() -> TransferQueueClient:
    """The client of this process.

    Raises:
        NotConnectedError: :func:`init` was not called in it.
    """
    from tq_redis.compat.transfer_queue.client import TransferQueueClient

    if not strict.is_initialized():
        raise NotConnectedError("Call init() first: this process has no client")
    return TransferQueueClient()


def attached_client() -> TransferQueueClient:
    """The client of this process; attaches to the queue that runs, if need be.

    Raises:
        NotConnectedError: none runs.
    """
    running_client()
    return get_client()


def running_client() -> Client:
    """The strict client of this process; attaches if need be.

    Raises:
        NotConnectedError: no queue runs.
    """
    try:
        return strict.get_client()
    except NotInitializedError as error:
        raise NotConnectedError(f"Call init() first. {error.message}") from error


def get_metrics_endpoint() -> str | None:
    """``host:port`` where this process serves metrics to Prometheus: the one that started the queue
    does so with ``metrics.enabled``. None elsewhere."""
    return None if _metrics is None else _metrics.endpoint


def save_checkpoint(
    checkpoint_dir: str | PathLike[str],
    *,
    include_storage: bool = True,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write all partitions into a directory, which is made. See :func:`tq_redis.save_checkpoint`.

    Args:
        include_storage: the columns are saved in any case.
        metadata: JSON values that are kept with it.

    Raises:
        NotConnectedError: this process has no client. A RuntimeError.
        CheckpointError: the disk refuses. A checkpoint that was there is as it was.
    """
    if not include_storage:
        _log.warning("include_storage=False has no effect: columns are always saved")
    client = _initialized()
    Path(checkpoint_dir).parent.mkdir(parents=True, exist_ok=True)
    client.save_checkpoint(checkpoint_dir, metadata=metadata, timeout=CHECKPOINT_S)


def load_checkpoint(checkpoint_dir: str | PathLike[str]) -> None:
    """Put the partitions of a checkpoint in place of all that are there.

    Raises:
        NotConnectedError: this process has no client. A RuntimeError.
        CheckpointNotFoundError: there is none. A FileNotFoundError.
        CheckpointError: it is not whole. The partitions are as they were.
    """
    client = _initialized()
    if not Path(checkpoint_dir).exists():
        raise CheckpointNotFoundError(
            f"There is no checkpoint at {checkpoint_dir}", path=str(checkpoint_dir)
        )
    client.load_checkpoint(checkpoint_dir, timeout=CHECKPOINT_S)


def _attach() -> bool:
    try:
        strict.get_client()
    except NotInitializedError:
        return False
    return True


def _initialized() -> Client:
    get_client()
    return strict.get_client()


def _serve_metrics(config: Config, port: int) -> None:
    global _metrics
    host = "127.0.0.1"
    if "ray" in config.data.backends:
        import ray as untyped_ray

        ray: Any = untyped_ray  # its own types are partial
        host = ray.util.get_node_ip_address()
    _metrics = MetricsServer(config, host, port, also=gauges)


def _drop_left_behind() -> None:
    client = strict.get_client()
    left = client.get_partition_list()
    if left:
        _log.warning("Clearing partitions %s that an earlier run left behind", shorten(left))
    for name in left:
        client.clear_partition(name)
