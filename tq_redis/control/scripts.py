"""The Lua verbs, read from ``lua/`` once and sent to Redis by their digest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

Verb = Literal[
    "produce",
    "claim",
    "recall",
    "list_ready",
    "ack",
    "release",
    "renew",
    "cancel",
    "reset_consumption",
    "expect",
    "limit",
    "admit",
    "locate",
    "describe",
    "list_changes",
    "set_tags",
    "mark_lost",
    "clear_samples",
    "clear_partition",
    "freeze",
    "snapshot",
    "stage",
    "activate",
    "swap_owner",
]


# Put in front of every verb, in this order: each uses what stands before it.
LIBRARY = (
    "prelude",
    "cells",
    "ready",
    "lifetime",
    "trash",
    "limits",
    "claims",
    "draws",
    "forget",
)


@dataclass(frozen=True, slots=True)
class Script:
    """A verb's source, library included, and its SHA-1 as ``EVALSHA`` wants it."""

    name: str
    source: str
    sha: str


@cache
def load_script(verb: Verb) -> Script:
    """The script of a verb."""
    folder = files("tq_redis.control") / "lua"
    parts = [folder / "lib" / f"{name}.lua" for name in LIBRARY] + [folder / f"{verb}.lua"]
    source = "\n".join(part.read_text(encoding="utf-8") for part in parts)
    # SHA-1 is Redis's name for a script, not a safeguard.
    return Script(verb, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())
