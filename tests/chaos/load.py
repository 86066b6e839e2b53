"""Consumers that work like real ones, in a hurry, and write down what they were told."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.control.build import write
from tq_redis.control.plane import ControlPlane
from tq_redis.control.ranges import to_ranges
from tq_redis.control.records import Claimed, NotEnough, Wanted
from tq_redis.deadline import Deadline
from tq_redis.metadata.claim import Claim

PARTITION = "p"
GROUP_SIZE = 4
ANSWER_S = 60.0
# Nothing is set aside: what is lost many times over must still be consumed.
DELIVERIES = 10**6


@dataclass(frozen=True)
class Task:
    """A consumer role.

    Attributes:
        group_size: 0: single samples.
        most: samples of a batch, at most; a multiple of the group's size.
        lease_s: None: consumed at once.
    """

    name: str
    group_size: int
    most: int
    lease_s: float | None


class Journal:
    """One client's log; what it holds survives the client's ``kill -9``.

    Lines: ``{"life": name}``, ``{"end": name}``, and ``{"task", "life", "claim", "ids"}`` for
    samples (as ranges) whose acknowledgement, or claim without a lease, was answered.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, **entry: Any) -> None:
        os.write(self._file, json.dumps(entry).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


class Consumer:
    """One life of a client: some batches of the tasks that are not done yet.

    Args:
        mischief: how often it does not simply work and acknowledge.
    """

    def __init__(
        self,
        plane: ControlPlane,
        name: str,
        chance: random.Random,
        journal: Journal,
        *,
        mischief: float = 0.12,
    ) -> None:
        self._plane = plane
        self._name = name
        self._chance = chance
        self._journal = journal
        self._mischief = mischief

    async def live(self, tasks: list[Task], batches: int) -> None:
        """Take ``batches`` batches; tasks that are done are removed from ``tasks``."""
        self._journal.add(life=self._name)
        while tasks and batches:
            task = self._chance.choice(tasks)
            if not await self._batch(task):
                tasks.remove(task)
            batches -= 1
        self._journal.add(end=self._name)

    async def _batch(self, task: Task) -> bool:
        """False: the task is done."""
        size = max(1, task.group_size)
        count = size * self._chance.randint(1, task.most // size)
        found = await self._claim(task, count)
        if isinstance(found, NotEnough) and found.left is not None and 0 < found.left < count:
            found = await self._claim(task, found.left)
        if isinstance(found, NotEnough):
            until = 1.0 if found.retry_s is None else min(1.0, found.retry_s)
            if found.left != 0:
                await self._plane.wait(PARTITION, found.event, Deadline(until))
            return found.left != 0
        if found is not None:
            await self._work(task, found)
        return True

    async def _claim(self, task: Task, count: int) -> Claimed | NotEnough | None:
        """None: the call was cancelled."""
        wanted = Wanted(task.name, [], count, task.group_size, task.lease_s, DELIVERIES)
        claiming = self._plane.claim(PARTITION, wanted, self._name, Deadline(ANSWER_S))
        call = asyncio.create_task(claiming)
        if self._chance.random() < self._mischief / 4:
            await asyncio.sleep(self._chance.uniform(0, 0.02))
            call.cancel()
        (found,) = await asyncio.gather(call, return_exceptions=True)
        if isinstance(found, asyncio.CancelledError):
            return None
        if isinstance(found, BaseException):
            raise found
        return found

    async def _work(self, task: Task, found: Claimed) -> None:
        if task.lease_s is None:
            (part,) = found.parts
            self._journal.add(
                task=task.name, life=self._name, claim=part[0], ids=to_ranges(part[1])
            )
            return
        (claim,) = set(found.claims)
        assert claim is not None
        ids, chance = found.ids, self._chance
        if chance.random() > self._mischief:
            await self._ack(claim, ids)
            return
        mischief = chance.choice(["release", "renew", "sleep", "in parts", "cancelled"])
        if mischief == "release":
            await self._plane.release(PARTITION, claim, ids, Deadline(ANSWER_S))
            return
        if mischief == "renew":
            await self._plane.renew(PARTITION, claim, None, Deadline(ANSWER_S))
        elif mischief == "sleep":
            await asyncio.sleep(task.lease_s * chance.uniform(0.8, 1.2))
        elif mischief == "in parts":
            half = len(ids) // 2
            await self._ack(claim, ids[:half])
            ids = ids[half:]
        elif mischief == "cancelled":
            acking = self._plane.ack(PARTITION, claim, ids, Deadline(ANSWER_S))
            call = asyncio.create_task(acking)
            await asyncio.sleep(chance.uniform(0, 0.02))
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await self._ack(claim, ids)

    async def _ack(self, claim: Claim, ids: Sequence[int]) -> None:
        lost = set(await self._plane.ack(PARTITION, claim, ids, Deadline(ANSWER_S)))
        done = [sample for sample in ids if sample not in lost]
        if done:
            self._journal.add(
                task=claim.task, life=self._name, claim=claim.number, ids=to_ranges(done)
            )


async def produce(plane: ControlPlane, samples: int, chance: random.Random) -> None:
    """Put so many samples without fields, in groups whose rows come apart, and say the end."""
    left = [f"g{number // GROUP_SIZE}" for number in range(samples)]
    # Rows of a group lie up to a few hundred rows apart.
    left.sort(key=lambda name: int(name[1:]) * GROUP_SIZE + chance.uniform(0, 300))
    while left:
        rows = chance.randint(1, 2000)
        put = write(len(left[:rows]), groups=left[:rows])
        await plane.produce(PARTITION, put, Deadline(ANSWER_S))
        del left[:rows]
        await asyncio.sleep(0)
    await plane.expect(PARTITION, None, Deadline(ANSWER_S))
