"""Every setting, in one place. The only module that reads the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tq_redis.errors import ConfigError, nearest

BackendName = Literal["ray", "zmq", "memory"]
Strategy = Literal["SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK"]

URL_VARIABLE = "TQ_REDIS_URL"
NAMESPACE_VARIABLE = "TQ_REDIS_NAMESPACE"


class RedisConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The control plane.

    Attributes:
        url: address of a server (``redis://``, ``rediss://``, ``unix://``), a Redis Cluster
            (``redis+cluster://``) or a master that Sentinels name (``redis+sentinel://``);
            :mod:`tq_redis.control.addresses` has the forms. Several addresses share the
            partitions. None starts an embedded server (the environment variable ``TQ_REDIS_URL``
            stands in for None; it separates several addresses by spaces).
        namespace: one per training run; every key starts with ``tq:<namespace>:``.
        max_connections: size of the pool that short calls share; waiting calls have their own.
        allow_eviction: accept a server whose ``maxmemory-policy`` is not ``noeviction``.
    """

    url: str | tuple[str, ...] | None = None
    namespace: str = "default"
    max_connections: int = 16
    allow_eviction: bool = False

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses; none for an embedded server."""
        return tuple(_words(self.url))


class PlacementConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Over which Ray nodes the units of ``data.units`` are spread: those that a placement group
    with a bundle for each gives them.

    Attributes:
        strategy: Ray's: ``SPREAD`` (over as many nodes as there are), ``STRICT_SPREAD`` (each on a
            node of its own), ``PACK`` (on few) or ``STRICT_PACK`` (on one).
        cpus: that each unit reserves of its node.
        resources: what else each reserves, by Ray's names: ``memory`` in bytes, or a custom one,
            of which nodes are given some (``ray start --resources '{"storage": 2}'``) that are to
            take units.
    """

    strategy: Strategy = "SPREAD"
    cpus: float = 0.0
    resources: dict[str, float] = {}


class DataConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The data plane.

    Attributes:
        backend: where columns are kept: ``ray`` (in Ray's object store), ``zmq`` (in storage units,
            also for processes outside Ray) or ``memory`` (one process).
        routes: field -> backend, for fields that are kept elsewhere; the field may be a pattern
            (``image_*``, ``*``), of which the first that fits counts.
        units: storage units that :func:`tq_redis.init` starts as Ray actors. 0: those that
            ``tq-redis storage-unit`` starts are used.
        unit_bytes: bytes that each of these may keep.
        placement: the nodes that these run on. Stores in Ray have no such choice: every node from
            which columns are put gets one.
        parsers: name -> ``package.module:function``, of what these offer to run on the columns of
            a put that names it (``data_parser``).
        curve: encrypt what travels between clients and stores by ZeroMQ (CurveZMQ); each store
            makes its own key.
        block_bytes: neighbouring fields of a put share blocks of up to so many bytes; a larger
            field is cut by rows into blocks of about that size.
        orphan_grace_s: a block that no row names this long after it was written is freed.
        pickle: allow non-tensor values that msgpack cannot carry to be pickled.
    """

    backend: BackendName = "ray"
    routes: dict[str, BackendName] = {}
    units: int = 0
    unit_bytes: int = 4 << 30
    placement: PlacementConfig = PlacementConfig()
    parsers: dict[str, str] = {}
    curve: bool = False
    block_bytes: int = 32 << 20
    orphan_grace_s: float = 120.0
    pickle: bool = False

    @property
    def backends(self) -> set[str]:
        """The backends that fields may be kept in."""
        return {self.backend, *self.routes.values()}

    @property
    def needs_ray(self) -> bool:
        """Whether the process that starts an instance must be in Ray."""
        return "ray" in self.backends or ("zmq" in self.backends and self.units > 0)


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of one instance.

    Attributes:
        redis: the control plane.
        data: the data plane.
        timeout_s: deadline of a call that does not name its own, in seconds.
        idle_ttl_s: a partition that nobody has written or claimed from for this many seconds is
            removed by Redis; stores without a call for as long end themselves.
        max_deliveries: a sample that was given out with a lease this many times, and never
            acknowledged, is set aside for that task.
        notes: JSON values that everybody who attaches finds here; nothing in tq_redis reads them.
    """

    redis: RedisConfig = RedisConfig()
    data: DataConfig = DataConfig()
    timeout_s: float = 60.0
    idle_ttl_s: int = 7 * 24 * 3600
    max_deliveries: int = 5
    notes: dict[str, Any] = {}


def load_config(conf: Mapping[str, Any] | DictConfig | Config | None = None) -> Config:
    """Settings from ``conf``, then the environment, then the defaults.

    Raises:
        ConfigError: a key is unknown (the nearest known one is named) or a value is out of range.
    """
    if isinstance(conf, Config):
        config = conf
    else:
        settings = _plain({} if conf is None else conf)
        if not isinstance(settings, dict):
            raise ConfigError(f"Settings must be a mapping, got {type(conf).__name__}")
        settings = cast(dict[str, Any], settings)
        _refuse_unknown(settings, Config, "")
        try:
            config = msgspec.convert(settings, Config)
        except msgspec.ValidationError as error:
            raise ConfigError(f"Bad setting: {error}") from error
    config = _with_environment(config)
    _check_ranges(config)
    return config


def namespace_asked_for(conf: Mapping[str, Any] | DictConfig | Config | None) -> str | None:
    """The namespace of the instance that ``init(conf)`` looks for; None: any that runs."""
    if conf is None:
        return os.environ.get(NAMESPACE_VARIABLE)
    return load_config(conf).redis.namespace


def variables_that_are_set() -> dict[str, str]:
    """What the environment says of the Redis to use, for processes that do not inherit it."""
    names = (URL_VARIABLE, NAMESPACE_VARIABLE)
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def _plain(value: Any) -> Any:
    """Nested mappings, those of OmegaConf too, as dictionaries."""
    if isinstance(value, (DictConfig, ListConfig)):
        try:
            return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"Bad setting: {error}") from error
    if isinstance(value, Mapping):
        mapping = cast(Mapping[Any, Any], value)
        return {str(name): _plain(inner) for name, inner in mapping.items()}
    return value


def _refuse_unknown(settings: Mapping[str, Any], kind: type[msgspec.Struct], path: str) -> None:
    known = {field.name: field for field in msgspec.structs.fields(kind)}
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(f"Unknown setting {path}{name}. {nearest(name, known)}")
        inner = known[name].type
        if not isinstance(value, Mapping):
            continue
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            _refuse_unknown(cast(Mapping[str, Any], value), inner, f"{path}{name}.")


def _with_environment(config: Config) -> Config:
    redis = config.redis
    found = _words(os.environ.get(URL_VARIABLE))
    if redis.url is None and found:
        redis = msgspec.structs.replace(redis, url=found[0] if len(found) == 1 else tuple(found))
    if redis.namespace == "default" and os.environ.get(NAMESPACE_VARIABLE):
        redis = msgspec.structs.replace(redis, namespace=os.environ[NAMESPACE_VARIABLE])
    return msgspec.structs.replace(config, redis=redis)


def _words(url: str | tuple[str, ...] | None) -> list[str]:
    """Several addresses; no address has a space in it."""
    return [
        word for part in ([url] if isinstance(url, str) else url or ()) for word in part.split()
    ]


def _check_ranges(config: Config) -> None:
    positive = {
        "timeout_s": config.timeout_s,
        "idle_ttl_s": config.idle_ttl_s,
        "max_deliveries": config.max_deliveries,
        "redis.max_connections": config.redis.max_connections,
        "data.block_bytes": config.data.block_bytes,
        "data.orphan_grace_s": config.data.orphan_grace_s,
        "data.unit_bytes": config.data.unit_bytes,
    }
    for name, value in positive.items():
        if not value > 0:  # nan is not positive either
            raise ConfigError(f"Setting {name} must be positive, got {value}")
    if config.data.units < 0:
        raise ConfigError(f"Setting data.units must not be negative, got {config.data.units}")
    _check_placement(config.data)
    if config.data.parsers and not config.data.units:
        raise ConfigError(
            "Setting data.parsers is for the units that init() starts, and data.units is 0. To "
            "those that you start, say --parser"
        )
    if config.redis.url is not None and not config.redis.urls:
        raise ConfigError("Setting redis.url must not be empty; leave it out for an own server")
    if not re.fullmatch(r"[^\s:{}]+", config.redis.namespace):
        raise ConfigError(
            f"Setting redis.namespace must be a word without spaces, colons or braces, "
            f"got {config.redis.namespace!r}"
        )


def _check_placement(data: DataConfig) -> None:
    placement = data.placement
    if placement != PlacementConfig() and not data.units:
        raise ConfigError(
            "Setting data.placement is for the units that init() starts, and data.units is 0"
        )
    for name in ("CPU", "GPU", "object_store_memory"):
        if name in placement.resources:
            raise ConfigError(
                f"Setting data.placement.resources must not name {name}: CPUs are in "
                f"data.placement.cpus, others of Ray's own no unit needs"
            )
    reserved = {"cpus": placement.cpus}
    reserved |= {f"resources.{name}": amount for name, amount in placement.resources.items()}
    for name, amount in reserved.items():
        if not (amount == 0 or 0.0001 <= amount < 1 or (amount >= 1 and amount % 1 == 0)):
            raise ConfigError(
                f"Setting data.placement.{name} must be 0, a part of 1, or a whole number, "
                f"got {amount}"
            )
