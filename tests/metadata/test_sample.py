from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given

from tests.metadata.build import batches
from tq_redis.metadata import BatchMeta, Claim, FieldSchema

DENSE = FieldSchema("dense", "float32", (3,))


@given(batches())
def test_views_show_the_rows(meta: BatchMeta) -> None:
    assert len(meta.samples) == meta.size
    seen = [
        (s.global_index, s.partition_id, s.production_status, dict(s.custom_meta), s.claim)
        for s in meta.samples
    ]
    columns = (meta.production_status.tolist(), meta.custom_meta, meta.claims)
    assert seen == list(zip(meta.global_indexes, meta.partition_ids, *columns, strict=True))
    assert all(sample.fields == meta.field_schema for sample in meta.samples)


def test_views_are_found_by_position() -> None:
    samples = BatchMeta([5, 6, 7], "p", {"x": DENSE}).samples
    assert [samples[0].global_index, samples[-1].global_index] == [5, 7]
    assert [sample.global_index for sample in samples[1:]] == [6, 7]
    assert [sample.global_index for sample in reversed(samples)] == [7, 6, 5]
    assert repr(samples[1]) == "SampleView(6 of p: ['x'])"
    for outside in (3, -4):
        with pytest.raises(IndexError):
            samples[outside]


def test_nothing_can_be_changed_through_a_view() -> None:
    meta = BatchMeta([5], "p", {"x": DENSE}, custom_meta=[{"a": 1}])
    sample: Any = meta.samples[0]
    for change in (
        lambda: setattr(sample, "global_index", 1),
        lambda: sample.custom_meta.update(b=2),
        lambda: sample.fields.pop("x"),
    ):
        with pytest.raises(AttributeError):
            change()
    with pytest.raises(TypeError):
        sample.custom_meta["a"] = 2
    assert meta == BatchMeta([5], "p", {"x": DENSE}, custom_meta=[{"a": 1}])


def test_a_view_follows_its_batch() -> None:
    meta = BatchMeta([5, 6], "p", {}, np.array([1, 0], np.int8), claims=[Claim("t", 1), None])
    sample = meta.samples[0]
    meta.reorder([1, 0])
    assert (sample.global_index, sample.production_status, sample.claim) == (6, 0, None)


def test_padding_shows() -> None:
    padded = BatchMeta([5, 6, 7], "p").padded(4)
    assert [sample.is_padding for sample in padded.samples] == [False, False, False, True]
