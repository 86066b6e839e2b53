"""Columns to and from the accelerator of this machine, by streams that have work to do.

python -m pytest -m gpu
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import tq_redis as tq
from tests.data.columns import DTYPES, random, tensor_columns, value_columns
from tests.data.same import assert_same
from tq_redis.bridge import tqbridge
from tq_redis.data import pieces
from tq_redis.data.codec import StoredBlock, encode
from tq_redis.data.devices import own_device

pytestmark = pytest.mark.gpu

DEVICE = own_device()


@pytest.fixture(autouse=True, scope="module")
def _there_is_one() -> None:
    assert DEVICE.type != "cpu", "torch finds no accelerator on this machine"


def on_host(column: Any) -> Any:
    return column.cpu() if isinstance(column, torch.Tensor) else column


def busy(size: int = 4096) -> torch.Tensor:
    """Work of some ten milliseconds at least on the current stream; the result is 1 everywhere."""
    square = torch.full((size, size), 1.0 / size, device=DEVICE)
    power = square
    for _ in range(20):
        power = power @ square
    return (power * size).round()


def test_columns_of_every_kind(client: tq.Client) -> None:
    columns: dict[str, Any] = {**tensor_columns(), **value_columns()}
    meta = client.put(columns, partition_id="p")
    found = client.get_columns(meta, device=DEVICE)
    for name, column in columns.items():
        expected = column.detach() if isinstance(column, torch.Tensor) else column
        if isinstance(column, torch.Tensor):
            assert found[name].device.type == DEVICE.type
        assert_same(on_host(found[name]), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_from_the_device_and_back(client: tq.Client, dtype: torch.dtype) -> None:
    column = random((5, 3), dtype)
    across = column.t().contiguous().to(DEVICE).t()
    meta = client.put({"x": column.to(DEVICE), "across": across}, partition_id="p")
    assert_same(client.get_columns(meta)["x"], column)
    assert_same(client.get_columns(meta)["across"], column)
    assert_same(on_host(client.get_columns(meta, device=DEVICE)["x"]), column)


def test_more_than_one_piece_from_several_blocks(client: tq.Client) -> None:
    rows, width = 64, pieces._PIECE_BYTES // 4 // 16
    parts = [
        client.put({"x": torch.full((rows, width), float(n))}, partition_id="p") for n in range(3)
    ]
    order = [n % 3 * rows + n // 3 for n in range(3 * rows)]
    meta = tq.BatchMeta.concat(parts).select_samples(order)
    found = client.get_columns(meta, device=DEVICE)["x"]
    assert found[:, 0].tolist() == [float(n % 3) for n in range(3 * rows)]
    assert torch.equal(found, found[:, :1].expand(-1, width))


def test_a_put_sees_what_the_callers_stream_has_still_to_do(client: tq.Client) -> None:
    busy()  # what the first call of a kernel takes
    torch.accelerator.synchronize()
    with torch.Stream(DEVICE):
        x = torch.zeros(1 << 20, device=DEVICE)
        x.copy_(busy().view(-1)[: 1 << 20])
        meta = client.put({"x": x.view(1024, 1024), "o": [{"t": x[:4]}] * 1024}, partition_id="p")
    columns = client.get_columns(meta)
    assert columns["x"].eq(1).all()
    assert columns["o"][0]["t"].tolist() == [1.0] * 4


def test_a_get_is_in_the_order_of_the_callers_stream(client: tq.Client) -> None:
    """Also where it has to wait for its turn, and its pinned memory is used by the next get."""
    metas = [
        client.put({"x": torch.full((256, 4096), float(n))}, partition_id="p") for n in range(8)
    ]
    with torch.Stream(DEVICE) as stream:
        ones = busy()
        means = [(client.get_columns(meta, device=DEVICE)["x"] * ones[0]).mean() for meta in metas]
        assert [mean.item() for mean in means] == list(range(8))

    async def again() -> torch.Tensor:
        with stream:
            busy()
            found = await client.async_get_columns(metas[3], device=DEVICE)
            return found["x"].mean()

    assert asyncio.run(again()).item() == 3.0


def test_the_bridge_computes_on_the_device(client: tq.Client) -> None:
    async def double(data: Any) -> Any:
        x = data.batch["x"]
        assert x.device.type == DEVICE.type
        return type(data).from_dict({"y": 2 * x * busy()[0, 0]})

    meta = client.put({"x": torch.arange(4.0)}, partition_id="p")

    async def run() -> tq.BatchMeta:
        with torch.Stream(DEVICE):
            return await tqbridge()(double)(meta)

    out = asyncio.run(run())
    assert client.get_columns(out, ["y"])["y"].tolist() == [0.0, 2.0, 4.0, 6.0]


def test_a_block_says_that_it_came_from_the_device() -> None:
    (block,) = encode({"x": torch.zeros(2, device=DEVICE)}, block_bytes=1 << 20, allow_pickle=False)
    assert StoredBlock(block.header, block.buffers).origins == {"x": DEVICE.type}


def test_a_device_number_that_is_not_there(client: tq.Client) -> None:
    meta = client.put({"x": torch.zeros(1)}, partition_id="p")
    absent = f"{DEVICE.type}:{torch.accelerator.device_count()}"
    with pytest.raises(tq.InputError, match=f"{absent}.*which has cpu, {DEVICE.type}:0"):
        client.get_columns(meta, device=absent)
