"""A plain Python model of one partition: what every call must do to it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass
class Row:
    """A sample: its cells by field, (handle, dtype); by task, its record and its deliveries."""

    key: str | None
    group: str | None
    cells: dict[str, tuple[str, str]] = field(default_factory=dict)
    tags: dict[str, int] = field(default_factory=dict)
    records: dict[str, tuple[str, int]] = field(default_factory=dict)
    deliveries: dict[str, int] = field(default_factory=dict)

    def state(self, task: str) -> str:
        return self.records.get(task, ("open", 0))[0]


Part = tuple[int, list[int]]


@dataclass
class OpenClaim:
    """``due``: when its lease runs out; None: it has none. ``waits``: it is a share that its rank
    has not asked for yet."""

    task: str
    ids: list[int]
    rows: int
    limit: int
    draw: str | None
    due: str | None
    waits: bool = False


class Model:
    """One partition.

    Attributes:
        writers: of every block, by handle, the task that wrote it, if one is known.
        claims: the open ones by number.
        draws: by task and name, (claim number, ids) of each part.
        history: (task, claim number, ids) of every leased claim that a consumer got.
        limits: by task, how many samples it may leave unconsumed, and whether the oldest make room.
        rooms: by put, how many rows room is kept for.
        evicted: by task, what made room.
    """

    def __init__(self) -> None:
        self.last_id = 0
        self.rows: dict[int, Row] = {}
        self.writers: dict[str, str | None] = {}
        self.forget()

    def forget(self) -> None:
        """The partition is cleared."""
        self.rows.clear()
        self.exists = False
        self.made = 0
        self.expected: int | None = None
        self.ended = False
        self.numbers = 0
        self.claims: dict[int, OpenClaim] = {}
        self.draws: dict[tuple[str, str], list[Part]] = {}
        self.history: list[tuple[str, int, list[int]]] = []
        self.limits: dict[str, tuple[int, bool]] = {}
        self.rooms: dict[str, int] = {}
        self.evicted: dict[str, list[int]] = {}

    # Reading

    def used(self) -> set[str]:
        """Handles of blocks with a cell in use."""
        return {name for row in self.rows.values() for name, _ in row.cells.values()}

    def able(self, task: str, fields: Iterable[str]) -> list[int]:
        """What the task may claim."""
        return [
            sample
            for sample, row in sorted(self.rows.items())
            if task not in row.records and set(fields) <= set(row.cells)
        ]

    def count(self, task: str, state: str) -> int:
        return sum(row.state(task) == state for row in self.rows.values())

    def left(self, task: str) -> int | None:
        """Samples that the task can still get; None: nobody said how many there will be."""
        still = self.count(task, "open") + self.count(task, "leased")
        if self.ended:
            return still
        return None if self.expected is None else still + max(0, self.expected - self.made)

    def has_leases(self, task: str) -> bool:
        return any(each.task == task and each.due for each in self.claims.values())

    def refuses_new(self, count: int) -> bool:
        """Whether so many new rows are more than are to come."""
        too_many = self.expected is not None and self.made + count > self.expected
        return count > 0 and (self.ended or too_many)

    # Limits

    def unconsumed(self, task: str) -> int:
        return self.count(task, "open") + self.count(task, "leased")

    def limit(self, task: str, samples: int | None, *, evicts: bool) -> None:
        if samples is not None:
            self.exists = True
            self.limits[task] = samples, evicts
            return
        self.limits.pop(task, None)
        if not self.limits:
            self.rooms.clear()

    def excess(self, rows: int) -> dict[str, int]:
        """By task that is over its limit with so many new rows, by how many."""
        kept = sum(self.rooms.values())
        more = {
            task: self.unconsumed(task) + kept + rows - samples
            for task, (samples, _) in self.limits.items()
        }
        return {task: count for task, count in more.items() if count > 0}

    def evict(self, task: str, count: int) -> bool:
        """Drop the oldest rows that the task has not claimed, in whole groups, if there are so
        many."""
        rows = self.able(task, ())
        if len(rows) < count:
            return False
        gone: list[int] = []
        for sample in rows:
            if len(gone) >= count:
                break
            group = self.rows[sample].group
            if sample not in gone:
                gone += [i for i in rows if i == sample or (group and self.rows[i].group == group)]
        for sample in gone:
            del self.rows[sample]
        self.evicted.setdefault(task, []).extend(gone)
        return True

    # Claims

    def take(
        self,
        task: str,
        ids: Sequence[int],
        *,
        leased: bool,
        limit: int,
        draw: str | None = None,
        size: int | None = None,
    ) -> list[Part]:
        """Claims of ``size`` rows each, if it is given."""
        parts = self._number(ids, size)
        if draw is not None:
            self.draws[task, draw] = parts
        for number, rows in parts:
            if leased:
                self._hold(number, OpenClaim(task, rows, len(rows), limit, draw, "later"))
                self._deliver(number)
            else:
                self._record(task, rows, "consumed", number)
        return parts

    def keep_share(
        self, task: str, ids: Sequence[int], *, leased: bool, limit: int, draw: str, size: int
    ) -> None:
        """A part of what another rank drew, until its rank asks for it or its lease runs out."""
        self.draws[task, draw] = self._number(ids, size)
        due = "later" if leased else None
        for number, rows in self.draws[task, draw]:
            self._hold(number, OpenClaim(task, rows, len(rows), limit, draw, due, waits=True))

    def draw_again(self, task: str, name: str, *, leased: bool, limit: int) -> None:
        for number, ids in self.draws[task, name]:
            claim = self.claims.get(number)
            if claim is not None and claim.waits and leased:
                claim.due, claim.limit, claim.waits = "later", limit, False
                self._deliver(number)
            elif claim is not None and claim.waits:
                self._record(task, ids, "consumed", number)
                del self.claims[number]

    def held(self, number: int, ids: Collection[int]) -> list[int]:
        """Of ``ids``, those that an open claim holds."""
        if number not in self.claims:
            return []
        task = self.claims[number].task
        return [i for i in ids if i in self.rows and self._is(i, task, "leased", number)]

    def lost(self, task: str, number: int, ids: Collection[int]) -> list[int]:
        """What an acknowledgement of ``ids`` must report."""
        mine = self.held(number, ids)
        there = [i for i in ids if i in self.rows and i not in mine]
        return [i for i in there if not self._is(i, task, "consumed", number)]

    def acknowledge(self, number: int, ids: Sequence[int]) -> None:
        if number in self.claims:
            task = self.claims[number].task
            mine = self.held(number, ids)
            self._record(task, mine, "consumed", number)
            for sample in mine:
                self.rows[sample].deliveries.pop(task, None)
            self._shrink(number, len(mine))

    def release(self, number: int, ids: Sequence[int]) -> None:
        mine = self.held(number, ids)
        if mine:
            self._return(number, mine)
            self._forget_draw(number)
            self.claims[number].draw = None
            self._shrink(number, len(mine))

    def reap(self, task: str) -> None:
        """Claims whose lease has run out end when somebody asks for samples."""
        due = [n for n, each in self.claims.items() if each.task == task and each.due == "now"]
        for number in due:
            self._return(number, self.held(number, self.claims[number].ids))
            self._forget_draw(number)
            del self.claims[number]

    def reset(self, task: str) -> int:
        """How many rows come back."""
        taken = [row for row in self.rows.values() if task in row.records]
        for row in self.rows.values():
            row.records.pop(task, None)
            row.deliveries.pop(task, None)
        self.claims = {n: each for n, each in self.claims.items() if each.task != task}
        self.draws = {at: draw for at, draw in self.draws.items() if at[0] != task}
        return len(taken)

    def recall(self, task: str, name: str) -> tuple[list[int], list[int]] | int | None:
        """What becomes of who asks for a draw, part by part: rows that are gone, and rows without
        the field x; or the place of a part that its task is to work on again, so that the draw is
        forgotten; None: there is no such draw."""
        parts = self.draws.get((task, name))
        for place, (number, ids) in enumerate(parts or []):
            there = [sample for sample in ids if sample in self.rows]
            states = ("leased", "consumed")
            if any(not any(self._is(i, task, s, number) for s in states) for i in there):
                del self.draws[task, name]
                return place
            gone = [sample for sample in ids if sample not in self.rows]
            lacking = [sample for sample in there if "x" not in self.rows[sample].cells]
            if gone or lacking:
                return gone, lacking
        return None if parts is None else ([], [])

    # Losing

    def lose(
        self, ids: Iterable[int], fields: Collection[str], handles: Collection[str]
    ) -> tuple[dict[str, list[int]], dict[str, list[int]], list[int]]:
        """Cells by field that are not produced any more, by task the rows to work on again, and
        rows with cells that no task will write again."""
        cells: dict[str, list[int]] = {}
        tasks: dict[str, list[int]] = {}
        left: list[int] = []
        for sample in sorted(i for i in ids if i in self.rows):
            row = self.rows[sample]
            lost = [n for n in fields if n in row.cells and row.cells[n][0] in handles]
            writers = {self.writers[row.cells[name][0]] for name in lost}
            for name in lost:
                del row.cells[name]
                cells.setdefault(name, []).append(sample)
            able = {task for task in writers if task and self._work_again(sample, task)}
            for task in able:
                tasks.setdefault(task, []).append(sample)
            left += [sample] if writers - able else []
        return cells, tasks, left

    def _work_again(self, sample: int, task: str) -> bool:
        """Whether the task may."""
        state, number = self.rows[sample].records.get(task, ("open", 0))
        claim = self.claims.get(number)
        waits_for_its_rank = claim is not None and claim.waits
        if state in ("leased", "consumed") and not waits_for_its_rank:
            del self.rows[sample].records[task]
            if claim is not None:
                self._forget_draw(number)
                claim.draw = None
                self._shrink(number, state == "leased")
        return state != "aside"

    # Inner parts

    def _number(self, ids: Sequence[int], size: int | None) -> list[Part]:
        step = size or len(ids)
        first = self.numbers + 1
        parts = [list(ids[start : start + step]) for start in range(0, len(ids), step)]
        self.numbers += len(parts)
        return list(enumerate(parts, start=first))

    def _is(self, sample: int, task: str, state: str, number: int) -> bool:
        return self.rows[sample].records.get(task) == (state, number)

    def _record(self, task: str, ids: Iterable[int], state: str, number: int) -> None:
        for sample in ids:
            self.rows[sample].records[task] = (state, number)

    def _hold(self, number: int, claim: OpenClaim) -> None:
        self.claims[number] = claim
        self._record(claim.task, claim.ids, "leased", number)

    def _deliver(self, number: int) -> None:
        """A consumer has the claim."""
        task, ids = self.claims[number].task, self.claims[number].ids
        self.history.append((task, number, ids))
        for sample in ids:
            counts = self.rows[sample].deliveries
            counts[task] = counts.get(task, 0) + 1

    def _return(self, number: int, ids: Iterable[int]) -> None:
        claim = self.claims[number]
        for sample in ids:
            row = self.rows[sample]
            del row.records[claim.task]
            if not claim.waits and row.deliveries.get(claim.task, 0) >= claim.limit:
                row.records[claim.task] = ("aside", number)

    def _forget_draw(self, number: int) -> None:
        at = (self.claims[number].task, self.claims[number].draw or "")
        if any(other == number for other, _ in self.draws.get(at, [])):
            del self.draws[at]

    def _shrink(self, number: int, rows: int) -> None:
        self.claims[number].rows -= rows
        if self.claims[number].rows <= 0:
            del self.claims[number]
