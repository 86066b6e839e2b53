"""Columns to and from devices. What needs an accelerator is in test_accelerator.py."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tq_redis as tq
from tests.data.columns import tensor_columns, value_columns
from tests.data.same import assert_same
from tq_redis.data import pieces
from tq_redis.data.arenas import Memory
from tq_redis.data.calls import in_thread
from tq_redis.data.codec import NOT_COPIED, StoredBlock, encode
from tq_redis.data.pieces import Part, joined, joined_on
from tq_redis.deadline import Deadline

ROOT = Path(__file__).parents[2]


def test_the_cpu_is_a_device_like_none(client: tq.Client) -> None:
    columns: dict[str, Any] = {**tensor_columns(), **value_columns()}
    meta = client.put(columns, partition_id="p")
    for device in (None, "cpu", "cpu:0", torch.device("cpu")):
        found = client.get_columns(meta, device=device)
        for name, column in columns.items():
            expected = column.detach() if isinstance(column, torch.Tensor) else column
            assert_same(found[name], expected)
        for column in found.values():  # private: nobody else sees this
            if isinstance(column, torch.Tensor) and not column.is_nested:
                column.zero_()


def test_views_stay_views_on_the_cpu(client: tq.Client) -> None:
    meta = client.put({"x": torch.arange(6.0)}, partition_id="p")
    places = {
        client.get_columns(meta, copy=False, device=device)["x"].data_ptr()
        for device in (None, "cpu")
    }
    assert len(places) == 1


@pytest.mark.parametrize("device", ["tpu", "npu:0", "meta", "cpu:x", "", "cuda:99", 3.5])
def test_a_device_that_is_not_there_is_refused_before_anything_is_fetched(
    client: tq.Client, device: Any
) -> None:
    """The samples are gone, but that is not asked."""
    meta = client.put({"x": torch.zeros(1)}, partition_id="p")
    client.clear_partition("p")
    calls = [
        lambda: client.get_columns(meta, device=device),
        lambda: client.get_data(meta, device=device),
    ]
    for call in calls:
        with pytest.raises(tq.InputError, match=r"not available in this process, which has cpu"):
            call()


def test_no_samples_and_no_such_device(client: tq.Client) -> None:
    with pytest.raises(tq.InputError, match="'tpu'"):
        client.get_columns(tq.BatchMeta.empty(), device="tpu")


def test_kv_reads_take_a_device(client: tq.Client) -> None:
    meta = tq.kv_batch_put(["a", "b"], "p", {"x": torch.arange(2.0)})
    assert tq.kv_batch_get("b", "p", device="cpu")["x"].tolist() == [1.0]
    assert tq.kv_batch_get_by_meta(meta, device="cpu")["x"].tolist() == [0.0, 1.0]
    with pytest.raises(tq.InputError, match="'tpu'"):
        tq.kv_batch_get("b", "p", device="tpu")


runs = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5)


@given(st.lists(runs, min_size=1, max_size=4), st.integers(0, 3), st.integers(1, 64))
def test_pieces_of_any_size_hold_the_rows_of_the_whole(
    parts: list[list[tuple[int, int]]], row_bytes: int, piece_bytes: int
) -> None:
    """Runs of any length, empty ones too, from one or more blocks."""
    data = np.arange(18 * row_bytes, dtype=np.uint8).reshape(18, row_bytes)
    cut: list[Part] = []
    for part in parts:
        firsts, counts = np.array(part, np.int64).T
        cut.append(Part(data, firsts, counts, int(counts.sum())))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_PIECE_BYTES", piece_bytes)
        found = joined_on(torch.device("cpu"), cut, row_bytes)
    rows = [row for part in parts for first, count in part for row in data[first : first + count]]
    assert found.numpy().tobytes() == b"".join(row.tobytes() for row in rows)
    assert joined(cut, row_bytes, copy=True, memory=Memory()).tobytes() == found.numpy().tobytes()


def test_a_block_says_where_its_fields_came_from() -> None:
    (block,) = encode(
        {"x": torch.zeros(2), "o": ["a", "b"]}, block_bytes=1 << 20, allow_pickle=False
    )
    assert StoredBlock(block.header, block.buffers).origins == {"x": "cpu", "o": "cpu"}


def test_a_device_that_does_not_answer_is_given_up_at_the_deadline() -> None:
    stuck = threading.Event()

    async def copy() -> None:
        try:
            await in_thread(Deadline(0.1), NOT_COPIED, stuck.wait)
        finally:
            stuck.set()

    with pytest.raises(tq.DeadlineError, match="a device did not finish") as caught:
        asyncio.run(copy())
    assert caught.value.deadline == 0.1


def test_on_an_npu_in_plain_python(redis_url: str, namespace: str) -> None:
    """Of a process of its own: torch's name for such a device cannot be taken back."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.data.npu_at_work", redis_url, namespace],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
