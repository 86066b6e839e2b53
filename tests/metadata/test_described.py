from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from tests.metadata.build import SCHEMAS, batches
from tq_redis.errors import FieldNotFoundError, InputError
from tq_redis.metadata import BatchMeta, FieldSchema

FORMS = {
    "ids": FieldSchema("dense", "int64", (3,)),
    "hidden": FieldSchema("jagged", "bfloat16", (-1, 8)),
    "prompt": FieldSchema("object"),
}


def test_the_form_of_a_field_row_by_row() -> None:
    meta = BatchMeta([1, 2], "p", FORMS)
    assert meta.get_dtypes("ids") == [torch.int64] * 2
    assert meta.get_dtypes("hidden") == [torch.bfloat16] * 2
    assert meta.get_dtypes("prompt") == [None, None]
    assert meta.get_shapes("ids") == [(3,)] * 2
    assert meta.get_shapes("hidden") == [(-1, 8)] * 2
    assert meta.get_shapes("prompt") == [(), ()]
    assert BatchMeta([], "p", FORMS).get_dtypes("ids") == []


def test_an_unknown_field_is_named_with_the_nearest() -> None:
    for ask in (BatchMeta([1], "p", FORMS).get_dtypes, BatchMeta([], "p", FORMS).get_shapes):
        with pytest.raises(FieldNotFoundError, match="'idz'.*mean 'ids'") as caught:
            ask("idz")
        assert caught.value.fields == ("idz",)
        assert isinstance(caught.value, KeyError)


def test_fields_are_added_in_place() -> None:
    meta = BatchMeta([1, 2], "p", {"ids": FORMS["ids"]}, np.array([1, 0], np.int8))
    assert meta.add_fields({"prompt": FORMS["prompt"]}, set_all_ready=False) is meta
    assert meta.field_names == ["ids", "prompt"]
    assert meta.production_status.tolist() == [1, 0]
    meta.add_fields({})
    assert meta.production_status.tolist() == [1, 0]
    meta.add_fields({"hidden": FORMS["hidden"]})
    assert meta.field_schema == FORMS
    assert meta.is_ready


@pytest.mark.parametrize("wrong", [{"x": torch.ones(2)}, {"x": {"dtype": "int64"}}, ["x"]])
def test_only_forms_are_added(wrong: Any) -> None:
    meta = BatchMeta([1, 2], "p", FORMS)
    for add in (meta.add_fields, meta.with_fields):
        with pytest.raises(InputError, match="FieldSchema"):
            add(wrong)
    assert meta == BatchMeta([1, 2], "p", FORMS)


@given(batches(), SCHEMAS)
def test_the_later_form_wins(meta: BatchMeta, schema: dict[str, FieldSchema]) -> None:
    expected = meta.field_schema | schema
    wider = meta.with_fields(schema)
    assert wider.field_schema == expected
    assert meta.add_fields(schema).field_schema == expected
