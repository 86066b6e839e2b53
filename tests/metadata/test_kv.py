from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
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


def test_a_value_as_transfer_queue_gives_it_for_nothing() -> None:
    nothing: Any = None
    assert KVBatchMeta(["a"], [{}], extra_info=nothing).extra_info == {}


def test_what_it_says_of_itself() -> None:
    assert repr(KVBatchMeta(["a"], [{}], "p", ["x"])) == "KVBatchMeta(1 keys of p: ['x'])"
    assert repr(KVBatchMeta()) == "KVBatchMeta(0 keys of nowhere: fields unknown)"


def test_equality() -> None:
    """Also where a value is a tensor, which has no single truth."""
    meta = KVBatchMeta(["a"], [{"t": 1}], "p", ["x"], {"i": torch.ones(2)})
    assert meta == copy.deepcopy(meta)
    others = [
        KVBatchMeta(["a"], [{"t": 1}], "p", ["x"], {"i": torch.zeros(2)}),
        KVBatchMeta(["b"], [{"t": 1}], "p", ["x"], {"i": torch.ones(2)}),
        KVBatchMeta(["a"], [{"t": 2}], "p", ["x"], {"i": torch.ones(2)}),
        KVBatchMeta(["a"], [{"t": 1}], "q", ["x"], {"i": torch.ones(2)}),
        KVBatchMeta(["a"], [{"t": 1}], "p", None, {"i": torch.ones(2)}),
    ]
    assert meta not in others
    assert meta != "meta"
    with pytest.raises(TypeError, match="unhashable"):
        hash(meta)


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
    assert KVBatchMeta.concat(parts) == meta


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


@given(kv_batches(), st.data())
def test_selecting_twice_is_selecting_once(meta: KVBatchMeta, data: st.DataObject) -> None:
    first = data.draw(st.permutations(meta.keys))
    second = data.draw(st.lists(st.sampled_from(first), unique=True)) if first else []
    assert meta.select_keys(first).select_keys(second) == meta.select_keys(second)


@given(kv_batches(), st.data())
def test_a_selected_permutation_is_the_reordered_batch(
    meta: KVBatchMeta, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(meta.size)))
    selected = meta.select_keys([meta.keys[row] for row in order])
    meta.reorder(order)
    assert selected == meta


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
