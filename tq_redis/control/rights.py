"""Which commands a user must be allowed, and whether the one in the address is."""

from __future__ import annotations

import re
from functools import cache
from typing import get_args

import redis.exceptions as rex

from tq_redis.control.keys import Keys
from tq_redis.control.scripts import Verb, load_script
from tq_redis.control.topologies import Primary

# What is sent outside scripts.
# fmt: off
_PLAIN = (
    "DEL", "EVAL", "EVALSHA", "EXISTS", "EXPIRE", "GET", "HGETALL", "HKEYS", "HSCAN", "INCRBY",
    "SADD", "SET", "SMEMBERS", "SREM", "TTL", "UNLINK", "XREAD", "ZREM", "ZSCAN",
)
# fmt: on
# What the check of rights itself needs.
_CHECK = ("MULTI", "DISCARD")
# A connection names itself, and chooses its database.
_HANDSHAKE = ("CLIENT|SETNAME", "SELECT")
_CLUSTER = ("ASKING", "CLUSTER|SLOTS", "COMMAND")
# Words in capitals in the sources of verbs are commands, but for these.
_IN_SCRIPT = re.compile(r"'([A-Z]{3,})'")
_COMMENT = re.compile(r"--.*")
_ARGUMENTS = frozenset({"COUNT", "LIMIT", "MAXLEN", "WITHSCORES"})
# The most words after its name that a command needs before its rights are looked at.
_WORDS = 4


@cache
def commands() -> tuple[str, ...]:
    """The commands on keys: those of the Lua verbs, as their sources name them, and plain ones."""
    found = set(_PLAIN)
    for verb in get_args(Verb):
        found.update(_IN_SCRIPT.findall(_COMMENT.sub("", load_script(verb).source)))
    return tuple(sorted(found - _ARGUMENTS))


def rules(namespace: str, *, cluster: bool = False) -> list[str]:
    """What ``ACL SETUSER`` needs for a user that may use one namespace and no more.

    INFO is on top of what is needed: it lets the settings of the server be checked.

    Args:
        namespace: a name, or ``*`` for all.
        cluster: for the nodes of a Redis Cluster.
    """
    wanted = (*commands(), *_CHECK, *_HANDSHAKE, "INFO", *(_CLUSTER if cluster else ()))
    allowed = [f"+{word.lower()}" for word in sorted(wanted)]
    return ["resetchannels", f"~tq:{namespace}:*", "-@all", *allowed]


async def require_rights(server: Primary, namespace: str) -> None:
    """Check that this user may run all :func:`commands` on keys of the namespace.

    Each is queued in a transaction that is discarded: the server checks rights then, and runs
    nothing. How many words a command has is left to the server; one of the lengths fits.

    Raises:
        NoPermissionError: of redis-py; it names what is missing.
    """
    key = Keys(namespace).summary("rights")
    queued = [(word, *[key] * count) for word in commands() for count in range(_WORDS + 1)]
    transaction = [("MULTI",), *queued, ("DISCARD",)]
    replies = await server.queue(transaction)
    missing = {
        words[0].lower()
        for words, reply in zip(transaction, replies, strict=True)
        if isinstance(reply, rex.NoPermissionError)
    }
    if missing:
        raise rex.NoPermissionError(
            f"it may not use all commands on keys tq:{namespace}:*. An ACL needs "
            f"~tq:{namespace}:* {' '.join(f'+{word}' for word in sorted(missing))}"
        )
