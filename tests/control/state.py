"""What must hold for the keys of a partition at any time, computed from the keys themselves."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

import redis
from redis.crc import key_slot

from tq_redis.control.ranges import from_ranges

Admin = redis.Redis

# State of a record -> the summary's counter.
COUNTERS = {"leased": "claimed", "consumed": "consumed", "aside": "set_aside"}


def dump(admin: Admin, namespace: str) -> dict[str, Any]:
    """The content of the namespace, but for replies, lifetimes and the next id."""
    readers: dict[Any, Any] = {
        "string": admin.get,
        "hash": admin.hgetall,
        "set": admin.smembers,
        "zset": lambda key: admin.zrange(key, 0, -1, withscores=True),
        "stream": admin.xrange,
    }
    found = {
        key: readers[admin.type(key)](key)
        for key in admin.scan_iter(f"tq:{namespace}:*", count=1000)
        if ":req:" not in key and not key.endswith((":next_sample", ":counted_by"))
    }
    for value in found.values():
        if isinstance(value, dict):
            value.pop("expires_at", None)
    return found


class TaskState:
    """What a task has taken of a partition, and its open claims, read raw.

    Args:
        key: of the partition's summary.
        task: as it stands in keys.
    """

    def __init__(self, admin: Any, key: str, task: str) -> None:
        def read(name: str) -> dict[str, str]:
            return admin.hgetall(f"{key}:{name}:{task}")

        self.task = task
        self.summary: dict[str, str] = admin.hgetall(key)
        self.records = {sample: text.split(":", 2) for sample, text in read("task").items()}
        self.claims = {number: json.loads(text) for number, text in read("claims").items()}
        self.leases = dict(admin.zrange(f"{key}:leases:{task}", 0, -1, withscores=True))
        self.deliveries = {sample: int(count) for sample, count in read("deliveries").items()}
        self.draws = {name: json.loads(text) for name, text in read("draws").items()}
        self.drawn = {number: json.loads(text) for number, text in read("drawn").items()}
        self.making = {name: json.loads(text) for name, text in read("making").items()}

    def in_state(self, state: str) -> set[str]:
        return {sample for sample, (found, _, _) in self.records.items() if found == state}

    def check(self, samples: set[str]) -> None:
        """Fail where two keys contradict each other; ``samples`` are those of the partition."""
        assert self.records.keys() <= samples
        assert {state for state, _, _ in self.records.values()} <= COUNTERS.keys()
        for state, counter in COUNTERS.items():
            count = int(self.summary.get(f"{counter}:{self.task}", 0))
            assert count == len(self.in_state(state)), counter
        numbers = {int(number) for _, number, _ in self.records.values()}
        assert max(numbers, default=0) <= int(self.summary.get("claims", 0))
        for number, claim in self.claims.items():
            self._check_claim(number, claim, samples)
        self._check_held()
        self._check_draws()

    def _check_claim(self, number: str, claim: dict[str, Any], samples: set[str]) -> None:
        ids = set(map(str, from_ranges(claim["ids"])))
        held = {
            sample for sample, record in self.records.items() if record[:2] == ["leased", number]
        }
        assert held <= ids
        assert claim["rows"] > 0
        assert len(held) <= claim["rows"] <= len(held) + len(ids - samples)
        if number not in self.leases:  # its rank has not asked for the share yet, but can
            assert claim["waits"]
            assert number in self.draws[claim["draw"]]["claims"]

    def _check_draws(self) -> None:
        made = [number for draw in self.draws.values() for number in draw["claims"]]
        begun = [
            number
            for making in self.making.values()
            for numbers in making["shares"].values()
            for number in numbers
        ]
        assert sorted(self.drawn) == sorted(made + begun)
        assert set(begun) <= self.leases.keys()
        for name, draw in self.draws.items():
            for number in draw["claims"]:
                claim = self.claims.get(number)
                assert claim is None or (claim["draw"], claim["ids"]) == (name, self.drawn[number])
                assert not draw.get("waits") or (claim and claim["waits"])

    def _check_held(self) -> None:
        assert self.leases.keys() <= self.claims.keys()
        for sample in self.in_state("leased"):
            _, number, consumer = self.records[sample]
            assert self.claims[number]["consumer"] == consumer
            assert "waits" in self.claims[number] or self.deliveries[sample] > 0
        for sample in self.in_state("aside"):
            assert self.deliveries[sample] > 0
        assert all(count >= 0 for count in self.deliveries.values())


class Partition:
    """One partition's keys, read raw.

    Args:
        key: of its summary.
    """

    def __init__(self, admin: Admin, key: str) -> None:
        self._admin: Any = admin  # its types allow bytes, which this connection decodes
        self._key = key
        self.summary: dict[str, str] = self._admin.hgetall(key)
        self.ids: list[str] = self._admin.zrange(f"{key}:samples", 0, -1)
        names: list[str] = self._admin.hkeys(f"{key}:schema")
        self.fields = {name: self._hash("field", name) for name in names}
        self.blocks = {n: json.loads(text) for n, text in self._hash("blocks").items()}
        self.groups = self._hash("group")

    def check(self) -> None:
        """Fail where two keys contradict each other."""
        self._check_counters()
        self._check_blocks()
        indexes = {name: json.loads(text) for name, text in self._hash("indexes").items()}
        for task in {index["task"] for index in indexes.values()}:
            TaskState(self._admin, self._key, task).check(set(self.ids))
        for name, index in indexes.items():
            self._check_index(name, index)
        self._check_names()
        self._check_lifetimes()

    def _hash(self, *suffix: str) -> dict[str, str]:
        return self._admin.hgetall(":".join((self._key, *suffix)))

    def _zset(self, *suffix: str) -> dict[str, float]:
        return dict(self._admin.zrange(":".join((self._key, *suffix)), 0, -1, withscores=True))

    def _check_counters(self) -> None:
        assert int(self.summary["samples"]) == len(self.ids)
        assert int(self.summary["bytes"]) == sum(block["bytes"] for block in self.blocks.values())
        for name, cells in self.fields.items():
            assert set(cells) <= set(self.ids)
            assert int(self.summary.get(f"produced:{name}", 0)) == len(cells), name

    def _check_blocks(self) -> None:
        used = Counter(
            cell.split("@")[0] for cells in self.fields.values() for cell in cells.values()
        )
        live = self._hash("live")
        live.pop("next", None)
        assert {number: int(cells) for number, cells in live.items()} == used
        assert self.blocks.keys() == used.keys()
        freed = self._zset("freed")
        assert freed.keys().isdisjoint(block["handle"] for block in self.blocks.values())

    def _check_index(self, name: str, index: dict[str, Any]) -> None:
        taken = self._hash("task", index["task"])
        able = [
            sample
            for sample in self.ids
            if sample not in taken
            and all(sample in self.fields.get(field, ()) for field in index["fields"])
            and (not index["group_size"] or sample in self.groups)
        ]
        entries = self._zset("ready", name)
        ready = sorted(int(entry.rpartition(":")[2]) for entry in entries)
        if index["done"]:
            assert ready == [int(sample) for sample in able]
        else:
            assert set(ready) <= set(map(int, able))
            assert {int(sample) for sample in able if int(sample) <= index["built"]} <= set(ready)
        if index["group_size"]:
            self._check_groups(name, index["group_size"], list(entries), ready)
        else:
            assert entries == {str(sample): float(sample) for sample in ready}

    def _check_groups(self, name: str, size: int, entries: list[str], ready: list[int]) -> None:
        members: dict[str, list[int]] = {}
        for sample in ready:
            members.setdefault(self.groups[str(sample)], []).append(sample)
        assert entries == sorted(
            f"{group}:{sample:016d}" for group, ids in members.items() for sample in ids
        )
        counts = {group: int(count) for group, count in self._hash("ready", name, "count").items()}
        assert counts.pop(":whole", 0) == sum(len(ids) // size for ids in members.values())
        assert counts == {group: len(ids) for group, ids in members.items()}
        assert self._zset("ready", name, "groups") == {
            group: float(ids[0]) for group, ids in members.items() if len(ids) >= size
        }

    def _check_names(self) -> None:
        keys = self._hash("keys")
        assert {sample: key for key, sample in keys.items()} == self._hash("key_of")
        assert set(keys.values()) <= set(self.ids)
        assert set(self.groups) <= set(self.ids)
        for name in self._admin.smembers(f"{self._key}:tagnames"):
            assert set(self._hash("tag", name)) <= set(self.ids)

    def _check_lifetimes(self) -> None:
        expires_at = int(self.summary["expires_at"])
        for key in self._admin.scan_iter(count=1000):
            if key != self._key and not key.startswith(f"{self._key}:"):
                continue
            assert key_slot(key.encode()) == key_slot(self._key.encode())
            left = self._admin.pttl(key) / 1000
            assert left > 0, f"{key} has no lifetime"
            if ":req:" not in key and ":trash" not in key:
                assert abs(time.time() + left - expires_at) < 1.5, f"{key} expires apart"
