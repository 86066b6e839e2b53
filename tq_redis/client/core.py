"""What every part of the client holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tq_redis.config import Config
from tq_redis.control.plane import ControlPlane
from tq_redis.data import DataPlane
from tq_redis.deadline import Deadline
from tq_redis.errors import InputError

# A call that must not wait for samples still waits this long for Redis to answer.
ANSWER_S = 5.0


class ClientCore:
    """One object over both planes.

    Args:
        config: settings of the instance.
        control: who has what.
        data: where the bytes are.
        name: who this is, in consumption records.

    ``timeout`` of every call is its deadline in seconds; None means ``config.timeout_s``. A call
    raises :class:`DeadlineError` or :class:`ServerUnavailableError` when it passes.
    """

    def __init__(self, config: Config, control: ControlPlane, data: DataPlane, name: str) -> None:
        self.config = config
        self.control = control
        self.data = data
        self.name = name
        # Partitions whose tasks have limits, as far as this process has met them.
        self._limited: set[str] = set()

    async def close(self) -> None:
        """Let go of connections; nothing in the instance ends."""
        await self.data.close()
        await self.control.close()

    async def free_kept(self, partition: str, deadline: Deadline) -> None:
        """Free the bytes of what was cleared or replaced while a save kept them. If another save
        keeps them by now, it does so when it is done."""
        freed = await self.control.freed(partition, deadline)
        generations = await self.control.trashes(partition, deadline)
        # Asked last: what was listed before another save began is not in its snapshot.
        if not await self.control.is_held(partition, deadline):
            await self._free(partition, freed, deadline)
            await self._empty_trash(partition, generations, deadline)

    async def abandon_trash(self, partition: str, deadline: Deadline) -> None:
        """Forget the blocks of what was cleared, where their stores cannot be reached."""
        for generation in await self.control.trashes(partition, deadline):
            await self.control.empty_trash(partition, generation, deadline)

    async def _free(self, partition: str, handles: Sequence[str], deadline: Deadline) -> None:
        if handles:
            await self.data.delete(handles, deadline)
            await self.control.forget_freed(partition, handles, deadline)

    async def _empty_trash(
        self, partition: str, generations: Sequence[str], deadline: Deadline
    ) -> None:
        for generation in generations:
            handles = await self.control.trash(partition, generation, deadline)
            await self.data.delete(handles, deadline)
            await self.control.empty_trash(partition, generation, deadline)

    def _deadline(self, timeout: float | None) -> Deadline:
        if timeout is not None and timeout < 0:
            raise InputError(f"timeout must not be negative, got {timeout}")
        return Deadline(self.config.timeout_s if timeout is None else timeout)


def distinct(fields: Sequence[str]) -> list[str]:
    if isinstance(fields, str):  # a sequence of strings too
        raise InputError(f"Fields must be a list of names, got the string {fields!r}")
    names: list[Any] = list(fields)
    if len(set(names)) != len(names) or not all(isinstance(n, str) and n for n in names):
        raise InputError(f"Fields must be distinct non-empty strings, got {names!r}")
    return names
