from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.metadata.build import kv_batches
from tq_redis.errors import InputError, KeyNotFoundError
from tq_redis.metadata import KVBatchMeta


def scribble(meta: KVBatchMeta) -> None:
    """Change everything in place."""
    meta.keys[:] = [f"changed {row}" for row in range(meta.size)]
    if meta.fields is not None:
        meta.fields.append("changed")
    for values in (*meta.tags, meta.extra_info):
        for value in values.values():
            if isinstance(value, list):
                value.append("changed")
        values["changed"] = True


def test_without_arguments_it_is_empty() -> None:
    meta = KVBatchMeta()
    assert (len(meta), meta.size, meta.partition_id, meta.fields) == (0, 0, None, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keys": ["a"], "tags": []}, "1 keys and 0 tags"),
        ({"keys": ["a", "a"], "tags": [{}, {}]}, "distinct"),
        ({"keys": [], "tags": [], "fields": ["x", "x"]}, "distinct"),
    ],
)
def test_what_cannot_be_right_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        KVBatchMeta(**arguments)


def test_it_shares_nothing_with_what_it_was_made_of() -> None:
    keys, tags, fields, info = ["a"], [{"t": [1]}], ["x"], {"i": [1]}
    scribble(KVBatchMeta(keys, tags, "p", fields, info))
    assert (keys, tags, fields, info) == (["a"], [{"t": [1]}], ["x"], {"i": [1]})


@given(kv_batches(), st.integers(1, 25))
def test_chunks_put_together_are_the_batch(meta: KVBatchMeta, chunks: int) -> None:
    parts = meta.chunk(chunks)
    sizes = [part.size for part in parts]
    assert len(parts) == chunks
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    together = KVBatchMeta.concat(parts)
    assert (together.keys, together.tags) == (meta.keys, meta.tags)
    assert together.extra_info == meta.extra_info
    if meta.size:
        assert together == meta


@given(kv_batches(), st.integers(1, 4))
def test_parts_share_nothing(meta: KVBatchMeta, chunks: int) -> None:
    parts = [*meta.chunk(chunks), KVBatchMeta.concat([meta]), meta.select_keys(meta.keys)]
    twins = copy.deepcopy(parts)
    scribble(parts[0])
    scribble(meta)
    assert parts[1:] == twins[1:]


@given(kv_batches(), st.randoms(use_true_random=False))
def test_reordering_has_an_inverse(meta: KVBatchMeta, random: Any) -> None:
    order = list(range(meta.size))
    random.shuffle(order)
    before = copy.deepcopy(meta)
    meta.reorder(order)
    assert meta.keys == [before.keys[row] for row in order]
    assert meta.tags == [before.tags[row] for row in order]
    meta.reorder([order.index(row) for row in range(meta.size)])
    assert meta == before
    with pytest.raises(InputError, match="permutation"):
        meta.reorder([*order, 0])


@given(kv_batches(), st.randoms(use_true_random=False))
def test_selected_keys_stand_in_the_order_asked_for(meta: KVBatchMeta, random: Any) -> None:
    keys = random.sample(meta.keys, meta.size // 2)
    selected = meta.select_keys(keys)
    assert selected.keys == keys
    assert selected.tags == [meta.tags[meta.keys.index(key)] for key in keys]
    with pytest.raises(KeyNotFoundError, match="not in the batch"):
        meta.select_keys([*keys, "no such key"])
    if keys:
        with pytest.raises(InputError, match="distinct"):
            meta.select_keys([keys[0], keys[0]])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (KVBatchMeta(["b"], [{}], "q", ["x"]), "'p' and 'q'"),
        (KVBatchMeta(["b"], [{}], "p", ["y"]), "same fields"),
        (KVBatchMeta(["a"], [{}], "p", ["x"]), "distinct"),
        (KVBatchMeta(["b"], [{}], "p", ["x"], {"step": 2}), "'step'.*differs"),
    ],
)
def test_concat_refuses_what_does_not_fit(other: KVBatchMeta, message: str) -> None:
    with pytest.raises(InputError, match=message):
        KVBatchMeta.concat([KVBatchMeta(["a"], [{}], "p", ["x"], {"step": 1}), other])


def test_concat_passes_empty_batches_over() -> None:
    one = KVBatchMeta(["a"], [{"t": 1}], "p", ["x", "y"])
    two = KVBatchMeta(["b"], [{}], "p", ["y", "x"], {"i": 1})
    both = KVBatchMeta.concat([KVBatchMeta(), one, KVBatchMeta(partition_id="q"), two])
    assert both == KVBatchMeta(["a", "b"], [{"t": 1}, {}], "p", ["x", "y"], {"i": 1})
    assert KVBatchMeta.concat([]) == KVBatchMeta()


@given(kv_batches())
def test_pickling_keeps_everything(meta: KVBatchMeta) -> None:
    assert pickle.loads(pickle.dumps(meta)) == meta


def test_a_thousand_rows_are_a_few_kilobytes() -> None:
    keys = [f"{row // 8}_{row % 8}" for row in range(1024)]
    meta = KVBatchMeta(keys, [{} for _ in keys], "train_17", ["ids", "mask", "reward"])
    assert len(pickle.dumps(meta)) < 16 << 10
