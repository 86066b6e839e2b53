"""Random calls against a plain Python model of one partition."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.control.build import handle, soon, write
from tests.control.conftest import check_and_clear
from tests.control.model import Model, Part, Row
from tests.control.state import COUNTERS, Admin, Partition, TaskState
from tq_redis.config import RedisConfig
from tq_redis.control import claims, draws
from tq_redis.control.connection import RedisConnection
from tq_redis.control.plane import ControlPlane, NotAdmittedError
from tq_redis.control.records import Admission, Claimed, NotEnough, Taken, Wanted, Write
from tq_redis.control.replies import ClaimReply
from tq_redis.errors import (
    InputError,
    NotReadyError,
    PartitionEndedError,
    PartitionNotFoundError,
    SampleNotFoundError,
    SchemaConflictError,
    TQError,
)
from tq_redis.metadata.claim import Claim

T = TypeVar("T")

FIELDS = st.lists(st.sampled_from("xyz"), min_size=1, max_size=3, unique=True)
KEYS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True)
DTYPES = st.sampled_from(["float32"] * 6 + ["int64"])
TAG = st.dictionaries(st.sampled_from(["s", "t"]), st.integers(0, 3), max_size=2)
Asking = tuple[str, str]
# In the order of ``Wanted``: lease in seconds, deliveries.
Lease = tuple[float | None, int]
# Task, samples, whether the oldest make room.
Limit = tuple[str, int | None, bool]
LIMITS = st.tuples(st.sampled_from("tu"), st.none() | st.integers(3, 12), st.booleans())
LEASE_S = 1000.0
LEASES = st.sampled_from([(None, 5), (LEASE_S, 1), (LEASE_S, 2), (LEASE_S, 9)])
TASKS = st.sampled_from([None, "t", "u"])
DRAWS = st.sampled_from(["0:0", "1:0", "0:1"])
ASKING = st.sampled_from([("t", ""), ("t", "x"), ("t", "xy"), ("u", "yx"), ("u", "z")])


@contextmanager
def rows_per_claim(size: int) -> Generator[None]:
    """Draws of more rows than that are made in pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "ROWS_PER_PART", size)
        patch.setattr(draws, "ROWS_PER_PART", size)
        yield


class TwicePlane(ControlPlane):
    """Every call that changes something is sent twice, as after a lost reply."""

    async def _mutate(
        self,
        verb: Any,
        partition: str,
        values: Any,
        kind: Any,
        deadline: Any,
        *,
        request: Any = None,
    ) -> Any:
        request = request or uuid.uuid4().hex
        first, second = [
            await super(TwicePlane, self)._mutate(
                verb, partition, values, kind, deadline, request=request
            )
            for _ in range(2)
        ]
        if first.code == "ok" and verb not in ("list_ready", "renew", "recall"):
            assert first == second
        return first


class PartitionMachine(RuleBasedStateMachine):
    """The control plane and the model, side by side."""

    url: ClassVar[str]

    @initialize(twice=st.booleans())
    def open(self, twice: bool) -> None:
        self._open(twice)

    def _open(self, twice: bool) -> None:
        self.loop = asyncio.new_event_loop()
        self.admin: Admin = redis.Redis.from_url(self.url, decode_responses=True)
        self.connection = RedisConnection(self.url, RedisConfig())
        kind = TwicePlane if twice else ControlPlane
        self.plane = kind(self.connection, f"model-{uuid.uuid4().hex}", 1000)
        self.model = Model()

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.run(check_and_clear(self.plane, self.admin))
        self.run(self.connection.close())
        self.admin.close()
        self.loop.close()

    @property
    def rows(self) -> dict[int, Row]:
        return self.model.rows

    def run(self, call: Awaitable[T]) -> T:
        return self.loop.run_until_complete(call)

    # Writing

    @rule(
        count=st.integers(1, 6),
        fields=FIELDS,
        groups=st.none() | st.text("gh", min_size=6),
        task=TASKS,
        dies=st.sampled_from([False] * 4 + [True]),
    )
    def put(
        self, count: int, fields: list[str], groups: str | None, task: str | None, dies: bool
    ) -> None:
        """Where there are limits, when they let it; or it dies, and the room kept for it stays."""
        names = None if groups is None else list(groups[:count])
        entry = replace(write(count, fields, groups=names), task=task)
        if self.model.limits and not self.model.refuses_new(count):
            put = self._room(count)
            if put is None or dies:
                return
            entry = entry.within(put)
        call = self.plane.produce("p", entry, soon())
        self._reserved(count)
        if self._refused(count, call, admitted=True):
            return
        written = self.run(call)
        self._made(written.ids, names)
        self.model.rooms.pop(entry.admission or "", None)
        self._wrote(written.ids, fields, entry, "float32", written.freed)

    @rule(keys=KEYS, fields=FIELDS, group=st.none() | st.just("g"), tag=TAG, dtype=DTYPES)
    def upsert(
        self, keys: list[str], fields: list[str], group: str | None, tag: Any, dtype: str
    ) -> None:
        known = {row.key: sample for sample, row in self.rows.items() if row.key in keys}
        groups = None if group is None else [group] * len(keys)
        tags = [tag] * len(keys)
        entry = write(len(keys), fields, keys=keys, groups=groups, tags=tags, dtype=dtype)
        self._reserved(len(keys))
        call = self.plane.produce("p", entry, soon())
        if self._refused(len(keys) - len(known), call):
            return
        if self._conflicts(known.values(), fields, dtype, call):
            return
        written = self.run(call)
        new = iter(range(self.model.last_id - len(keys) + 1, self.model.last_id + 1))
        expected = [known.get(key) or next(new) for key in keys]
        assert written.ids == expected
        self.model.made += len(keys) - len(known)
        for key, sample in zip(keys, expected, strict=True):
            self.rows.setdefault(sample, Row(key, group)).tags.update(tag)
        self._wrote(expected, fields, entry, dtype, written.freed)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), fields=FIELDS, dtype=DTYPES, overwrite=st.booleans(), task=TASKS)
    def add(
        self, data: st.DataObject, fields: list[str], dtype: str, overwrite: bool, task: str | None
    ) -> None:
        ids = self._some(data)
        entry = write(len(ids), fields, ids=ids, dtype=dtype, overwrite=overwrite)
        entry = replace(entry, task=task)
        call = self.plane.produce("p", entry, soon())
        if not overwrite and self._conflicts(ids, fields, dtype, call):
            return
        self._wrote(ids, fields, entry, dtype, self.run(call).freed)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), tag=TAG)
    def set_tags(self, data: st.DataObject, tag: Any) -> None:
        ids = self._some(data)
        self.run(self.plane.set_tags("p", ids, [tag] * len(ids), soon()))
        for sample in ids:
            self.rows[sample].tags = dict(tag)

    @precondition(lambda self: self.model.last_id)
    @rule(fields=FIELDS)
    def write_late(self, fields: list[str]) -> None:
        stale = set(range(1, self.model.last_id + 1)) - set(self.rows)
        ids = sorted(stale)[:2] + sorted(self.rows)[:1]
        if not stale:
            return
        refusal = SampleNotFoundError if self.model.exists else PartitionNotFoundError
        with pytest.raises(refusal) as caught:
            self.run(self.plane.produce("p", write(len(ids), fields, ids=ids), soon()))
        if self.model.exists:
            assert caught.value.rows == tuple(sorted(stale)[:2])

    # Claiming

    @rule(asking=ASKING, size=st.sampled_from([0, 2, 3]), times=st.integers(1, 4), lease=LEASES)
    def claim(self, asking: Asking, size: int, times: int, lease: Lease) -> None:
        task, fields = asking
        count = times * max(size, 1)
        wanted = Wanted(task, list(fields), count, size, *lease)
        found = self.run(self.plane.claim("p", wanted, "me", soon()))
        self.model.reap(task)
        able = self.model.able(task, fields)
        groups: dict[str, list[int]] = {}
        for sample in able:
            group = self.rows[sample].group
            if group is not None:
                groups.setdefault(group, []).append(sample)
        whole = sum(len(ids) // size for ids in groups.values()) if size else 0
        if (len(able) if not size else whole * size) < count:
            ready = len(able) if not size else sum(map(len, groups.values()))
            self._too_few(found, task, ready, whole)
            return
        assert isinstance(found, Claimed)
        if not size:
            assert found.ids == able[:count]
        for first in range(0, count if size else 0, size or 1):
            part = found.ids[first : first + size]
            group = self.rows[part[0]].group
            assert group is not None
            assert part == groups[group][:size]
            del groups[group][:size]
        self._took(found, task, lease)

    @rule(asking=ASKING, count=st.integers(1, 4), lease=LEASES, early=st.booleans())
    def claim_that_is_cancelled(
        self, asking: Asking, count: int, lease: Lease, early: bool
    ) -> None:
        """It leaves nothing, also where it arrives behind its cancellation."""
        task, fields = asking
        wanted = Wanted(task, list(fields), count, 0, *lease)
        request = uuid.uuid4().hex
        arguments = self.plane._claim_arguments(wanted, "me") | {"count": count, "need": count}
        claim = self.plane._run_again("p", "claim", task, arguments, ClaimReply, soon(), request)
        undo = self.plane._undo("p", task, request)
        calls = (undo, claim) if early else (claim, undo)
        replies: list[Any] = [self.run(call) for call in calls]
        if early:
            assert replies[1].code == "cancelled"
            return
        self.model.reap(task)
        able = self.model.able(task, fields)
        assert (replies[0].code == "ok") == (len(able) >= count)
        if replies[0].code == "ok":
            assert replies[0].ids == able[:count]
            self.model.numbers += 1
            if lease[0]:  # a delivery that was counted and taken back
                for sample in able[:count]:
                    self.rows[sample].deliveries.setdefault(task, 0)

    @rule(
        task=st.sampled_from("tu"),
        draw=DRAWS,
        count=st.integers(1, 3),
        lease=LEASES,
        size=st.sampled_from([1, 2, 9]),
    )
    def draw(self, task: str, draw: str, count: int, lease: Lease, size: int) -> None:
        """Of so many rows a script."""
        wanted = Wanted(task, ["x"], count, 0, *lease, draw=draw)
        self.model.reap(task)
        before = self.model.recall(task, draw)
        with rows_per_claim(size):
            call = self.plane.claim("p", wanted, "me", soon())
            if self._drawn_before(call, before, task, draw, lease, one_script=count <= size):
                return
            able = self.model.able(task, "x")
            found = self.run(call)
        if len(able) < count:
            self._too_few(found, task, len(able), 0)
            return
        assert isinstance(found, Claimed)
        assert found.ids == able[:count]
        self._took(found, task, lease, draw, size)

    @rule(asking=ASKING, data=st.data(), lease=LEASES)
    def choose(self, asking: Asking, data: st.DataObject, lease: Lease) -> None:
        task, fields = asking
        wanted = Wanted(task, list(fields), 1, 0, *lease)
        able = self._ready(wanted)
        assert able is not None
        ids = st.sampled_from([*able, *able, 10**6, *self.rows])
        chosen = data.draw(st.lists(ids, max_size=4, unique=True))
        found = self.run(self.plane.claim_chosen("p", wanted, "me", chosen, soon()))
        taken = [sample for sample in chosen if sample not in able]
        if not self.model.exists:
            assert isinstance(found, NotEnough)
        elif taken or not chosen:
            assert found == Taken(taken)
        else:
            assert isinstance(found, Claimed)
            assert found.ids == chosen
            self._took(found, task, lease)

    @rule(
        data=st.data(),
        rank=st.sampled_from([0, 1]),
        lease=LEASES,
        size=st.sampled_from([1, 2, 9]),
    )
    def deal_out(self, data: st.DataObject, rank: int, lease: Lease, size: int) -> None:
        """Shares for two ranks; one that has its share, or will find it, gets no second one."""
        own, other = ("0:0", "1:0") if rank == 0 else ("1:0", "0:0")
        wanted = Wanted("t", ["x"], 1, 0, *lease, draw=own)
        able = self._ready(wanted)
        if able is None:
            call = self.plane.claim_chosen("p", wanted, "me", [], soon(), shares={})
            self.model.reap("t")
            before = self.model.recall("t", own)
            if not self._drawn_before(call, before, "t", own, lease, one_script=True):
                assert self.run(call) == Taken([])  # it is to be drawn anew
            return
        if len(able) < 2:
            return
        ids = st.lists(st.sampled_from(able), min_size=2, max_size=4, unique=True)
        chosen = data.draw(ids)
        cut = len(chosen) // 2
        shares = {own: chosen[:cut], other: chosen[cut:]}
        call = self.plane.claim_chosen("p", wanted, "me", chosen, soon(), shares=shares)
        with rows_per_claim(size):
            found = self.run(call)
        assert isinstance(found, Claimed)
        assert found.ids == chosen[:cut]
        self._took(found, "t", lease, own, size)
        if ("t", other) not in self.model.draws:
            leased, limit = lease[0] is not None, lease[1]
            self.model.keep_share(
                "t", chosen[cut:], leased=leased, limit=limit, draw=other, size=size
            )

    # Leases

    @precondition(lambda self: self.model.history)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        task, number, ids = self._part(data)
        lost = self.run(self.plane.ack("p", Claim(task, number), ids, soon()))
        assert lost == self.model.lost(task, number, ids)
        self.model.acknowledge(number, ids)

    @precondition(lambda self: self.model.history)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        task, number, ids = self._part(data)
        self.run(self.plane.release("p", Claim(task, number), ids, soon()))
        self.model.release(number, ids)

    @precondition(lambda self: self.model.history)
    @rule(data=st.data(), lease=st.sampled_from([None, 500.0]))
    def renew(self, data: st.DataObject, lease: float | None) -> None:
        task, number, _ = self._part(data)
        left = self.run(self.plane.renew("p", Claim(task, number), lease, soon()))
        claim = self.model.claims.get(number)
        assert left == (None if claim is None else lease or LEASE_S)
        if claim is not None and claim.due:
            claim.due = "later"

    @precondition(lambda self: any(claim.due for claim in self.model.claims.values()))
    @rule(data=st.data())
    def time_passes(self, data: st.DataObject) -> None:
        """A lease runs out; nobody has noticed yet."""
        running = sorted(n for n, claim in self.model.claims.items() if claim.due)
        number = data.draw(st.sampled_from(running))
        claim = self.model.claims[number]
        claim.due = "now"
        self.admin.zadd(f"{self.plane.keys.summary('p')}:leases:{claim.task}", {str(number): 1})

    @rule(task=st.sampled_from("tu"))
    def reset_consumption(self, task: str) -> None:
        call = self.plane.reset_consumption("p", task, soon())
        if not self.model.exists:
            with pytest.raises(PartitionNotFoundError):
                self.run(call)
            return
        assert self.run(call) == self.model.reset(task)

    # What is to come

    @rule(more=st.integers(-1, 8))
    def expect(self, more: int) -> None:
        samples = self.model.made + more
        call = self.plane.expect("p", max(0, samples), soon())
        self._reserved(1)
        if self.model.ended or 0 <= samples < self.model.made:
            with pytest.raises(PartitionEndedError):
                self.run(call)
            return
        self.run(call)
        self.model.exists = True
        self.model.expected = max(0, samples)

    @precondition(lambda self: self.model.made > 8)
    @rule()
    def end(self) -> None:
        self.run(self.plane.expect("p", None, soon()))
        self._reserved(1)
        self.model.exists = self.model.ended = True

    # Limits

    @precondition(lambda self: self.model.limits)
    @rule(limit=LIMITS)
    def change_limit(self, limit: Limit) -> None:
        self._limit(*limit)

    @precondition(lambda self: self.model.rooms)
    @rule(data=st.data())
    def dismiss(self, data: st.DataObject) -> None:
        put = data.draw(st.sampled_from(list(self.model.rooms)))

        async def give_up() -> None:
            self.plane.dismiss("p", put)
            await asyncio.gather(*self.plane._undoing)

        self.run(give_up())
        del self.model.rooms[put]

    # Losing and clearing

    @precondition(lambda self: self.model.used())
    @rule(data=st.data(), fields=FIELDS)
    def mark_lost(self, data: st.DataObject, fields: list[str]) -> None:
        """Some blocks are gone; a reader of some rows and fields has met that."""
        before = self.model.used()
        # As they were written: their names are random.
        names = st.sampled_from([name for name in self.model.writers if name in before])
        gone = data.draw(st.lists(names, min_size=1, max_size=3, unique=True))
        ids = [10**6, *self.rows] if data.draw(st.booleans()) else self._some(data)
        lost = self.run(self.plane.mark_lost("p", ids, fields, gone, soon()))
        assert (lost.cells, lost.tasks, lost.left) == self.model.lose(ids, fields, gone)
        assert sorted(lost.freed) == sorted(before - self.model.used())
        self.run(self.plane.forget_freed("p", lost.freed, soon()))

    @rule(data=st.data())
    def clear_samples(self, data: st.DataObject) -> None:
        ids = self._some(data) if self.rows else []
        before = self.model.used()
        freed = self.run(self.plane.clear_samples("p", [*ids, 10**6, *ids[:1]], soon()))
        for sample in ids:
            del self.rows[sample]
        assert sorted(freed) == sorted(before - self.model.used())
        self.run(self.plane.forget_freed("p", freed, soon()))

    @rule()
    def clear_partition(self) -> None:
        generations = self.run(self.plane.clear_partition("p", soon()))
        assert len(generations) == self.model.exists
        for generation in generations:
            trash = self.run(self.plane.trash("p", generation, soon()))
            assert sorted(trash) == sorted(self.model.used())
            self.run(self.plane.empty_trash("p", generation, soon()))
        self.model.forget()

    # What must hold

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "loop"):
            return
        assert self.run(self.plane.partitions(soon())) == (["p"] if self.model.exists else [])
        if not self.model.exists:
            return
        partition = Partition(self.admin, self.plane.keys.summary("p"))
        partition.check()
        assert {block["handle"] for block in partition.blocks.values()} == self.model.used()
        for task in "tu":
            evicted = self.model.evicted.get(task, [])
            assert self.run(self.plane.evicted("p", task, soon())) == sorted(evicted)
            assert partition.summary.get(f"evicted:{task}", "0") == str(len(evicted))
        found = self.run(self.plane.describe("p", soon(), task="t"))
        rows = [self.rows[sample] for sample in found.ids]
        assert found.ids == sorted(self.rows)
        assert found.keys == [row.key for row in rows]
        assert found.tags == [row.tags for row in rows]
        assert found.states == [row.state("t") for row in rows]
        for name, flags in found.produced.items():
            assert flags == [name in row.cells for row in rows]
            count = sum(flags)
            assert partition.summary.get(f"produced:{name}", "0") == str(count)
        for task in "tu":
            for state, counter in COUNTERS.items():
                count = self.model.count(task, state)
                assert partition.summary.get(f"{counter}:{task}", "0") == str(count)
            self._same_claims(TaskState(self.admin, self.plane.keys.summary("p"), task))

    def _same_claims(self, found: TaskState) -> None:
        claims = {n: each for n, each in self.model.claims.items() if each.task == found.task}
        assert {int(number) for number in found.claims} == claims.keys()
        assert {int(number) for number in found.leases} == {n for n in claims if claims[n].due}
        draws = {
            at[1]: [number for number, _ in parts]
            for at, parts in self.model.draws.items()
            if at[0] == found.task
        }
        made = {name: [int(n) for n in draw["claims"]] for name, draw in found.draws.items()}
        assert made == draws
        deliveries = {
            str(sample): row.deliveries[found.task]
            for sample, row in self.rows.items()
            if found.task in row.deliveries
        }
        assert found.deliveries == deliveries

    # Inner parts

    def _some(self, data: st.DataObject) -> list[int]:
        ids = st.sampled_from(sorted(self.rows))
        return data.draw(st.lists(ids, min_size=1, max_size=4, unique=True))

    def _reserved(self, count: int) -> None:
        self.model.last_id += count

    def _made(self, ids: list[int], groups: list[str] | None) -> None:
        last = self.model.last_id
        assert ids == list(range(last - len(ids) + 1, last + 1))
        self.model.made += len(ids)
        for i, sample in enumerate(ids):
            self.rows[sample] = Row(None, groups[i] if groups else None)

    def _limit(self, task: str, samples: int | None, evicts: bool) -> None:
        # Who makes room first where two tasks have to, Redis does not say.
        evicts = evicts and task == "t"
        self.run(self.plane.limit("p", task, samples, "evict" if evicts else "wait", soon()))
        self._reserved(samples is not None)
        self.model.limit(task, samples, evicts=evicts)

    def _room(self, count: int) -> str | None:
        """The name of a put that room is kept for, if there is any."""
        put = uuid.uuid4().hex
        before = self.model.used()
        call = self.plane.admit("p", put, count, 1000.0, soon())
        too_small = [samples < count for samples, _ in self.model.limits.values()]
        try:
            admission = self.run(call)
        except InputError:
            assert any(too_small)
            return None
        assert not all(too_small)
        self._admitted(admission, count, before)
        if admission.full is not None:
            return None
        self.model.rooms[put] = count
        return put

    def _admitted(self, admission: Admission, rows: int, before: set[str]) -> None:
        """Whether it is what the limits say. ``before``: the blocks in use."""
        over = self.model.excess(rows)
        assert admission.limited == bool(self.model.limits)
        lacking = {task for task in over if not self.model.limits[task][1]}
        if not lacking and over and not self.model.evict("t", over["t"]):
            lacking = {"t"}
        full = admission.full
        assert (full is not None) == bool(lacking)
        if full is not None:
            assert full.task in over
            assert full.limit == self.model.limits[full.task][0]
            assert full.unconsumed == self.model.unconsumed(full.task)
            assert full.held == self.model.count(full.task, "leased")
            assert (full.retry_s is not None) == bool(self.model.rooms)
        assert sorted(admission.freed) == sorted(before - self.model.used())
        self.run(self.plane.forget_freed("p", admission.freed, soon()))

    def _wrote(
        self, ids: list[int], fields: list[str], entry: Write, dtype: str, freed: list[str]
    ) -> None:
        before, name = self.model.used(), handle(entry)
        self.model.writers[name] = entry.task
        self.model.exists = True
        for sample in ids:
            self.rows[sample].cells |= dict.fromkeys(fields, (name, dtype))
        assert sorted(freed) == sorted(before - self.model.used())
        self.run(self.plane.forget_freed("p", freed, soon()))

    def _refused(self, new: int, call: Awaitable[Any], *, admitted: bool = False) -> bool:
        """Whether more samples are made than are to come, or without room where there are limits;
        if so, the write must be refused."""
        if self.model.refuses_new(new):
            refusal: type[Exception] = PartitionEndedError
        elif new and self.model.limits and not admitted:
            refusal = NotAdmittedError
        else:
            return False
        with pytest.raises(refusal):
            self.run(call)
        return True

    def _ready(self, wanted: Wanted) -> list[int] | None:
        """What a sampler sees; checked. None: the draw was made already."""
        ready, standing = self.run(self.plane.ready("p", wanted, "me", soon()))
        self.model.reap(wanted.task)
        drawn = (wanted.task, wanted.draw) in self.model.draws
        assert drawn == (ready is None)
        if ready is None:
            return None
        able = self.model.able(wanted.task, wanted.fields) if self.model.exists else []
        assert ready.ids == able
        assert ready.groups == [self.rows[sample].group for sample in able]
        assert ready.tags == [self.rows[sample].tags for sample in able]
        self._too_few(standing, wanted.task, len(able), 0)
        return able

    def _drawn_before(
        self,
        call: Awaitable[object],
        before: Any,
        task: str,
        draw: str,
        lease: Lease,
        *,
        one_script: bool,
    ) -> bool:
        """Whether the draw was made, or is forgotten only while it is read. Then whoever asks for
        it gets the same samples, or an error, or is to try again."""
        if before is None or before == 0 or (isinstance(before, int) and not one_script):
            return False
        if isinstance(before, int):
            assert self.run(call) == draws._CHANGED
            return True
        gone, lacking = before
        if gone or lacking:
            with pytest.raises(SampleNotFoundError if gone else NotReadyError) as caught:
                self.run(call)
            assert isinstance(caught.value, TQError)
            assert caught.value.rows == tuple(gone or lacking)
            return True
        found = self.run(call)
        assert isinstance(found, Claimed)
        leased, limit = lease[0] is not None, lease[1]
        parts = self.model.draws[task, draw]
        self.model.draw_again(task, draw, leased=leased, limit=limit)
        self._same_parts(found, task, lease, parts)
        return True

    def _same_parts(self, found: Claimed, task: str, lease: Lease, parts: list[Part]) -> None:
        assert found.ids == [sample for _, ids in parts for sample in ids]
        assert found.claims == [
            Claim(task, number) if lease[0] is not None else None
            for number, ids in parts
            for _ in ids
        ]

    def _too_few(self, found: object, task: str, ready: int, groups: int) -> None:
        assert isinstance(found, NotEnough)
        model = self.model
        assert (found.exists, found.ready, found.groups) == (model.exists, ready, groups)
        if model.exists:
            assert found.left == model.left(task)
            done = model.ended or (model.expected is not None and model.made >= model.expected)
            assert found.complete == done
        assert (found.retry_s is not None) == (model.exists and model.has_leases(task))

    def _took(
        self,
        found: Claimed,
        task: str,
        lease: Lease,
        draw: str | None = None,
        size: int | None = None,
    ) -> None:
        assert found.tags == [self.rows[sample].tags for sample in found.ids]
        leased, limit = lease[0] is not None, lease[1]
        parts = self.model.take(task, found.ids, leased=leased, limit=limit, draw=draw, size=size)
        self._same_parts(found, task, lease, parts)

    def _part(self, data: st.DataObject) -> tuple[str, int, list[int]]:
        """Some rows of a claim that was made at some time."""
        task, number, ids = data.draw(st.sampled_from(self.model.history))
        some = st.lists(st.sampled_from(ids), min_size=1, unique=True)
        return task, number, sorted(data.draw(st.just(ids) | some))

    def _conflicts(
        self, ids: Iterable[int], fields: list[str], dtype: str, call: Awaitable[Any]
    ) -> bool:
        """Whether the write changes a dtype; if so, it must be refused."""
        cells = [self.rows[sample].cells.get(name) for sample in ids for name in fields]
        if all(cell is None or cell[1] == dtype for cell in cells):
            return False
        with pytest.raises(SchemaConflictError) as caught:
            self.run(call)
        (name,) = caught.value.fields
        assert name in fields
        assert self.rows[caught.value.rows[0]].cells[name][1] != dtype
        return True


class LimitsMachine(PartitionMachine):
    """With limits from the start, and fewer rules, so that puts meet them."""

    vars().update(
        dict.fromkeys(
            [
                "open",
                "upsert",
                "add",
                "set_tags",
                "write_late",
                "claim_that_is_cancelled",
                "draw",
                "choose",
                "deal_out",
                "renew",
                "reset_consumption",
                "expect",
                "end",
                "mark_lost",
                "clear_partition",
            ]
        )
    )

    @initialize(twice=st.booleans(), limits=st.lists(LIMITS, min_size=1, max_size=2))
    def open_with(self, twice: bool, limits: list[Limit]) -> None:
        self._open(twice)
        for limit in limits:
            self._limit(*limit)


@pytest.mark.parametrize("machine", [PartitionMachine, LimitsMachine])
def test_any_sequence_of_calls(redis_url: str, machine: type[PartitionMachine]) -> None:
    machine.url = redis_url
    every_check: Any = HealthCheck
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=80,
            stateful_step_count=25,
            suppress_health_check=list(every_check),
        ),
    )
