"""Samples that a consumer holds for a time: done, given back, or held for longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from tq_redis.client.core import ClientCore
from tq_redis.control import refusals
from tq_redis.deadline import Deadline
from tq_redis.errors import InputError, ServerError
from tq_redis.metadata import BatchMeta
from tq_redis.metadata.claim import Claim

# A lease is renewed this many times before it would run out.
_RENEWALS = 3
_RENEW_AGAIN_S = 0.1

# Samples of one partition that one claim holds, or held.
_Held = tuple[str, Claim, list[int]]


class LeaseCalls(ClientCore):
    """What becomes of samples that :meth:`get_meta` gave with a lease."""

    async def ack(self, metadata: BatchMeta, *, timeout: float | None = None) -> None:
        """The work on these samples is done: they are consumed. May be repeated.

        Args:
            metadata: samples claimed with a lease: all of a batch, or a part (a chunk of it, say).
                Padding rows, and samples that were cleared meanwhile, are passed over.

        Raises:
            InputError: samples were not claimed with a lease.
            LeaseLostError: names the samples whose lease was lost; the others are consumed.
        """
        deadline = self._deadline(timeout)
        lost: list[_Held] = []
        for partition, claim, rows in _by_claim(metadata):
            gone = await self.control.ack(partition, claim, rows, deadline)
            lost += [(partition, claim, gone)] if gone else []
        _refuse(lost)

    async def release(self, metadata: BatchMeta, *, timeout: float | None = None) -> None:
        """Give the samples back: other consumers of the task may get them at once.

        A sample that was delivered ``config.max_deliveries`` times is set aside instead. Samples
        that are no longer held are passed over.

        Raises:
            InputError: samples were not claimed with a lease.
        """
        deadline = self._deadline(timeout)
        for partition, claim, rows in _by_claim(metadata):
            await self.control.release(partition, claim, rows, deadline)

    async def renew(
        self,
        metadata: BatchMeta,
        lease: float | None = None,
        *,
        timeout: float | None = None,
    ) -> float:
        """Let the leases of these samples run from now on again.

        Args:
            metadata: samples claimed with a lease.
            lease: for how many seconds; None: as long as at first.

        Returns:
            Seconds until the first of the leases runs out.

        Raises:
            InputError: samples were not claimed with a lease.
            LeaseLostError: claims have ended; names their samples. The others are renewed.
        """
        if lease is not None and not lease > 0:
            raise InputError(f"lease must be positive, got {lease}")
        shortest, lost = await self._renew_all(metadata, lease, self._deadline(timeout))
        _refuse(lost)
        return shortest

    @asynccontextmanager
    async def hold(self, metadata: BatchMeta) -> AsyncGenerator[BatchMeta]:
        """Work on samples in the body: their leases are renewed meanwhile, in the background.

        At its end the samples are acknowledged; if it raises or is cancelled, they are given back.

        Raises:
            InputError: samples were not claimed with a lease.
            LeaseLostError: they were lost meanwhile, because Redis could not be reached for as
                long as the lease, for example.
        """
        heartbeat = asyncio.create_task(self._keep_renewing(metadata, await self.renew(metadata)))
        try:
            yield metadata
        except BaseException:
            await _stop(heartbeat)
            with suppress(ServerError):  # the leases run out by themselves
                await self.release(metadata)
            raise
        await _stop(heartbeat)
        await self.ack(metadata)

    async def _renew_all(
        self, metadata: BatchMeta, lease: float | None, deadline: Deadline
    ) -> tuple[float, list[_Held]]:
        """Seconds until the first lease runs out, and what has no lease any more."""
        shortest = float("inf")
        lost: list[_Held] = []
        for partition, claim, rows in _by_claim(metadata):
            seconds = await self.control.renew(partition, claim, lease, deadline, ids=rows)
            if seconds is None:
                lost.append((partition, claim, rows))
            else:
                shortest = min(shortest, seconds)
        return shortest, lost

    async def _keep_renewing(self, metadata: BatchMeta, seconds: float) -> None:
        """What ends meanwhile, since the body acknowledges a part, say, is left out: ack knows."""
        end = Deadline(seconds)
        wait = seconds / _RENEWALS
        while not end.passed:
            await asyncio.sleep(wait)
            try:
                seconds, _ = await self._renew_all(metadata, None, end)
            except ServerError:
                wait = _RENEW_AGAIN_S
                continue
            if seconds == float("inf"):
                return
            end = Deadline(seconds)
            wait = seconds / _RENEWALS


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _refuse(lost: list[_Held]) -> None:
    if lost:
        partition, claim, _ = lost[0]
        rows = [row for _, _, gone in lost for row in gone]
        raise refusals.lease_lost(partition, claim.task, rows)


def _by_claim(metadata: BatchMeta) -> list[_Held]:
    """The real rows of each claim of each partition.

    Raises:
        InputError: a row has no claim.
    """
    parts: dict[tuple[str, Claim], list[int]] = {}
    real = metadata.size - metadata.padding
    rows = zip(metadata.global_indexes, metadata.partition_ids, metadata.claims, strict=True)
    bare: list[int] = []
    for sample, partition, claim in list(rows)[:real]:
        if claim is None:
            bare.append(sample)
        else:
            parts.setdefault((partition, claim), []).append(sample)
    if bare:
        raise InputError(
            f"Samples {bare[:8]} were not claimed with a lease: get_meta(..., lease=seconds)",
            rows=bare,
        )
    return [(partition, claim, ids) for (partition, claim), ids in parts.items()]
