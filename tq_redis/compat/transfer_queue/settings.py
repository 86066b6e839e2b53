"""What a configuration written for transfer_queue says here.

``tq_redis`` in it holds the settings of :class:`tq_redis.Config`; ``controller.sampler`` and
``controller.polling_mode`` mean what they meant, and ``metrics`` serves those of tq_redis. All else
describes controllers and storage that do not exist here: it is accepted, and named in one line of
the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from tq_redis.compat.transfer_queue.sampler import BaseSampler, SequentialSampler, spec_of
from tq_redis.config import Config
from tq_redis.errors import ConfigError

_log = logging.getLogger(__name__)

Settings = Mapping[str, Any] | DictConfig | None

# Checkpoints may be large; transfer_queue sets no deadline.
CHECKPOINT_S = 3600.0

# Where the settings of this layer travel in those of the queue.
NOTE = "transfer_queue"

_DEFAULTS = Path(__file__).with_name("config.yaml")
_USED = (
    *("announce", "enable", "resume", "tq_redis", "metrics"),
    *("controller.sampler", "controller.polling_mode"),
)


@dataclass(frozen=True)
class Note:
    """What everybody who attaches has to know.

    Attributes:
        polling_mode: ``get_meta`` answers at once, with an empty batch if there are too few
            samples; else it waits.
        sampler: how samples are chosen, as :func:`spec_of` describes samplers.
    """

    polling_mode: bool = False
    sampler: dict[str, Any] = field(default_factory=lambda: spec_of(SequentialSampler()))


def merged(conf: Settings) -> DictConfig:
    """The defaults, and ``conf`` over them."""
    base = OmegaConf.create({}, flags={"allow_objects": True})
    return cast(DictConfig, OmegaConf.merge(base, OmegaConf.load(_DEFAULTS), conf or {}))


def strict_settings(conf: DictConfig, sampler: BaseSampler) -> dict[str, Any]:
    """The settings of the queue, with the :class:`Note` in them.

    Raises:
        ConfigError: the block ``tq_redis`` is not a mapping.
    """
    block: Any = conf.get("tq_redis") or OmegaConf.create()
    if not isinstance(block, DictConfig):
        raise ConfigError(f"tq_redis must hold the settings of tq_redis.Config, got {block!r}")
    plain = cast(dict[str, Any], OmegaConf.to_container(block, resolve=True))
    note = Note(bool(conf.controller.polling_mode), spec_of(sampler))
    return {**plain, "notes": {**plain.get("notes", {}), NOTE: asdict(note)}}


def note_of(config: Config) -> Note:
    """What the process that started the queue noted; the defaults if it did so by tq_redis."""
    return Note(**config.notes.get(NOTE, {}))


def log_ignored(conf: Settings) -> None:
    """Say which settings have no meaning here."""
    given = OmegaConf.create(dict(conf or {}), flags={"allow_objects": True})
    ignored = [name for name in _leaves(given, "") if not name.startswith(_USED)]
    if ignored:
        _log.info(
            "These settings have no meaning in tq_redis and are ignored: %s. Its own go into the "
            "block tq_redis.",
            ", ".join(sorted(ignored)),
        )


def _leaves(conf: DictConfig, path: str) -> Iterator[str]:
    for name in conf:
        inner = conf._get_node(name)  # pyright: ignore[reportPrivateUsage]
        if isinstance(inner, DictConfig) and not inner._is_none():  # pyright: ignore[reportPrivateUsage]
            yield from _leaves(inner, f"{path}{name}.")
        else:
            yield f"{path}{name}"
