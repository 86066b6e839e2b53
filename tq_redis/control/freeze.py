"""One save's hold on all partitions: they stand still at one moment, and go on one by one."""

from __future__ import annotations

import asyncio
import logging
import uuid
from types import TracebackType

from tq_redis.control.snapshots import Level, Snapshots
from tq_redis.deadline import Deadline
from tq_redis.errors import DeadlineError, ServerError

_log = logging.getLogger(__name__)

HOLD_S = 5.0
"""A save that died holds up others for no longer than this."""
_RENEW_S = HOLD_S / 4


class HoldLostError(Exception):
    """Partitions went on by themselves, because the save did not ask again in time."""


class Freeze:
    """Partitions that a save holds. Leaving the context lets all of them go on."""

    def __init__(self, control: Snapshots) -> None:
        self._control = control
        self._name = uuid.uuid4().hex
        self._levels: dict[str, Level] = {}
        # A renewal must not overtake the step that follows it.
        self._lock = asyncio.Lock()
        self._renewal: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Freeze:
        self._renewal = asyncio.create_task(self._keep_renewing())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._renewal is not None
        self._renewal.cancel()
        await asyncio.gather(self._renewal, return_exceptions=True)
        try:
            await self._let_all_go(Deadline(HOLD_S))
        except (ServerError, DeadlineError) as failure:
            _log.warning("Partitions go on in %g s, by themselves: %s", HOLD_S, failure)

    async def all(self, deadline: Deadline) -> list[str]:
        """Hold every partition still, and return their names, sorted.

        When this returns, nothing has been written in any of them since one moment. Partitions that
        others hold are waited for, without holding any.

        Raises:
            DeadlineError: another save was not done in time.
        """
        while True:
            listed = await self._control.partitions(deadline)
            new = [name for name in listed if name not in self._levels]
            if not new:
                return sorted(self._levels)
            for name in new:
                if not await self._take(name, deadline):
                    break

    async def keep(self, partition: str, deadline: Deadline) -> None:
        """Let all calls go on; bytes are not freed yet.

        Raises:
            HoldLostError: it did not stand still all the time.
        """
        await self._lower(partition, "keep", deadline)

    async def release(self, partition: str, deadline: Deadline) -> None:
        """Let all go on.

        Raises:
            HoldLostError: its bytes were not kept all the time.
        """
        await self._lower(partition, "none", deadline)
        del self._levels[partition]

    async def _take(self, partition: str, deadline: Deadline) -> bool:
        async with self._lock:
            reply = await self._control.freeze(
                partition, self._name, "all", HOLD_S, deadline, first=True
            )
            if reply.code == "ok":
                self._levels[partition] = "all"
        if reply.frozen is not None:
            # Two saves that hold some and wait for others could wait for each other.
            await self._let_all_go(deadline)
            await self._control.thawed(partition, reply.frozen, deadline)
        return reply.code != "frozen"

    async def _lower(self, partition: str, level: Level, deadline: Deadline) -> None:
        async with self._lock:
            reply = await self._control.freeze(partition, self._name, level, HOLD_S, deadline)
            if reply.code != "ok":
                raise HoldLostError(partition)
            self._levels[partition] = level

    async def _let_all_go(self, deadline: Deadline) -> None:
        async with self._lock:
            held = list(self._levels)
            self._levels.clear()
            await asyncio.gather(
                *(self._control.freeze(p, self._name, "none", HOLD_S, deadline) for p in held)
            )

    async def _keep_renewing(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_S)
            async with self._lock:
                # What fails here is found out by the next step.
                await asyncio.gather(
                    *(
                        self._control.freeze(p, self._name, level, HOLD_S, Deadline(_RENEW_S))
                        for p, level in self._levels.items()
                    ),
                    return_exceptions=True,
                )
