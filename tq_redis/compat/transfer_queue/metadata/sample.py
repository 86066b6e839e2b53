"""One row of a batch, to look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tq_redis.compat.transfer_queue.metadata.schema import PER_ROW

if TYPE_CHECKING:
    from tq_redis.compat.transfer_queue.metadata.batch import BatchMeta


@dataclass(frozen=True, slots=True)
class SampleView:
    """One row of a batch, read-only."""

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
        return int(self._batch.production_status[self._row])

    @property
    def custom_meta(self) -> Mapping[str, Any]:
        return MappingProxyType(self._batch.custom_meta[self._row])

    @property
    def fields(self) -> Mapping[str, Mapping[str, Any]]:
        """Field -> form, with the shape of this row."""
        forms: dict[str, Mapping[str, Any]] = {}
        for name, form in self._batch.field_schema.items():
            own = {key: value for key, value in form.items() if key != PER_ROW}
            own["shape"] = self._batch.get_shapes(name)[self._row]
            forms[name] = MappingProxyType(own)
        return MappingProxyType(forms)


@dataclass(frozen=True, slots=True)
class SampleViews:
    """The rows of a batch; each view is made when it is asked for."""

    _batch: BatchMeta

    def __len__(self) -> int:
        return self._batch.size

    def __getitem__(self, row: int) -> SampleView:
        return SampleView(self._batch, range(len(self))[row])

    def __iter__(self) -> Iterator[SampleView]:
        return (SampleView(self._batch, row) for row in range(len(self)))
