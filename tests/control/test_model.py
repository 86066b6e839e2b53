"""Random calls against a plain Python model of one partition."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
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
from tests.control.state import Admin, Partition
from tq_redis.config import RedisConfig
from tq_redis.control.connection import RedisConnection
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Claimed, NotEnough
from tq_redis.errors import PartitionNotFoundError, SampleNotFoundError, SchemaConflictError

T = TypeVar("T")

FIELDS = st.lists(st.sampled_from("xyz"), min_size=1, max_size=3, unique=True)
KEYS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True)
DTYPES = st.sampled_from(["float32"] * 6 + ["int64"])
TAG = st.dictionaries(st.sampled_from(["s", "t"]), st.integers(0, 3), max_size=2)
ASKING = st.sampled_from([("t", ""), ("t", "x"), ("t", "xy"), ("u", "yx"), ("u", "z")])


@dataclass
class Row:
    """A sample: its cells by field, (handle, dtype)."""

    key: str | None
    group: str | None
    cells: dict[str, tuple[str, str]] = field(default_factory=dict)
    tags: dict[str, int] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)


class PartitionMachine(RuleBasedStateMachine):
    """The control plane and the model, side by side."""

    url: ClassVar[str]

    @initialize()
    def open(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.admin: Admin = redis.Redis.from_url(self.url, decode_responses=True)
        self.connection = RedisConnection(self.url, RedisConfig())
        self.plane = ControlPlane(self.connection, f"model-{uuid.uuid4().hex}", 1000)
        self.rows: dict[int, Row] = {}
        self.exists = False
        self.last_id = 0

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.run(check_and_clear(self.plane, self.admin))
        self.run(self.connection.close())
        self.admin.close()
        self.loop.close()

    def run(self, call: Awaitable[T]) -> T:
        return self.loop.run_until_complete(call)

    # Writing

    @rule(count=st.integers(1, 6), fields=FIELDS, groups=st.none() | st.text("gh", min_size=6))
    def put(self, count: int, fields: list[str], groups: str | None) -> None:
        names = None if groups is None else list(groups[:count])
        entry = write(count, fields, groups=names)
        written = self.run(self.plane.produce("p", entry, soon()))
        self._reserved(count)
        assert written.ids == list(range(self.last_id - count + 1, self.last_id + 1))
        for i, sample in enumerate(written.ids):
            self.rows[sample] = Row(None, names[i] if names else None)
        self._wrote(written.ids, fields, handle(entry), "float32", written.freed)

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
        if self._conflicts(known.values(), fields, dtype, call):
            return
        written = self.run(call)
        new = iter(range(self.last_id - len(keys) + 1, self.last_id + 1))
        expected = [known.get(key) or next(new) for key in keys]
        assert written.ids == expected
        for key, sample in zip(keys, expected, strict=True):
            self.rows.setdefault(sample, Row(key, group)).tags.update(tag)
        self._wrote(expected, fields, handle(entry), dtype, written.freed)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), fields=FIELDS, dtype=DTYPES, overwrite=st.booleans())
    def add(self, data: st.DataObject, fields: list[str], dtype: str, overwrite: bool) -> None:
        ids = self._some(data)
        entry = write(len(ids), fields, ids=ids, dtype=dtype, overwrite=overwrite)
        call = self.plane.produce("p", entry, soon())
        if not overwrite and self._conflicts(ids, fields, dtype, call):
            return
        self._wrote(ids, fields, handle(entry), dtype, self.run(call).freed)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), tag=TAG)
    def set_tags(self, data: st.DataObject, tag: Any) -> None:
        ids = self._some(data)
        self.run(self.plane.set_tags("p", ids, [tag] * len(ids), soon()))
        for sample in ids:
            self.rows[sample].tags = dict(tag)

    @precondition(lambda self: self.last_id)
    @rule(fields=FIELDS)
    def write_late(self, fields: list[str]) -> None:
        stale = set(range(1, self.last_id + 1)) - set(self.rows)
        ids = sorted(stale)[:2] + sorted(self.rows)[:1]
        if not stale:
            return
        refusal = SampleNotFoundError if self.exists else PartitionNotFoundError
        with pytest.raises(refusal) as caught:
            self.run(self.plane.produce("p", write(len(ids), fields, ids=ids), soon()))
        if self.exists:
            assert caught.value.rows == tuple(sorted(stale)[:2])

    # Claiming

    @rule(asking=ASKING, size=st.sampled_from([0, 2, 3]), times=st.integers(1, 4))
    def claim(self, asking: tuple[str, str], size: int, times: int) -> None:
        task, fields = asking
        count = times * max(size, 1)
        able = [
            sample
            for sample, row in sorted(self.rows.items())
            if task not in row.taken and set(fields) <= set(row.cells)
        ]
        groups: dict[str, list[int]] = {}
        for sample in able:
            group = self.rows[sample].group
            if group is not None:
                groups.setdefault(group, []).append(sample)
        call = self.plane.claim("p", task, list(fields), count, "me", soon(), group_size=size)
        found = self.run(call)
        whole = sum(len(ids) // size for ids in groups.values()) if size else 0
        if (len(able) if not size else whole * size) < count:
            ready = len(able) if not size else sum(map(len, groups.values()))
            assert isinstance(found, NotEnough)
            assert (found.exists, found.ready, found.groups) == (self.exists, ready, whole)
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
        assert found.tags == [self.rows[sample].tags for sample in found.ids]
        for sample in found.ids:
            self.rows[sample].taken.add(task)

    # Clearing

    @rule(data=st.data())
    def clear_samples(self, data: st.DataObject) -> None:
        ids = self._some(data) if self.rows else []
        before = self._used()
        freed = self.run(self.plane.clear_samples("p", [*ids, 10**6, *ids[:1]], soon()))
        for sample in ids:
            del self.rows[sample]
        assert sorted(freed) == sorted(before - self._used())
        self.run(self.plane.forget_freed("p", freed, soon()))

    @rule()
    def clear_partition(self) -> None:
        generations = self.run(self.plane.clear_partition("p", soon()))
        assert len(generations) == self.exists
        for generation in generations:
            trash = self.run(self.plane.trash("p", generation, soon()))
            assert sorted(trash) == sorted(self._used())
            self.run(self.plane.empty_trash("p", generation, soon()))
        self.rows.clear()
        self.exists = False

    # What must hold

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "loop"):
            return
        assert self.run(self.plane.partitions(soon())) == (["p"] if self.exists else [])
        if not self.exists:
            return
        partition = Partition(self.admin, self.plane.keys.summary("p"))
        partition.check()
        assert {block["handle"] for block in partition.blocks.values()} == self._used()
        found = self.run(self.plane.describe("p", soon(), task="t"))
        rows = [self.rows[sample] for sample in found.ids]
        assert found.ids == sorted(self.rows)
        assert found.keys == [row.key for row in rows]
        assert found.tags == [row.tags for row in rows]
        assert found.consumed == ["t" in row.taken for row in rows]
        for name, flags in found.produced.items():
            assert flags == [name in row.cells for row in rows]
            count = sum(flags)
            assert partition.summary.get(f"produced:{name}", "0") == str(count)
        for task in "tu":
            consumed = sum(task in row.taken for row in rows)
            assert partition.summary.get(f"consumed:{task}", "0") == str(consumed)

    # Inner parts

    def _some(self, data: st.DataObject) -> list[int]:
        ids = st.sampled_from(sorted(self.rows))
        return data.draw(st.lists(ids, min_size=1, max_size=4, unique=True))

    def _reserved(self, count: int) -> None:
        self.last_id += count

    def _used(self) -> set[str]:
        return {name for row in self.rows.values() for name, _ in row.cells.values()}

    def _wrote(
        self, ids: list[int], fields: list[str], name: str, dtype: str, freed: list[str]
    ) -> None:
        before = self._used()
        self.exists = True
        for sample in ids:
            self.rows[sample].cells |= dict.fromkeys(fields, (name, dtype))
        assert sorted(freed) == sorted(before - self._used())
        self.run(self.plane.forget_freed("p", freed, soon()))

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


def test_any_sequence_of_calls(redis_url: str) -> None:
    PartitionMachine.url = redis_url
    every_check: Any = HealthCheck
    run_state_machine_as_test(
        PartitionMachine,
        settings=settings(
            max_examples=80,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(every_check),
        ),
    )
