"""Who runs a namespace: the process that ends its stores and clears its keys.

The owner writes its name under a key that expires unless it is renewed, so that a second trainer
on the same server and namespace is refused while the first one lives, and can take over when it
died. Processes of one run are known by their Ray job. Of several servers, the one that is the shard
of this key has it.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from tq_redis.control.keys import Keys
from tq_redis.control.packing import arguments
from tq_redis.control.replies import SwapOwnerReply, decode
from tq_redis.control.shards import Connection
from tq_redis.deadline import Deadline
from tq_redis.errors import ConfigError

LIFETIME_S = 30
RENEW_S = 10.0


class OwnerRecord(msgspec.Struct, frozen=True):
    """The process that owns a namespace.

    Attributes:
        host: its machine.
        pid: its number there.
        started: when it started, since a pid alone may be given out again.
        space: the space of pids that it lives in; containers of one host may have several.
        job: the Ray job that it is part of, with its cluster; empty outside Ray.
    """

    host: str
    pid: int
    started: str
    space: str
    job: str = ""

    @classmethod
    def of(cls, pid: int, job: str = "") -> OwnerRecord:
        """A process of this machine."""
        return cls(socket.gethostname(), pid, _start_time(pid), _pid_space(), job)

    def is_dead(self) -> bool:
        """Whether the process ran where this one can see it, and is gone."""
        if (self.host, self.space) != (socket.gethostname(), _pid_space()):
            return False
        return _start_time(self.pid) != self.started


@dataclass(frozen=True)
class Ownership:
    """This process's claim to a namespace.

    Attributes:
        job: the Ray job that this process is part of, with its cluster; empty outside Ray.
    """

    connection: Connection
    keys: Keys
    job: str = ""

    async def take(self, deadline: Deadline) -> None:
        """Become the owner.

        Raises:
            ConfigError: another process owns the namespace and is alive, as far as can be told.
        """
        if owner := await self._take(deadline):
            raise self._in_use(owner)

    async def take_or_follow(self, deadline: Deadline) -> bool:
        """Become the owner, if no other process of the same run is; whether this one is now.

        Of processes outside Ray nothing tells which run they are part of.

        Raises:
            ConfigError: a process of another run owns the namespace and is alive, as far as can be
                told.
        """
        owner = await self._take(deadline)
        if owner and owner.job and self.job and owner.job != self.job:
            raise self._in_use(owner)
        return owner is None

    async def renew(self, deadline: Deadline) -> None:
        """Keep the claim for another while.

        Raises:
            ConfigError: this process was late, and another one owns the namespace now.
        """
        await self.take(deadline)

    async def give_up(self, deadline: Deadline) -> None:
        """Leave the namespace to the next owner. A claim of another process stays."""
        await self._swap(self._mine, "", deadline)

    async def _take(self, deadline: Deadline) -> OwnerRecord | None:
        """Become the owner; returns the one that lives, if another process is."""
        seen = ""
        while held := await self._swap(seen, self._mine, deadline):
            owner = msgspec.json.decode(held, type=OwnerRecord)
            if not owner.is_dead():
                return owner
            seen = held
        return None

    def _in_use(self, owner: OwnerRecord) -> ConfigError:
        return ConfigError(
            f"Namespace {self.keys.namespace!r} on {self.connection.url} is in use by process "
            f"{owner.pid} on {owner.host}. Choose another redis.namespace, or attach to that queue "
            f"with get_client(); if that process is dead, its claim expires {LIFETIME_S} s after "
            f"its death."
        )

    @cached_property
    def _mine(self) -> str:
        return msgspec.json.encode(OwnerRecord.of(os.getpid(), self.job)).decode()

    async def _swap(self, seen: str, owner: str, deadline: Deadline) -> str:
        """Put ``owner`` in place of ``seen``; returns what else was there, or an empty string."""
        values = {"seen": seen, "owner": owner, "lifetime": LIFETIME_S}
        reply = await self.connection.run(
            "swap_owner", self.keys.owner, arguments(values), deadline
        )
        return decode(reply, SwapOwnerReply).owner


def _start_time(pid: int) -> str:
    """When a process started; empty where there is none, or the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    # A zombie holds its pid, but does nothing any more.
    return "" if fields[0] == "Z" else fields[19]


def _pid_space() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
