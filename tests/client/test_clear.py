"""Clearing: what is gone, for whom, and what stays valid."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tq_redis as tq


def test_cleared_samples_are_stale_for_everybody(client: tq.Client) -> None:
    meta = client.put({"x": torch.arange(4.0)}, partition_id="p")
    gone, kept = meta[:2], meta[2:]

    client.clear_samples(gone)

    with pytest.raises(tq.SampleNotFoundError, match="stale") as caught:
        client.get_columns(meta)
    assert caught.value.rows == tuple(gone.global_indexes)
    with pytest.raises(tq.SampleNotFoundError):
        client.put({"y": torch.zeros(2)}, gone)
    assert client.get_columns(kept)["x"].tolist() == [2.0, 3.0]
    assert client.get_summary("p")["samples"] == 2


@pytest.mark.parametrize(("one", "two"), [("p1", "p11"), ("p1", "p1:x"), ("a b", "a {b}")])
def test_partitions_do_not_touch_each_other(client: tq.Client, one: str, two: str) -> None:
    first = client.put({"x": torch.ones(1)}, partition_id=one)
    client.clear_samples(first)
    second = client.put({"x": torch.full((1,), 2.0)}, partition_id=two)

    assert client.get_meta(["x"], 1, one, task_name="t", timeout=0).global_indexes == []
    assert client.get_columns(second)["x"].tolist() == [2.0]
    assert first.global_indexes != second.global_indexes  # ids are never given out again


def test_clearing_can_be_repeated(client: tq.Client) -> None:
    meta = client.put({"x": torch.zeros(2)}, partition_id="p")
    never = tq.BatchMeta([10**6], "p")
    client.clear_samples(tq.BatchMeta.concat([meta.select_fields([]), never]))
    client.clear_samples(meta)
    client.clear_partition("p")
    client.clear_partition("p")
    client.clear_partition("never")
    client.clear_samples(tq.BatchMeta([1], "never"))
    assert client.get_partition_list() == []


def test_a_cleared_partition_starts_anew(client: tq.Client) -> None:
    old = client.put({"x": torch.zeros(2)}, partition_id="p")
    client.get_meta(["x"], 2, "p", task_name="t")
    generation = client.get_summary("p")["generation"]
    client.clear_partition("p")
    with pytest.raises(tq.PartitionNotFoundError):
        client.put({"y": torch.zeros(2)}, old)

    new = client.put({"x": torch.ones(2)}, partition_id="p")

    assert min(new.global_indexes) > max(old.global_indexes)
    assert int(client.get_summary("p")["generation"]) > int(generation)
    assert client.get_meta(["x"], 2, "p", task_name="t").global_indexes == new.global_indexes
    with pytest.raises(tq.SampleNotFoundError):
        client.get_columns(old)


def test_bytes_are_freed(client: tq.Client) -> None:
    plane = client._core.data
    for step in range(5):
        meta = client.put({"x": torch.zeros(4, 1000)}, partition_id=f"s{step}")
        client.clear_samples(meta[:2])
        client.clear_partition(f"s{step}")
    left = client._portal.run(plane.unconfirmed(-1.0, client._core._deadline(None)))
    assert left == {}


def test_a_failed_put_leaves_no_bytes(client: tq.Client) -> None:
    stale = client.put({"x": torch.zeros(2)}, partition_id="p")
    client.clear_partition("p")
    with pytest.raises(tq.PartitionNotFoundError):
        client.put({"x": torch.zeros(2)}, stale)
    plane = client._core.data
    assert client._portal.run(plane.unconfirmed(-1.0, client._core._deadline(None))) == {}


def test_a_put_whose_reply_never_came_keeps_the_bytes_that_redis_names(
    client: tq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = client._core.control
    produce = control.produce

    async def lose_the_reply(*args: Any) -> None:
        await produce(*args)
        raise tq.ServerUnavailableError("the reply was lost, and the deadline passed")

    monkeypatch.setattr(control, "produce", lose_the_reply)
    with pytest.raises(tq.ServerUnavailableError):
        client.put({"x": torch.arange(2.0)}, partition_id="p")
    monkeypatch.undo()

    meta = client.get_meta(["x"], 2, "p", task_name="t")
    assert client.get_columns(meta)["x"].tolist() == [0.0, 1.0]


def test_sweep_frees_what_no_sample_names(client: tq.Client) -> None:
    core, portal = client._core, client._portal
    meta = client.put({"x": torch.zeros(2)}, partition_id="p")
    deadline = core._deadline(None)
    portal.run(core.data.put("p", {"x": torch.ones(2)}, deadline))  # its writer dies here
    object.__setattr__(core, "config", _without_grace(core.config))

    portal.run(core.sweep())

    assert portal.run(core.data.unconfirmed(-1.0, deadline)) == {}
    assert client.get_columns(meta)["x"].tolist() == [0.0, 0.0]


def _without_grace(config: tq.Config) -> tq.Config:
    import msgspec

    data = msgspec.structs.replace(config.data, orphan_grace_s=-1.0)
    return msgspec.structs.replace(config, data=data)
