"""What is saved comes back: every kind of column, and everything that is known of samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tq_redis
from tests.checkpoint.conftest import check_partitions
from tests.control.state import Admin
from tests.data.columns import DTYPES, ROWS, random, tensor_columns, value_columns
from tests.data.same import assert_same
from tests.data.units import held_blocks
from tq_redis import BatchMeta, Client, GRPOGroupNSampler, InputError, KVBatchMeta


def ids_of(meta: BatchMeta | KVBatchMeta) -> list[int]:
    assert isinstance(meta, BatchMeta)
    return meta.global_indexes


def test_columns_of_every_kind(client: Client, folder: Path, admin: Admin, namespace: str) -> None:
    columns: dict[str, Any] = {**tensor_columns(), **value_columns()}
    columns |= {f"dtype_{str(dtype)[6:]}": random((ROWS, 3), dtype) for dtype in DTYPES}
    meta = client.put(columns, partition_id="p")
    before = client.get_columns(meta)
    client.save_checkpoint(folder)
    client.clear_partition("p")
    client.load_checkpoint(folder)
    after = client.get_columns(meta)
    assert after.keys() == columns.keys()
    for name in columns:
        assert_same(after[name], before[name])
    check_partitions(admin, namespace)


def test_pickled_values_are_carried_as_they_are(
    redis_url: str, namespace: str, folder: Path
) -> None:
    """A checkpoint is written and read without looking into them."""
    config: dict[str, Any] = {
        "redis": {"url": redis_url, "namespace": namespace},
        "data": {"backend": "memory", "pickle": True},
    }
    tq_redis.init(config)
    meta = tq_redis.get_client().put({"x": [complex, np.random.PCG64]}, partition_id="p")
    tq_redis.save_checkpoint(folder)
    tq_redis.close()
    config["data"]["pickle"] = False
    tq_redis.init(config)
    tq_redis.load_checkpoint(folder)
    with pytest.raises(InputError, match=r"set data\.pickle"):
        tq_redis.get_client().get_columns(meta)
    tq_redis.close()


def test_large_columns_in_many_blocks(client: Client, folder: Path) -> None:
    meta = client.put({"x": torch.randn(40, 1 << 18), "y": torch.randn(40)}, partition_id="p")
    before = client.get_columns(meta)
    client.save_checkpoint(folder)
    client.clear_partition("p")
    client.load_checkpoint(folder)
    assert torch.equal(client.get_columns(meta)["x"], before["x"])


def test_keys_tags_groups_and_partial_fields(
    client: Client, folder: Path, admin: Admin, namespace: str
) -> None:
    names = [f"k{number}" for number in range(6)]
    tags = [{"step": number, "nested": {"汉字": [number]}} for number in range(6)]
    client.kv_batch_put(names, "keyed", {"x": torch.arange(6.0)}, tags=tags)
    client.kv_put("k1", "keyed", {"reward": torch.tensor(1.5)})
    meta = client.put({"a": list("abcdef")}, partition_id="p{ö}:x y", group_ids=list("gghhii"))
    client.put({"b": torch.arange(2)}, metadata=meta[1:3])
    client.save_checkpoint(folder)
    for name in client.get_partition_list():
        client.clear_partition(name)
    client.load_checkpoint(folder)
    check_partitions(admin, namespace)
    assert client.get_partition_list() == sorted(["keyed", "p{ö}:x y"])
    listed = client.kv_list("keyed")["keyed"]
    assert listed == dict(zip(names, tags, strict=True))
    got = client.kv_batch_get(["k4", "k1"], "keyed", select_fields=["x"])
    assert got["x"].tolist() == [4.0, 1.0]
    assert client.kv_batch_get(["k1"], "keyed", select_fields=["reward"])["reward"].tolist() == [
        1.5
    ]
    ids, flags = client.get_production_status(["a", "b"], "p{ö}:x y")
    assert (ids.tolist(), flags.tolist()) == (
        meta.global_indexes,
        [[1, 0], [1, 1], [1, 1], [1, 0], [1, 0], [1, 0]],
    )
    grouped = client.get_meta(
        ["a"], 4, "p{ö}:x y", task_name="t", sampler=GRPOGroupNSampler(2), timeout=0
    )
    assert ids_of(grouped) == meta.global_indexes[:4]


def test_consumption_and_open_claims(
    client: Client, folder: Path, admin: Admin, namespace: str
) -> None:
    """What was consumed stays so. What a consumer held is open again; its deliveries count."""
    meta = client.put({"x": torch.arange(12.0)}, partition_id="p")
    ids = meta.global_indexes
    assert ids_of(client.get_meta(["x"], 3, "p", task_name="t")) == ids[:3]
    held = client.get_meta(["x"], 4, "p", task_name="t", lease=60)
    client.ack(held[:1])
    client.get_meta(["x"], 2, "p", task_name="other")
    client.expect("p", 15)
    client.save_checkpoint(folder)
    summary = client.get_summary("p")
    client.load_checkpoint(folder)
    check_partitions(admin, namespace)
    assert client.get_consumption_status("t", "p")[1].tolist() == [1] * 4 + [0] * 8
    assert client.get_consumption_status("other", "p")[1].tolist() == [1] * 2 + [0] * 10
    changed = {"claims", "generation", "expires_at", "claimed:t"}
    assert {n: v for n, v in client.get_summary("p").items() if n not in changed} == {
        n: v for n, v in summary.items() if n not in changed
    }
    # Its consumer is told that it lost them, though it may run still.
    with pytest.raises(tq_redis.LeaseLostError) as lost:
        client.ack(held)
    assert list(lost.value.rows) == ids[4:7]
    assert ids_of(client.get_meta(["x"], 8, "p", task_name="t", lease=60)) == ids[4:]
    with pytest.raises(tq_redis.CannotFillError):
        client.get_meta(["x"], 14, "p", task_name="other")


def test_deliveries_count_across_a_load_and_the_new_limit_holds(
    redis_url: str, namespace: str, folder: Path
) -> None:
    """CASES: settings come from the new queue, not from the checkpoint."""

    def start(max_deliveries: int, timeout_s: float) -> Client:
        tq_redis.init(
            {
                "redis": {"url": redis_url, "namespace": namespace},
                "data": {"backend": "memory"},
                "max_deliveries": max_deliveries,
                "timeout_s": timeout_s,
            }
        )
        return tq_redis.get_client()

    client = start(5, 20)
    client.put({"x": torch.arange(2.0)}, partition_id="p")
    for _ in range(2):
        client.release(client.get_meta(["x"], 2, "p", task_name="t", lease=60))
    client.save_checkpoint(folder)
    tq_redis.close()
    client = start(3, 21)
    client.load_checkpoint(folder)
    assert client.config.timeout_s == 21
    client.release(client.get_meta(["x"], 2, "p", task_name="t", lease=60))
    assert len(ids_of(client.get_set_aside("t", "p"))) == 2
    client.save_checkpoint(folder)
    tq_redis.close()
    client = start(9, 20)
    client.load_checkpoint(folder)
    assert len(ids_of(client.get_set_aside("t", "p"))) == 2
    client.reset_consumption("p", "t")
    assert len(ids_of(client.get_meta(["x"], 2, "p", task_name="t", lease=60))) == 2
    tq_redis.close()


def test_draws_of_consumed_batches_are_remembered(client: Client, folder: Path) -> None:
    meta = client.put({"x": torch.arange(12.0)}, partition_id="p")

    def draw(rank: int, batch: int, lease: float | None = None) -> list[int]:
        config = {"dp_rank": rank, "batch_index": batch}
        return ids_of(
            client.get_meta(
                ["x"], 3, "p", task_name="t", sampling_config=config, lease=lease, timeout=0
            )
        )

    consumed, held = draw(0, 0), draw(1, 0, lease=60)
    client.save_checkpoint(folder)
    client.load_checkpoint(folder)
    assert draw(0, 0) == consumed == meta.global_indexes[:3]
    assert draw(2, 0) == held  # open again, for whoever comes first
    assert draw(1, 0) == meta.global_indexes[6:9]


def test_a_partition_that_ended(client: Client, folder: Path) -> None:
    client.put({"x": torch.arange(2.0)}, partition_id="p")
    client.end_partition("p")
    client.expect("announced", 7)
    client.save_checkpoint(folder)
    client.clear_partition("p")
    client.load_checkpoint(folder)
    with pytest.raises(tq_redis.PartitionEndedError):
        client.put({"x": torch.arange(2.0)}, partition_id="p")
    client.get_meta(["x"], 2, "p", task_name="t")
    with pytest.raises(tq_redis.EndOfStreamError):
        client.get_meta(["x"], 2, "p", task_name="t")
    assert client.get_summary("announced")["expected"] == 7


def test_ids_that_are_made_after_a_load_are_new(client: Client, folder: Path) -> None:
    """Metadata of the old run points to what it always did, or to nothing."""
    kept = client.put({"x": torch.arange(3.0)}, partition_id="p")
    client.save_checkpoint(folder)
    later = client.put({"x": torch.arange(3.0)}, partition_id="p")
    client.load_checkpoint(folder)
    new = client.put({"x": torch.ones(3)}, partition_id="p")
    assert not {*new.global_indexes} & {*kept.global_indexes, *later.global_indexes}
    assert client.get_data(kept)["x"].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(tq_redis.SampleNotFoundError):
        client.get_data(later)


def test_partitions_that_are_not_in_the_checkpoint_are_cleared(
    client: Client, folder: Path, namespace: str
) -> None:
    client.put({"x": torch.ones(3)}, partition_id="p")
    client.save_checkpoint(folder)
    client.put({"x": torch.ones(3)}, partition_id="q")
    client.load_checkpoint(folder)
    assert client.get_partition_list() == ["p"]
    assert len(held_blocks(namespace)) == 1  # every other block was freed


def test_an_empty_queue(client: Client, folder: Path) -> None:
    client.save_checkpoint(folder, metadata={"step": 0})
    client.put({"x": torch.ones(3)}, partition_id="p")
    assert client.load_checkpoint(folder) == {"step": 0}
    assert client.get_partition_list() == []


@pytest.mark.parametrize("metadata", [None, {}, {"step": 3, "nested": {"a": [1.5, None, "汉字"]}}])
def test_metadata_comes_back(client: Client, folder: Path, metadata: dict[str, Any] | None) -> None:
    client.save_checkpoint(str(folder), metadata=metadata)
    assert client.load_checkpoint(str(folder)) == (metadata or {})


@pytest.mark.parametrize("metadata", [{"x": float("nan")}, {"x": (1,)}, {1: 2}, {"x": object()}])
def test_metadata_that_json_cannot_carry(
    client: Client, folder: Path, metadata: dict[Any, Any]
) -> None:
    with pytest.raises(InputError, match="must be JSON"):
        client.save_checkpoint(folder, metadata=metadata)
    assert not folder.exists()


def test_a_checkpoint_is_replaced(client: Client, folder: Path) -> None:
    meta = client.put({"x": torch.zeros(3)}, partition_id="p")
    client.save_checkpoint(folder, metadata={"step": 1})
    client.put({"x": torch.ones(3)}, metadata=meta)
    client.save_checkpoint(folder, metadata={"step": 2})
    client.clear_partition("p")
    assert client.load_checkpoint(folder) == {"step": 2}
    assert client.get_data(meta)["x"].tolist() == [1.0] * 3


@pytest.mark.asyncio
async def test_the_functions_of_the_package(client: Client, folder: Path) -> None:
    meta = client.put({"x": torch.zeros(3)}, partition_id="p")
    await tq_redis.async_save_checkpoint(folder, metadata={"step": 1}, timeout=30)
    client.clear_partition("p")
    assert await tq_redis.async_load_checkpoint(folder, timeout=30) == {"step": 1}
    assert client.get_data(meta)["x"].tolist() == [0.0] * 3
