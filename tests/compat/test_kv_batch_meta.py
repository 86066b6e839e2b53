"""KVBatchMeta: a value, without a queue."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from tests.compat.peer import differs, tq

KVBatchMeta = tq.KVBatchMeta


def batch(keys: str = "abc", **more: Any) -> Any:
    settings: dict[str, Any] = {"partition_id": "p", "fields": ["x"], "extra_info": {"step": 1}}
    return KVBatchMeta(keys=list(keys), tags=[{"of": key} for key in keys], **settings | more)


def test_it_needs_no_arguments() -> None:
    meta = KVBatchMeta()
    assert (meta.keys, meta.tags, meta.partition_id, meta.fields) == ([], [], None, None)
    assert (meta.size, len(meta), meta.extra_info) == (0, 0, {})


def test_it_says_what_it_holds() -> None:
    assert (batch().size, len(batch())) == (3, 3)
    assert "size=3" in str(batch())


def test_tags_and_extra_info_are_its_own() -> None:
    tags, info = [{"l": [1]}], {"l": [1]}
    meta = KVBatchMeta(keys=["a"], tags=tags, extra_info=info)
    meta.tags[0]["l"].append(2)
    meta.extra_info["l"].append(2)
    assert (tags, info) == ([{"l": [1]}], {"l": [1]})
    meta.tags = [{"new": 1}]
    assert meta.tags == [{"new": 1}]


@pytest.mark.parametrize(
    "wrong",
    [
        {"keys": ["a"], "tags": []},
        {"keys": ["a", "a"], "tags": [{}, {}]},
        {"fields": ["x", "x"]},
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        KVBatchMeta(**wrong)


def test_keys_are_selected_in_the_order_given() -> None:
    part = batch().select_keys(["c", "a"])
    assert (part.keys, part.tags) == (["c", "a"], [{"of": "c"}, {"of": "a"}])
    assert (part.partition_id, part.fields, part.extra_info) == ("p", ["x"], {"step": 1})
    assert type(part) is KVBatchMeta


@pytest.mark.parametrize(("keys", "error"), [(["a", "a"], ValueError), (["z"], RuntimeError)])
def test_bad_keys_cannot_be_selected(keys: list[str], error: type[Exception]) -> None:
    with pytest.raises(error):
        batch().select_keys(keys)


def test_rows_are_reordered_in_place() -> None:
    meta = batch()
    meta.reorder([2, 0, 1])
    assert meta.keys == ["c", "a", "b"]
    assert meta.tags == [{"of": "c"}, {"of": "a"}, {"of": "b"}]
    for wrong in ([0], [0, 0, 1]):
        with pytest.raises(ValueError, match=r"."):
            meta.reorder(wrong)


@pytest.mark.parametrize(("chunks", "sizes"), [(1, [3]), (2, [2, 1]), (5, [1, 1, 1, 0, 0])])
def test_chunks_put_together_are_the_batch(chunks: int, sizes: list[int]) -> None:
    parts = batch().chunk(chunks)
    assert [part.size for part in parts] == sizes
    whole = KVBatchMeta.concat(parts)
    assert (whole.keys, whole.tags, whole.fields) == (list("abc"), batch().tags, ["x"])
    assert (whole.partition_id, whole.extra_info) == ("p", {"step": 1})
    assert type(whole) is KVBatchMeta


def test_concat_is_lenient_with_empty_and_unknown() -> None:
    assert KVBatchMeta.concat([]).size == 0
    assert KVBatchMeta.concat([KVBatchMeta(), batch("a")]).keys == ["a"]
    assert KVBatchMeta.concat([batch("a"), batch("b", fields=None)]).fields == ["x"]
    assert KVBatchMeta.concat([batch("a"), batch("b", extra_info={})]).extra_info == {"step": 1}


@pytest.mark.parametrize(
    "other", [{"fields": ["y"]}, {"partition_id": "q"}, {"extra_info": {"step": 2}}]
)
def test_concat_refuses_what_does_not_fit(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        KVBatchMeta.concat([batch("a"), batch("b", **other)])


@differs("None")
def test_without_extra_info_there_is_an_empty_one() -> None:
    whole = KVBatchMeta.concat([batch("a", extra_info=None), batch("b", extra_info={})])
    assert whole.extra_info == {}


def test_it_survives_pickling() -> None:
    other = pickle.loads(pickle.dumps(batch()))
    assert type(other) is KVBatchMeta
    assert (other.keys, other.tags, other.extra_info) == (list("abc"), batch().tags, {"step": 1})
