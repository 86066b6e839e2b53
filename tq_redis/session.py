"""init, close and get_client: the one client of this process, and what it started."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from omegaconf import DictConfig

from tq_redis.client.portal import Portal
from tq_redis.client.sync import Client
from tq_redis.config import Config, load_config, namespace_asked_for
from tq_redis.control.keys import Keys
from tq_redis.deadline import Deadline
from tq_redis.errors import (
    ConfigError,
    DeadlineError,
    NotInitializedError,
    ServerUnavailableError,
)
from tq_redis.instance import (
    Instance,
    choose,
    contact_server,
    published,
    require_same_instance,
    require_same_server,
)
from tq_redis.redis_server import EmbeddedServer, find_redis_cli, start_server

# The process that starts an instance may have much to clear of an earlier one.
_START_S = 60.0
_POLL_S = 0.05


@dataclass
class _Session:
    instance: Instance
    portal: Portal
    client: Client
    server: EmbeddedServer | None = None
    started_ray: bool = False


_session: _Session | None = None
_lock = threading.RLock()
# Ray's connection, too, is the parent's: using it in the child would hang.
_forked = False


def init(conf: Mapping[str, Any] | DictConfig | Config | None = None) -> Config:
    """Make this process a client.

    Attaches to the instance that runs in this Ray job, or, where no field is kept in Ray's object
    store (``data.backend``), to the one of this namespace in Redis. Where there is none, starts
    one: with the Redis at ``redis.url`` (or ``TQ_REDIS_URL``), else with an embedded server. The
    process that starts an instance owns it: its :func:`close` ends the stores and removes the keys.

    Args:
        conf: settings; :class:`tq_redis.Config` names them all. With settings, only an instance
            of that namespace is attached to: one of this Ray job, that runs with these settings
            (defaults fit any). One whose owner died gets this process as its owner.

    Returns:
        The settings in force.

    Raises:
        ConfigError: a setting is unknown or out of range; the namespace is in use by another
            run, with other settings, or on another server; or this process is initialised already.
        ServerUnavailableError, AuthenticationError, ServerPolicyError: Redis cannot be used.
    """
    global _session
    with _lock:
        if _session is None:
            _session = _open(conf)
        elif conf is not None:
            raise ConfigError("This process is initialised already; call close() first.")
        return _session.instance.config


def check_server(conf: Mapping[str, Any] | DictConfig | Config | None = None) -> None:
    """Refuse a Redis that :func:`init` would refuse, before anything is started. Without an
    address in ``conf`` or ``TQ_REDIS_URL`` there is nothing to check.

    Raises:
        ConfigError: a setting is unknown or out of range.
        ServerUnavailableError, AuthenticationError, ServerPolicyError: Redis cannot be used.
    """
    config = load_config(conf)
    portal = Portal()
    try:
        portal.run(contact_server(config))
    finally:
        portal.stop()


def close() -> None:
    """End what this process started; idempotent.

    The owner clears all partitions, ends the stores and, if it started them, the embedded server
    and Ray. A process that only attached closes its own connections.
    """
    global _session
    with _lock:
        session, _session = _session, None
        if session is not None:
            _end(session)


def get_client(conf: Mapping[str, Any] | DictConfig | Config | None = None) -> Client:
    """The client of this process; attaches if need be: to the instance of this Ray job, outside
    Ray to that of ``TQ_REDIS_NAMESPACE`` in the Redis at ``TQ_REDIS_URL``.

    Args:
        conf: names another namespace or Redis to attach to.

    Raises:
        NotInitializedError: there is no instance to attach to.
        ConfigError: this process has a client already, of another instance than ``conf`` names.
    """
    global _session
    with _lock:
        if _session is None:
            found = choose(_running(), namespace_asked_for(conf)) or _published(load_config(conf))
            if found is None:
                raise NotInitializedError(
                    "No queue runs in this Ray job. Call tq_redis.init() in the driver first; "
                    "outside Ray, set TQ_REDIS_URL (and TQ_REDIS_NAMESPACE) to those of the queue."
                )
            _session = _attach(found)
        elif conf is not None:
            require_same_instance(load_config(conf), _session.instance.config)
        return _session.client


def is_initialized() -> bool:
    """Whether this process has a client."""
    return _session is not None


def is_owner() -> bool:
    """Whether this process has a client, and owns the instance: its :func:`close` ends it."""
    session = _session
    return session is not None and session.instance.is_owner


def progress_command(partition: str) -> str:
    """The shell command that shows the summary of a partition. A password is left to the
    environment variable that redis-cli reads."""
    client = get_client()
    session = _session
    assert session is not None
    key = Keys(client.config.redis.namespace).summary(partition)
    words, password = session.portal.run(session.instance.cli_words(key))
    tool = find_redis_cli() or "redis-cli"
    secret = "REDISCLI_AUTH=... " if password else ""
    return f"{secret}{tool} {words} HGETALL '{key}'"


def _open(conf: Mapping[str, Any] | DictConfig | Config | None) -> _Session:
    config = load_config(conf)
    if config.data.backends == {"memory"}:
        return _start_alone(config)
    started_ray = config.data.needs_ray and _ensure_ray()
    try:
        session = _join_or_start(config, conf)
    except BaseException:
        if started_ray:
            _ray().shutdown()
        raise
    session.started_ray = started_ray
    return session


def _join_or_start(
    config: Config, conf: Mapping[str, Any] | DictConfig | Config | None
) -> _Session:
    found = _find(config, conf)
    if found is None:
        session = _start(config)
        if session is not None:
            return session
        found = _wait_for_instance(config, conf)
    require_same_server(config, found)
    try:
        return _attach(found, config if conf is not None else None)
    except ServerUnavailableError:
        # Its embedded server died with its owner, so its state is gone for good.
        if config.redis.url is not None:  # require_same_server has compared them
            raise
        return _start_alone(config)


def _find(config: Config, conf: Mapping[str, Any] | DictConfig | Config | None) -> Config | None:
    if "ray" in config.data.backends:
        return choose(_running(), namespace_asked_for(conf))
    return _published(config)


def _wait_for_instance(
    config: Config, conf: Mapping[str, Any] | DictConfig | Config | None
) -> Config:
    """The instance that another process of this run is starting just now."""
    deadline = Deadline(_START_S)
    while (found := _find(config, conf)) is None:
        if deadline.passed:
            raise DeadlineError(
                f"Another process of this run is starting namespace {config.redis.namespace!r}, "
                f"but was not ready within {deadline.seconds} s",
                deadline=deadline.seconds,
            )
        time.sleep(_POLL_S)
    return found


def _start_alone(config: Config) -> _Session:
    """A new instance that no other process can be starting."""
    session = _start(config)
    assert session is not None
    return session


def _start(config: Config) -> _Session | None:
    """A new instance; None if another process of this run is starting it."""
    server = None
    if config.redis.url is None:
        _require_one_host(config)
        server = start_server()
        redis = msgspec.structs.replace(config.redis, url=server.url)
        config = msgspec.structs.replace(config, redis=redis)
    portal = Portal()
    started = False
    try:
        instance = Instance(config, _job())
        started = portal.run(instance.start(embedded=server is not None))
    finally:
        if not started:
            portal.stop()
            if server is not None:
                server.stop()
    return _Session(instance, portal, Client(instance.core, portal), server) if started else None


def _attach(config: Config, asked: Config | None = None) -> _Session:
    portal = Portal()
    try:
        instance = Instance(config, _job())
        portal.run(instance.attach(asked))
    except BaseException:
        portal.stop()
        raise
    return _Session(instance, portal, Client(instance.core, portal))


def _end(session: _Session) -> None:
    try:
        session.portal.run(session.instance.end())
    finally:
        session.portal.stop()
        if session.server is not None:
            session.server.stop()
        if session.started_ray:
            _ray().shutdown()


def _ray() -> Any:
    # Imported late: the memory backend needs no Ray. Its own types are partial.
    import ray

    return ray


def _job() -> str:
    """The Ray job that this process is part of; empty outside Ray."""
    if _forked or "ray" not in sys.modules or not _ray().is_initialized():
        return ""
    context = _ray().get_runtime_context()
    return f"{context.get_session_name()}/{context.get_job_id()}"


def _running() -> dict[str, str]:
    if _forked or not _ray().is_initialized():
        return {}
    from tq_redis.data.ray_stores import running_instances

    return running_instances()


def _published(config: Config) -> Config | None:
    """The instance of this namespace, as its owner wrote it into Redis."""
    if config.redis.url is None:
        return None
    portal = Portal()
    try:
        return portal.run(published(config))
    finally:
        portal.stop()


def _ensure_ray() -> bool:
    """Join Ray, or start it; True if this call did."""
    if _forked:
        raise NotInitializedError(
            "A forked process cannot use Ray. Start it with the method spawn, or as a Ray task."
        )
    if _ray().is_initialized():
        return False
    _ray().init()
    return True


def _require_one_host(config: Config) -> None:
    if not config.data.needs_ray:
        return
    hosts = {node["NodeManagerHostname"] for node in _ray().nodes() if node["Alive"]}
    if len(hosts) > 1:
        raise ConfigError(
            f"The embedded Redis serves one host, and this Ray cluster has {len(hosts)}. Start a "
            f"Redis that all of them reach (docker/compose.yaml) and set TQ_REDIS_URL."
        )


def _forget_in_child() -> None:
    """Threads and connections do not survive a fork; the child attaches anew when it needs to."""
    global _session, _lock, _forked
    _session, _lock, _forked = None, threading.RLock(), True


# Closing needs threads of executors. Python ends those before atexit's functions run, and what is
# registered here before that, the latest first; concurrent.futures registers in the same way.
_threading: Any = threading
_threading._register_atexit(close)
os.register_at_fork(after_in_child=_forget_in_child)
