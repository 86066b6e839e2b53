"""One claim: try, wait for news, try again, and say why it cannot be."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tq_redis.client.core import ANSWER_S, ClientCore
from tq_redis.client.portal import if_lost
from tq_redis.control import refusals
from tq_redis.control.records import Claimed, NotEnough, Taken, Wanted
from tq_redis.deadline import Deadline
from tq_redis.errors import CannotFillError, DeadlineError, EndOfStreamError, nearest
from tq_redis.metadata import BatchMeta
from tq_redis.samplers import (
    BaseSampler,
    GRPOGroupNSampler,
    Sampler,
    SeqlenBalancedSampler,
    require_choice,
)


def group_size_of(sampler: Sampler) -> int:
    """Samples of one group that are taken together; 1: none need to be."""
    grouped = isinstance(sampler, GRPOGroupNSampler | SeqlenBalancedSampler)
    return sampler.n_samples_per_prompt if grouped else 1


@dataclass(frozen=True)
class Fetch:
    """One call of ``get_meta`` that claims.

    Attributes:
        core: the client.
        partition: where.
        wanted: what is asked of the control plane.
        sampler: how the samples are chosen.
        batch_size: as the caller gave it.
        config: likewise, ``sampling_config``.
    """

    core: ClientCore
    partition: str
    wanted: Wanted
    sampler: Sampler
    batch_size: int
    config: Mapping[str, Any]

    async def run(self, wait: Deadline) -> BatchMeta:
        """The batch; an empty one if ``wait`` is 0 and there is none now.

        Raises:
            DeadlineError, EndOfStreamError, CannotFillError
        """
        waiter = None if wait.seconds == 0 else uuid.uuid4().hex
        try:
            found = await self._attempt(wait, waiter)
            if isinstance(found, NotEnough):
                if waiter is None:
                    return BatchMeta.empty()
                found = await self._wait_for(wait, waiter, found)
        except BaseException:  # a claim that succeeds takes its caller off the list
            if waiter is not None:
                self.core.control.forget_waiter(self.partition, waiter)
            raise
        if_lost(partial(self.core.control.take_back, self.partition, self.wanted, found))
        return BatchMeta(
            found.ids,
            self.partition,
            found.schema,
            custom_meta=found.tags,
            claims=found.claims,
            task=self.wanted.task,
        )

    async def _wait_for(self, wait: Deadline, waiter: str, found: NotEnough) -> Claimed:
        while not wait.passed:
            until = wait.remaining if found.retry_s is None else found.retry_s
            await self.core.control.wait(
                self.partition, found.event, Deadline(min(until, wait.remaining))
            )
            again = await self._attempt(wait, waiter)
            if isinstance(again, Claimed):
                return again
            found = again
        raise await self._too_few(found, wait)

    async def _attempt(self, wait: Deadline, waiter: str | None) -> Claimed | NotEnough:
        wanted = self.wanted
        if waiter is not None:
            wanted = replace(wanted, waiter=(waiter, wait.remaining))
        deadline = Deadline(max(wait.remaining, ANSWER_S))
        if isinstance(self.sampler, BaseSampler | SeqlenBalancedSampler):
            found = await self._choose(self.sampler, wanted, deadline)
            while isinstance(found, Taken):  # another consumer was faster
                found = await self._choose(self.sampler, wanted, deadline)
        else:
            found = await self.core.control.claim(self.partition, wanted, self.core.name, deadline)
        if isinstance(found, NotEnough):
            await self._refuse_hopeless(found, deadline)
        return found

    async def _choose(
        self, sampler: BaseSampler | SeqlenBalancedSampler, wanted: Wanted, deadline: Deadline
    ) -> Claimed | NotEnough | Taken:
        control, name = self.core.control, self.core.name
        balanced = isinstance(sampler, SeqlenBalancedSampler)
        index, size = self.config.get("batch_index"), sampler.dp_size if balanced else 0
        draws = [f"{rank}:{index}" for rank in range(size)]
        ready, standing = await control.ready(self.partition, wanted, name, deadline, draws=draws)
        shares: dict[str, list[int]] | None = None
        chosen: list[int] = []
        if ready is None:
            pass  # the draw was made: there is nothing to choose
        elif not ready.ids:
            return standing
        elif isinstance(sampler, SeqlenBalancedSampler):
            # Ranks that have their shares, or will find them, get no second ones.
            dealt = sampler.shares(ready, self.batch_size, len(standing.missing))
            shares = dict(zip(standing.missing, dealt, strict=False))
            chosen = [sample for share in dealt for sample in share]
        else:
            chosen = list(sampler.sample(ready, self.batch_size, **self.config))
            require_choice(sampler, ready, chosen)
        if ready is not None and not chosen:
            return standing
        return await control.claim_chosen(
            self.partition, wanted, name, chosen, deadline, shares=shares
        )

    async def _refuse_hopeless(self, found: NotEnough, deadline: Deadline) -> None:
        """Raise if no wait can help."""
        left, task, count = found.left, self.wanted.task, self._count(found)
        if left == 0:
            raise self._end_of_stream()
        if isinstance(self.sampler, BaseSampler):
            return
        if found.limit is not None and found.limit < self.wanted.count:
            raise refusals.batch_over_limit(self.partition, task, self.wanted.count, found.limit)
        if left is None:
            return
        size = group_size_of(self.sampler)
        if size > 1 and found.complete and left >= count:
            open_rows = await self._open_rows(deadline)
            if not open_rows:  # others have consumed them since
                raise self._end_of_stream()
            left = sum(n // size * size for group, n in open_rows.items() if group is not None)
        if left < count:
            groups = f" in whole groups of {size}" if size > 1 else ""
            raise CannotFillError(
                f"Task {task!r} asked for {count} samples{groups} of partition "
                f"{self.partition!r}, but only {left} can still come: {found.ready} are ready, the "
                f"others are not produced yet or held by other consumers. Ask for fewer.",
                left=left,
                partition=self.partition,
                fields=self.wanted.fields,
            )

    def _count(self, found: NotEnough) -> int:
        """How many samples are needed: of balanced shares, only those that nobody has drawn."""
        if isinstance(self.sampler, SeqlenBalancedSampler):
            return self.batch_size * len(found.missing)
        return self.wanted.count

    def _end_of_stream(self) -> EndOfStreamError:
        return EndOfStreamError(
            f"Task {self.wanted.task!r} has consumed all samples of partition {self.partition!r}, "
            f"and no more will be made.",
            partition=self.partition,
            fields=self.wanted.fields,
        )

    async def _open_rows(self, deadline: Deadline) -> Counter[str | None]:
        """How many samples of each group the task can still get; None: of no group."""
        rows = await self.core.control.describe(
            self.partition, deadline, fields=(), task=self.wanted.task, groups=True
        )
        return Counter(
            group
            for group, state in zip(rows.groups, rows.states, strict=True)
            if state in ("open", "leased")
        )

    async def _too_few(self, found: NotEnough, wait: Deadline) -> DeadlineError:
        control, partition, wanted = self.core.control, self.partition, self.wanted
        answer = Deadline(ANSWER_S)
        text = f"Task {wanted.task!r} waited {wait.seconds:g} s for {wanted.count} samples"
        text += f" of {partition!r}"
        if not found.exists:
            known = await control.partitions(answer)
            text += f", which does not exist. {nearest(partition, known)}"
        else:
            text += f" with fields {list(wanted.fields)}: {found.ready} are ready"
            size = group_size_of(self.sampler)
            if wanted.group_size:
                text += f", in {found.groups} whole groups of {size}"
            known = await control.fields(partition, answer)
            summary = await control.summary(partition, answer)
            counts = [
                f"{summary[f'{name}:{wanted.task}']} {word}"
                for name, word in _COUNTERS.items()
                if summary.get(f"{name}:{wanted.task}")
            ]
            text += f", of {summary['samples']} ({', '.join(counts) or 'none consumed'})."
            for name in wanted.fields:
                produced = summary.get(f"produced:{name}", 0)
                if name not in known:
                    text += f" Field {name!r} does not exist. {nearest(name, known)}"
                elif produced != summary["samples"]:
                    text += f" Field {name!r} is produced in {produced}."
        return DeadlineError(text, partition=partition, fields=wanted.fields, deadline=wait.seconds)


_COUNTERS = {
    "consumed": "consumed",
    "claimed": "held by others with a lease",
    "set_aside": "set aside",
}
