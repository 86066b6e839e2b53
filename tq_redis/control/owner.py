"""Who runs a namespace: the process that ends its stores and clears its keys.

The owner writes its name under a key that expires unless it is renewed, so that a second trainer
on the same server and namespace is refused while the first one lives, and can take over when it
died.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import msgspec

from tq_redis.control.connection import RedisConnection
from tq_redis.control.keys import Keys
from tq_redis.deadline import Deadline
from tq_redis.errors import ConfigError

LIFETIME_S = 30
RENEW_S = 10.0


class OwnerRecord(msgspec.Struct, frozen=True):
    """The process that owns a namespace."""

    host: str
    pid: int
    started: str

    def is_dead(self) -> bool:
        """Whether this process ran on this machine and is gone."""
        if self.host != socket.gethostname():
            return False
        return _start_time(self.pid) != self.started


@dataclass(frozen=True, slots=True)
class Ownership:
    """This process's claim to a namespace."""

    connection: RedisConnection
    keys: Keys

    async def take(self, deadline: Deadline) -> None:
        """Become the owner.

        Raises:
            ConfigError: another process owns the namespace and is alive, as far as can be told.
        """
        mine = _encode(os.getpid())
        while not await self._set_if_absent(mine, deadline):
            held = await self.connection.command("GET", self.keys.owner, deadline=deadline)
            if held is None or held == mine:
                continue
            owner = msgspec.json.decode(held, type=OwnerRecord)
            if not owner.is_dead():
                raise ConfigError(
                    f"Namespace {self.keys.namespace!r} on {self.connection.url} is in use by process "
                    f"{owner.pid} on {owner.host}. Choose another redis.namespace; if that process is "
                    f"dead, its claim expires {LIFETIME_S} s after its death."
                )
            await self.connection.command("DEL", self.keys.owner, deadline=deadline)

    async def renew(self, deadline: Deadline) -> None:
        """Keep the claim for another while."""
        await self.connection.command(
            "SET", self.keys.owner, _encode(os.getpid()), "EX", LIFETIME_S, deadline=deadline
        )

    async def give_up(self, deadline: Deadline) -> None:
        """Leave the namespace to the next owner."""
        await self.connection.command("DEL", self.keys.owner, deadline=deadline)

    async def _set_if_absent(self, value: bytes, deadline: Deadline) -> bool:
        # Safe to send twice: the second time it finds our own name.
        done = await self.connection.command(
            "SET", self.keys.owner, value, "NX", "EX", LIFETIME_S, deadline=deadline
        )
        if done:
            return True
        return await self.connection.command("GET", self.keys.owner, deadline=deadline) == value


def _encode(pid: int) -> bytes:
    return msgspec.json.encode(OwnerRecord(socket.gethostname(), pid, _start_time(pid)))


def _start_time(pid: int) -> str:
    """When a process started; empty where there is none. A pid alone may be given out again."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return ""
    # A zombie holds its pid, but does nothing any more.
    return "" if fields[0] == "Z" else fields[19]
