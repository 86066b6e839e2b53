"""One row of a batch, to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from tq_redis.metadata.batch import BatchMeta
    from tq_redis.metadata.claim import Claim
    from tq_redis.metadata.schema import FieldSchema


@dataclass(slots=True)
class SampleView:
    """The row that stands at a position of the batch now; it follows the batch's changes."""

    _batch: BatchMeta
    _row: int

    @property
    def global_index(self) -> int:
        return self._batch.global_indexes[self._row]

    @property
    def partition_id(self) -> str:
        return self._batch.partition_ids[self._row]

    @property
    def production_status(self) -> int:
        """1 where all of the fields are produced, else 0."""
        return int(self._batch.production_status[self._row])

    @property
    def custom_meta(self) -> Mapping[str, Any]:
        return MappingProxyType(self._batch.custom_meta[self._row])

    @property
    def fields(self) -> Mapping[str, FieldSchema]:
        return MappingProxyType(self._batch.field_schema)

    @property
    def claim(self) -> Claim | None:
        return self._batch.claims[self._row]

    @property
    def is_padding(self) -> bool:
        """Whether the row only fills the batch up."""
        return self._row >= self._batch.size - self._batch.padding

    def __repr__(self) -> str:
        return f"SampleView({self.global_index} of {self.partition_id}: {sorted(self.fields)})"


@dataclass(slots=True)
class SampleViews(Sequence[SampleView]):
    """The rows of a batch; each view is made when it is asked for."""

    _batch: BatchMeta

    def __len__(self) -> int:
        return self._batch.size

    @overload
    def __getitem__(self, index: int) -> SampleView: ...
    @overload
    def __getitem__(self, index: slice) -> list[SampleView]: ...
    def __getitem__(self, index: int | slice) -> SampleView | list[SampleView]:
        rows = range(self._batch.size)[index]
        if isinstance(rows, range):
            return [SampleView(self._batch, row) for row in rows]
        return SampleView(self._batch, rows)
