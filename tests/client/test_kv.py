"""Samples by user key."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tq_redis as tq


def test_put_upserts_and_merges_tags(client: tq.Client) -> None:
    tq.kv_batch_put(["a", "b"], "p", {"x": torch.arange(2)}, [{"n": 1}, {"n": 2}])
    meta = tq.kv_put("b", "p", {"y": torch.ones(3), "s": None}, {"done": True})

    assert meta == tq.KVBatchMeta(["b"], [{"n": 2, "done": True}], "p", ["s", "x", "y"])
    assert tq.kv_list("p") == {"p": {"a": {"n": 1}, "b": {"n": 2, "done": True}}}
    both = tq.kv_batch_get(["b", "a", "b"], "p")
    assert both["x"].tolist() == [1, 0, 1]
    assert sorted(both.keys()) == ["x"]  # what all of them have
    one = tq.kv_batch_get("b", "p")
    assert one["y"].tolist() == [[1.0, 1.0, 1.0]]
    assert one.get("s").tolist() == [None]


def test_tags_alone_register_a_key(client: tq.Client) -> None:
    meta = tq.kv_put("k", "p", tag={"status": "running"})
    assert meta.fields == []
    assert tq.kv_list() == {"p": {"k": {"status": "running"}}}
    with pytest.raises(tq.NotReadyError):
        tq.kv_put("l", "p", {"x": torch.zeros(1)})
        tq.kv_batch_get(["k", "l"], "p", "x")


def test_concurrent_tag_updates_lose_nothing(client: tq.Client) -> None:
    async def update() -> None:
        await asyncio.gather(*(tq.async_kv_put("k", "p", tag={f"tag{n}": n}) for n in range(20)))

    asyncio.run(update())
    assert tq.kv_list("p") == {"p": {"k": {f"tag{n}": n for n in range(20)}}}


def test_tag_values_keep_their_type(client: tq.Client) -> None:
    tag = {"i": 1, "f": 1.0, "s": "1", "none": None, "l": [], "d": {"a": [1, {}]}, "b": False}
    tq.kv_put("k", "p", tag=tag)
    got = tq.kv_list("p")["p"]["k"]
    assert {name: repr(value) for name, value in got.items()} == {
        name: repr(value) for name, value in tag.items()
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"keys": []}, "keys is empty"),
        ({"keys": ["a", "a"]}, "'a'] more than once"),
        ({"keys": [1]}, "non-empty strings"),
        ({"fields": None}, "fields, tags or both"),
        ({"tags": [{}]}, "1 tags for 2 keys"),
        ({"fields": {"x": torch.zeros(3)}}, "3 rows for 2 keys"),
    ],
)
def test_bad_puts_register_nothing(client: tq.Client, arguments: dict[str, Any], says: str) -> None:
    good: dict[str, Any] = {
        "keys": ["a", "b"],
        "partition_id": "p",
        "fields": {"x": torch.zeros(2)},
    }
    with pytest.raises(tq.InputError, match=says.replace("]", "\\]")):
        tq.kv_batch_put(**(good | arguments))
    assert tq.kv_list() == {}


def test_missing_keys_are_named(client: tq.Client) -> None:
    tq.kv_put("a", "p", {"x": torch.zeros(1)})
    with pytest.raises(tq.KeyNotFoundError, match="no keys \\['b', 'c'\\]"):
        tq.kv_batch_get(["a", "b", "c"], "p")
    with pytest.raises(tq.PartitionNotFoundError):
        tq.kv_batch_get(["a"], "q")


def test_clear_by_key_passes_over_unknown_ones(client: tq.Client) -> None:
    tq.kv_batch_put(["a", "b"], "p", {"x": torch.zeros(2)})
    tq.kv_clear(["b", "never"], "p")
    tq.kv_clear("b", "p")
    tq.kv_clear("b", "never")
    assert tq.kv_list() == {"p": {"a": {}}}
    tq.kv_put("b", "p", {"x": torch.ones(1)})  # a new sample under the old key
    assert tq.kv_batch_get("b", "p")["x"].tolist() == [[1.0]]


def test_metadata_by_key_and_keys_by_sample(client: tq.Client) -> None:
    tq.kv_batch_put(["a", "b"], "p", {"x": torch.arange(2.0)}, [{"n": 0}, {"n": 1}])
    meta = client.kv_retrieve_meta(["b", "a"], "p")
    assert meta.custom_meta == [{"n": 1}, {"n": 0}]
    assert client.get_columns(meta)["x"].tolist() == [1.0, 0.0]
    assert client.kv_retrieve_keys(meta.global_indexes, "p") == ["b", "a"]
    with pytest.raises(tq.KeyNotFoundError):
        client.kv_retrieve_meta(["c"], "p")
    created = client.kv_retrieve_meta(["c"], "p", create=True)
    assert client.kv_retrieve_keys(created.global_indexes[0], "p") == ["c"]
    nameless = client.put({"x": torch.zeros(1)}, partition_id="p")
    with pytest.raises(tq.KeyNotFoundError, match="have no user key"):
        client.kv_retrieve_keys(nameless.global_indexes, "p")


def test_get_by_meta(client: tq.Client) -> None:
    fields = TensorDict({"x": torch.arange(2.0), "y": torch.ones(2)}, batch_size=[2])
    meta = tq.kv_batch_put(["a", "b"], "p", fields)
    meta.reorder([1, 0])
    assert tq.kv_batch_get_by_meta(meta)["x"].tolist() == [1.0, 0.0]
    assert sorted(tq.kv_batch_get_by_meta(meta, "y").keys()) == ["y"]
    with pytest.raises(tq.InputError, match="not in the metadata"):
        tq.kv_batch_get_by_meta(meta, ["z"])


def test_set_custom_meta_replaces(client: tq.Client) -> None:
    tq.kv_put("a", "p", tag={"old": 1, "both": 1})
    meta = client.kv_retrieve_meta("a", "p")
    meta.custom_meta = [{"both": 2, "new": 3}]
    client.set_custom_meta(meta)
    assert tq.kv_list("p") == {"p": {"a": {"both": 2, "new": 3}}}


def test_many_keys_are_listed_in_order(client: tq.Client) -> None:
    keys = [f"k{n}" for n in range(4500)]
    tq.kv_batch_put(keys, "p", tags=[{"n": n} for n in range(len(keys))])
    listed = tq.kv_list("p")["p"]
    assert list(listed) == keys
    assert listed["k4321"] == {"n": 4321}


def test_a_key_that_is_made_again_while_keys_are_listed_comes_last(
    client: tq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the first page had it, with the sample that it was then."""
    monkeypatch.setattr("tq_redis.control.plane.CELLS_PER_CALL", 10)
    keys = [f"k{number}" for number in range(9)]
    tq.kv_batch_put(keys, "p", tags=[{}] * 9)
    core = client._core
    ask, pages = core.control._run, 0

    async def run(verb: Any, *rest: Any) -> Any:
        nonlocal pages
        reply = await ask(verb, *rest)
        pages += verb == "describe"
        if (verb, pages) == ("describe", 1):
            monkeypatch.setattr(core.control, "_run", ask)
            await core.kv_clear(["k0"], "p")
            await core.kv_batch_put(["k0"], "p", tags=[{"again": 1}])
        return reply

    monkeypatch.setattr(core.control, "_run", run)
    for _ in range(2):
        listed = tq.kv_list("p")["p"]
        assert list(listed) == [*keys[1:], "k0"]
        assert listed["k0"] == {"again": 1}


def test_changes_since_a_version(client: tq.Client) -> None:
    tq.kv_batch_put(["a", "b"], "p", tags=[{"n": 1}, {"n": 2}])
    first = client.kv_list_changes("p")
    assert (first.tags, first.removed, first.whole) == ({"a": {"n": 1}, "b": {"n": 2}}, [], True)
    tq.kv_put("b", "p", tag={"done": True})
    tq.kv_put("c", "p", tag={})
    tq.kv_clear("a", "p")
    second = client.kv_list_changes("p", first.version)
    assert (second.tags, second.removed) == ({"b": {"n": 2, "done": True}, "c": {}}, ["a"])
    assert not second.whole
    assert client.kv_list_changes("p", second.version).tags == {}
    with pytest.raises(tq.InputError, match="since must be the version"):
        client.kv_list_changes("p", "yesterday")
    with pytest.raises(tq.PartitionNotFoundError):
        client.kv_list_changes("q")


def test_what_a_listing_gives_is_its_callers_own(client: tq.Client) -> None:
    tq.kv_put("k", "p", tag={"list": [1], "n": 1})
    listed = tq.kv_list("p")
    listed["p"]["k"]["list"].append(2)
    listed["p"]["k"]["n"] = 2
    listed["p"]["more"] = {}
    assert tq.kv_list("p") == {"p": {"k": {"list": [1], "n": 1}}}


def test_a_listing_follows_what_others_do(client: tq.Client) -> None:
    """Whatever happened since the last one, it is what a client that knows nothing lists."""
    random = Random(7)
    keys = [f"k{number}" for number in range(12)]

    def put(chosen: list[str]) -> None:
        tq.kv_batch_put(chosen, "p", {"x": torch.zeros(len(chosen))})

    def tag(chosen: list[str]) -> None:
        tq.kv_batch_put(chosen, "p", tags=[{random.choice("abc"): random.random()} for _ in chosen])

    def clear(chosen: list[str]) -> None:
        tq.kv_clear(chosen, "p")

    def clear_all(chosen: list[str]) -> None:
        client.clear_partition("p")

    for _ in range(60):
        for act in random.choices(
            [put, tag, clear, clear_all], [4, 6, 4, 1], k=random.randint(0, 3)
        ):
            act(random.sample(keys, random.randint(1, 5)))
        listed = tq.kv_list("p")
        whole = client.kv_list_changes("p").tags if "p" in client.get_partition_list() else None
        assert listed.get("p") == whole
        assert list(listed.get("p", {})) == list(whole or {})
