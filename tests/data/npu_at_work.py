"""What test_devices.py runs in a process of its own: columns to and from the device of npu.py.

python -m tests.data.npu_at_work redis://127.0.0.1:6379/0 NAMESPACE
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tests.data.npu as npu
import tq_redis as tq
from tests.data.same import assert_same
from tq_redis.bridge import tqbridge
from tq_redis.data import devices, pieces

JAGGED: Any = torch.nested.as_nested_tensor(
    [torch.arange(n) for n in (3, 0, 2)], layout=torch.jagged
)
COLUMNS: dict[str, Any] = {
    "x": torch.arange(12.0).view(3, 4),
    "half": torch.arange(3, dtype=torch.bfloat16),
    "none": torch.zeros(3, 0),
    "ids": JAGGED,
    "mask": torch.nested.nested_tensor_from_jagged(JAGGED.values() > 0, JAGGED.offsets()),
    "note": ["a", None, {"k": 1}],
}


def back(column: Any) -> Any:
    """What the device's memory holds."""
    if isinstance(column, list):
        return column
    assert column.device == torch.device("npu:0")
    if column.is_nested:
        return torch.nested.nested_tensor_from_jagged(
            npu.host_of(column.values()), npu.host_of(column.offsets())
        )
    return npu.host_of(column)


def check_all_kinds(client: tq.Client) -> None:
    meta = client.put(COLUMNS, partition_id="kinds")
    for device in ("npu", "npu:0", torch.device("npu")):
        found = client.get_columns(meta, device=device)
        assert set(found) == set(COLUMNS)
        for name, column in COLUMNS.items():
            assert_same(back(found[name]), column)
    data = client.get_data(meta, device="npu")
    assert_same(back(data["x"]), COLUMNS["x"])
    assert data.get("note").tolist() == COLUMNS["note"]
    tq.kv_batch_put(["k1", "k2", "k3"], "keys", {"x": COLUMNS["x"]})
    by_key = tq.kv_batch_get(["k3", "k1"], "keys", device="npu")
    assert_same(back(by_key["x"]), COLUMNS["x"][[2, 0]])


def check_rows_of_several_puts(client: tq.Client) -> None:
    """In pieces of a few rows each, whatever the runs are."""
    ids = torch.nested.as_nested_tensor(
        [torch.arange(n % 4) + n for n in range(24)], layout=torch.jagged
    )
    columns = {"x": torch.arange(96.0).view(24, 4), "ids": ids}
    parts = [
        client.put(
            {
                "x": columns["x"][first : first + 8],
                "ids": torch.nested.as_nested_tensor(
                    list(ids.unbind())[first : first + 8], layout=torch.jagged
                ),
            },
            partition_id="several",
        )
        for first in (0, 8, 16)
    ]
    whole = tq.BatchMeta.concat(parts)
    size, pieces._PIECE_BYTES = pieces._PIECE_BYTES, 40
    for order in (list(range(24)), list(range(23, -1, -1)), [7, 8, 9, 3, 3, 20, 4, 5, 6]):
        found = client.get_columns(whole.select_samples(order), device="npu")
        expected = client.get_columns(whole.select_samples(order))
        for name in columns:
            assert_same(back(found[name]), expected[name])
    pieces._PIECE_BYTES = size


def check_the_callers_stream_is_used(client: tq.Client) -> None:
    npu.use(npu.Stream("mine"))
    npu.events.clear()
    meta = client.put({"x": COLUMNS["x"].to("npu") * 2}, partition_id="streams")
    assert set(npu.events) == {"in mine", "out mine", *_waits()}
    npu.events.clear()
    found = client.get_columns(meta, device="npu")["x"]
    assert set(npu.events) == {"in mine"}
    assert_same(back(found), COLUMNS["x"] * 2)
    npu.use(npu.Stream("another"))  # also where the call does not block
    npu.events.clear()
    asyncio.run(client.async_get_columns(meta, device="npu"))
    assert set(npu.events) == {"in another"}
    npu.events.clear()
    client.put({"o": [{"t": found}, found, 1]}, meta)
    assert set(npu.events) == {"out another", *(w.replace("mine", "another") for w in _waits())}
    values = client.get_columns(meta, ["o"], device="npu")["o"]
    assert_same(values, [{"t": COLUMNS["x"] * 2}, COLUMNS["x"] * 2, 1])


def _waits() -> set[str]:
    return {"waited for mine"} if devices.pinned(1) is not None else set()


def check_jagged_columns_from_the_device(client: tq.Client) -> None:
    meta = client.put({"ids": JAGGED}, partition_id="out")
    found = client.get_columns(meta, device="npu")
    again = client.put({"again": found["ids"]}, meta)
    assert_same(client.get_columns(again, ["again"])["again"], JAGGED)


def check_fields_of_equal_lengths_can_be_combined(client: tq.Client) -> None:
    meta = client.put({"a": JAGGED, "b": JAGGED + 1}, partition_id="combined")
    found = client.get_columns(meta, device="npu")
    assert found["a"].shape == found["b"].shape
    assert_same(back(found["a"] * found["b"]), JAGGED * (JAGGED + 1))


def check_the_bridge(client: tq.Client) -> None:
    meta = client.put({"x": COLUMNS["x"]}, partition_id="bridge")
    npu.use(npu.Stream("mine"))

    def double(data: Any) -> Any:
        x = data.batch["x"]
        assert x.device == torch.device("npu:0")
        return type(data).from_dict({"y": x * 2})

    async def adouble(data: Any) -> Any:
        return double(data)

    for call in (tqbridge()(double), lambda m: asyncio.run(tqbridge()(adouble)(m))):
        npu.events.clear()
        out = call(meta)
        assert {event.split()[-1] for event in npu.events} == {"mine"}
        assert_same(client.get_columns(out, ["y"])["y"], COLUMNS["x"] * 2)
        client.clear_samples(meta)
        meta = client.put({"x": COLUMNS["x"]}, partition_id="bridge")


def check_a_device_that_is_not_there(client: tq.Client) -> None:
    meta = client.put({"x": COLUMNS["x"]}, partition_id="absent")
    for absent in ("npu:1", "cuda", "tpu"):
        with pytest.raises(tq.InputError, match=f"'{absent}' .* which has cpu, npu:0\\."):
            client.get_columns(meta, device=absent)


CHECKS: list[Callable[[tq.Client], None]] = [
    check_all_kinds,
    check_rows_of_several_puts,
    check_the_callers_stream_is_used,
    check_jagged_columns_from_the_device,
    check_fields_of_equal_lengths_can_be_combined,
    check_the_bridge,
    check_a_device_that_is_not_there,
]


def run_all(client: tq.Client) -> None:
    for check in CHECKS:
        check(client)


def main(url: str, namespace: str) -> None:
    tq.init(
        {
            "redis": {"url": url, "namespace": namespace},
            "data": {"backend": "memory"},
            "timeout_s": 20,
        }
    )
    run_all(tq.get_client())  # this device has no pinned memory: copies are waited for

    def pinned(nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    devices.pinned = pieces.pinned = pinned
    for partition in tq.get_client().get_partition_list():
        tq.get_client().clear_partition(partition)
    run_all(tq.get_client())
    tq.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
