"""What goes into a call of the control plane and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from tq_redis.errors import InputError, shorten
from tq_redis.metadata.claim import Claim
from tq_redis.metadata.schema import FieldSchema

Tags = Mapping[str, Any]

# What a task did with a sample. ``aside``: delivered too often and never acknowledged.
State = Literal["open", "leased", "consumed", "aside"]

# (handle, first row inside the block, number of rows)
Run = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """A block that a put wrote, as it is recorded.

    Attributes:
        handle: the data plane's name for it.
        nbytes: the size of all of it in bytes.
        first_row: the first row of the write that it holds.
        rows: how many rows of the write it holds.
        dtypes: field -> dtype (empty for non-tensor values), for every field it holds.
        offset: the first of these rows inside the block.
        number: its number in the partition, if an earlier step of the put has named it; else 0.
    """

    handle: str
    nbytes: int
    first_row: int
    rows: int
    dtypes: Mapping[str, str]
    offset: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class Write:
    """The rows of one produce call and what is written of them.

    Either ``ids`` names existing rows, or ``count`` new ones are made (with ``keys``: rows are
    found by key, and made where the key is new).

    Attributes:
        count: number of rows.
        ids: sample ids, distinct.
        keys: a user key per row, distinct.
        groups: a group per new row; rows that exist keep theirs.
        tags: per row, merged into the tags that it has.
        blocks: where the bytes are. Together they cover every row of each field.
        schema: the form of each field.
        overwrite: a field may change its dtype.
        first_id: the first of ``count`` ids that were reserved for new rows; None: reserve them.
        task: who wrote the blocks, and can do it again; None: that is not known.
        admission: under which name room is kept for the rows, where tasks have limits.

    Raises:
        InputError: a sample or a key is named twice.
    """

    count: int
    ids: Sequence[int] | None = None
    keys: Sequence[str] | None = None
    groups: Sequence[str] | None = None
    tags: Sequence[Tags] | None = None
    blocks: Sequence[BlockEntry] = ()
    schema: Mapping[str, FieldSchema] = field(default_factory=dict[str, FieldSchema])
    overwrite: bool = False
    first_id: int | None = None
    task: str | None = None
    admission: str | None = None

    def __post_init__(self) -> None:
        _require_distinct("Samples", self.ids or ())
        _require_distinct("Keys", self.keys or ())

    def within(self, admission: str | None) -> Write:
        """It with the room that is kept for it."""
        return self if admission is None else replace(self, admission=admission)

    def part(self, first: int, stop: int) -> Write:
        """These rows of it, without blocks."""
        rows = slice(first, stop)
        return replace(
            self,
            count=stop - first,
            ids=self.ids and self.ids[rows],
            keys=self.keys and self.keys[rows],
            groups=self.groups and self.groups[rows],
            tags=self.tags and self.tags[rows],
            blocks=(),
            first_id=None if self.first_id is None else self.first_id + first,
        )


@dataclass(frozen=True, slots=True)
class Written:
    """What a produce call did.

    Attributes:
        ids: the rows' sample ids, in the order of the put.
        numbers: the number of each block in the partition.
        freed: handles of blocks without a used cell: their bytes are to be freed.
    """

    ids: list[int]
    numbers: list[int]
    freed: list[str]


@dataclass(frozen=True, slots=True)
class Lost:
    """What became of rows whose bytes are gone.

    Attributes:
        cells: field -> the rows that are not produced any more, ascending.
        tasks: task -> those of them that it wrote and may claim again, ascending.
        left: rows with cells that no task will write again, ascending: they were put without a
            task, or the rows are set aside for it.
        freed: handles of blocks without a used cell: their bytes are to be freed.
    """

    cells: dict[str, list[int]]
    tasks: dict[str, list[int]]
    left: list[int]
    freed: list[str]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a consumer asks for.

    Attributes:
        task: who consumes.
        fields: the fields that it reads.
        count: how many samples.
        group_size: samples of one group that are taken together; ``count`` is a multiple of it.
            0: single samples.
        lease_s: seconds after which the samples return unless they are acknowledged; None: they
            are consumed at once.
        max_deliveries: leased deliveries after which a sample is set aside.
        draw: a name under which the claim is remembered: whoever asks for it again gets the same
            samples.
        whole: what the draws are called that are made together; None: it is made alone.
        waiter: a name for this call while it waits, and how many seconds it will; None: it does
            not.
    """

    task: str
    fields: Sequence[str]
    count: int
    group_size: int = 0
    lease_s: float | None = None
    max_deliveries: int = 5
    draw: str | None = None
    whole: str | None = None
    waiter: tuple[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Claimed:
    """Samples that a task got.

    Attributes:
        ids: sample ids, ascending, or group by group, or as a sampler chose them.
        schema: the form of each field asked for.
        tags: one dict per row.
        claims: per row the claim that holds it, None where none does (there is no lease).
        parts: the number of each claim that was made, with and without a lease, and its samples.
    """

    ids: list[int]
    schema: dict[str, FieldSchema]
    tags: list[dict[str, Any]]
    claims: list[Claim | None]
    parts: list[tuple[int, list[int]]]


@dataclass(frozen=True, slots=True)
class NotEnough:
    """Fewer samples can be claimed than were asked for.

    Attributes:
        exists: whether the partition exists.
        ready: samples that could be claimed; for a claim of groups, those that have one.
        groups: how many whole groups could be claimed.
        event: what to wait behind.
        left: samples that the task can still get, those that others hold with a lease included;
            None: nobody said how many will be made.
        complete: all samples of the partition are made.
        retry_s: seconds until a lease of the task runs out; None: there is none.
        limit: how many samples the task may leave unconsumed; None: as many as it likes.
        missing: of the draws that were asked about, those that were not made yet.
    """

    exists: bool
    ready: int
    groups: int
    event: str
    left: int | None = None
    complete: bool = False
    retry_s: float | None = None
    limit: int | None = None
    missing: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Full:
    """A task has left so many samples unconsumed that a put has to wait.

    Attributes:
        task: which.
        limit: how many it may.
        unconsumed: how many it has left, those included that it holds with a lease.
        held: those.
        event: what to wait behind.
        retry_s: seconds until room that is kept for another put comes back at the latest; None:
            none is kept.
    """

    task: str
    limit: int
    unconsumed: int
    held: int
    event: str
    retry_s: float | None


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether a put may make new rows.

    Attributes:
        limited: whether any task has a limit.
        full: what stands in the way; None: room is kept for it.
        freed: handles of blocks that samples had which made room: their bytes are to be freed.
    """

    limited: bool
    full: Full | None
    freed: list[str]


@dataclass(frozen=True, slots=True)
class Taken:
    """Samples that a sampler chose and that another consumer got first. Nothing was claimed."""

    ids: list[int]


@dataclass(frozen=True, slots=True)
class Ready:
    """Samples that a task could claim now, for a sampler to choose from.

    Attributes:
        ids: sample ids, ascending.
        groups: the group of each, None where it has none.
        tags: one dict per row.
    """

    ids: list[int]
    groups: list[str | None]
    tags: list[dict[str, Any]]


class Version(NamedTuple):
    """How far somebody knows the keys of a partition: up to which change of which partition of
    its name."""

    generation: str
    number: int


@dataclass(frozen=True, slots=True)
class Changes:
    """What has changed among the keys of a partition.

    Attributes:
        version: what this goes up to.
        whole: these are all keys that there are, in the order of their samples.
        samples: user key -> its sample id; 0: it is gone.
        tags: user key -> its tags.
    """

    version: Version
    whole: bool
    samples: dict[str, int]
    tags: dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Rows:
    """What is known of some rows.

    Attributes:
        ids: sample ids; 0 where a user key was not found.
        keys: user keys, None where a row has none.
        tags: one dict per row.
        schema: the fields that were asked about and that the partition has.
        produced: field -> one flag per row.
        states: what the task that was named did with each row.
        groups: the group of each row, None where it has none; if they were asked for.
    """

    ids: list[int]
    keys: list[str | None]
    tags: list[dict[str, Any]]
    schema: dict[str, FieldSchema]
    produced: dict[str, list[bool]]
    states: list[State]
    groups: list[str | None]

    def common_fields(self) -> list[str]:
        """Fields that every row has, sorted."""
        return sorted(name for name, flags in self.produced.items() if all(flags))


def _require_distinct(what: str, names: Sequence[Any]) -> None:
    if len(set(names)) != len(names):
        counts: dict[Any, int] = {}
        for name in names:
            counts[name] = counts.get(name, 0) + 1
        repeated = [name for name, count in counts.items() if count > 1]
        raise InputError(f"{what} must be distinct, got {shorten(repeated)} more than once")
