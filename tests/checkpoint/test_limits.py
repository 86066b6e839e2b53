"""The limits of tasks are those of the queue that loads, not those of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

import tq_redis as tq
from tests.checkpoint.conftest import check_partitions
from tests.control.state import Admin


def put(client: tq.Client, rows: int, timeout: float = 20) -> tq.BatchMeta:
    return client.put({"x": torch.zeros(rows)}, partition_id="p", timeout=timeout)


def saved(client: tq.Client, folder: Path) -> tq.BatchMeta:
    """A checkpoint of eight samples, when task ``t`` might leave no more."""
    client.limit("p", "t", 8)
    meta = put(client, 8)
    client.save_checkpoint(folder)
    return meta


def test_a_new_limit_wins(client: tq.Client, folder: Path) -> None:
    saved(client, folder)
    client.limit("p", "t", 12)
    client.load_checkpoint(folder)
    put(client, 4)
    with pytest.raises(tq.PartitionFullError, match="has 12 samples .* its limit is 12"):
        put(client, 1, timeout=0.1)
    assert client.get_meta(["x"], 10, "p", task_name="t").size == 10


def test_one_that_is_smaller_than_what_is_there(client: tq.Client, folder: Path) -> None:
    saved(client, folder)
    client.limit("p", "t", 6)
    client.load_checkpoint(folder)
    with pytest.raises(tq.PartitionFullError, match="has 8 samples .* its limit is 6"):
        put(client, 1, timeout=0.1)
    assert client.get_meta(["x"], 6, "p", task_name="t").size == 6
    assert put(client, 4).size == 4


def test_an_old_limit_does_not_come_back(client: tq.Client, folder: Path) -> None:
    """Neither where it was lifted, nor in a queue that never had one."""
    saved(client, folder)
    client.limit("p", "t", None)
    client.load_checkpoint(folder)
    put(client, 9)
    client.clear_partition("p")
    client.load_checkpoint(folder)
    put(client, 9)
    assert "limits" not in client.get_summary("p")


@pytest.mark.parametrize("when_full", ["wait", "evict"])
def test_a_limit_of_a_partition_that_is_not_in_the_checkpoint_stays(
    client: tq.Client, folder: Path, when_full: Literal["wait", "evict"]
) -> None:
    client.save_checkpoint(folder)
    client.limit("p", "t", 4, when_full=when_full)
    put(client, 4)
    client.load_checkpoint(folder)
    assert client.get_partition_list() == ["p"]
    assert client.get_summary("p")["samples"] == 0
    put(client, 4)
    with pytest.raises(tq.InputError, match="more than the 4"):
        put(client, 5)


def test_evicting_goes_on_with_what_was_loaded(
    client: tq.Client, folder: Path, admin: Admin, namespace: str
) -> None:
    """What can be evicted is found anew."""
    client.limit("p", "t", 4, when_full="evict")
    old = [put(client, 4) for _ in range(2)]
    client.save_checkpoint(folder)
    client.load_checkpoint(folder)
    put(client, 2)
    assert client.get_evicted("t", "p") == old[0].global_indexes + old[1].global_indexes[:2]
    assert client.get_summary("p")["evicted:t"] == 6
    check_partitions(admin, namespace)
