"""The low-level client: writing, reading, tags, clearing and status, case by case."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.compat.peer import differs, tq


def columns(rows: int, **more: Any) -> TensorDict:
    return TensorDict(
        {"x": torch.tensor([[2 * n, 2 * n + 1] for n in range(rows)]), **more}, batch_size=rows
    )


def rows_of(data: TensorDict, field: str = "x") -> list[Any]:
    column: Any = data[field]
    return [row.tolist() for row in column.unbind()]


def by_id(meta: Any, values: list[Any]) -> dict[int, Any]:
    """Values of the rows. transfer_queue gives indexes out again, so that they may not ascend."""
    return dict(zip(meta.global_indexes, values, strict=True))


def everything(client: Any, partition: str, *fields: str) -> Any:
    return client.get_meta(list(fields), 1, partition, mode="force_fetch")


# Writing


def test_a_put_without_metadata_appends(client: Any) -> None:
    one = client.put(columns(2), partition_id="p")
    two = client.put(columns(3), partition_id="p")
    assert (one.size, one.is_ready, one.field_names) == (2, True, ["x"])
    assert not set(one.global_indexes) & set(two.global_indexes)
    assert everything(client, "p", "x").size == 5
    assert rows_of(client.get_data(two)) == [[0, 1], [2, 3], [4, 5]]


def test_a_put_with_metadata_adds_to_its_rows(client: Any) -> None:
    meta = client.put(columns(3), partition_id="p")
    returned = client.put(TensorDict({"y": torch.arange(3)}, batch_size=3), metadata=meta)
    assert returned is meta
    assert meta.field_names == ["x", "y"]
    client.put(columns(2) * 10, metadata=meta.select_samples([2, 0]))
    assert rows_of(client.get_data(meta)) == [[20, 30], [2, 3], [0, 10]]
    assert client.get_data(meta)["y"].tolist() == [0, 1, 2]


def test_inserted_rows_are_filled_later(client: Any) -> None:
    meta = client.get_meta(["x"], 2, "p", mode="insert")
    assert (meta.size, meta.is_ready, meta.field_names) == (2, False, ["x"])
    assert everything(client, "p", "x").production_status.tolist() == [0, 0]
    client.put(columns(2), metadata=meta)
    assert everything(client, "p", "x").is_ready


def test_rows_of_several_partitions_go_together(client: Any) -> None:
    one = client.put(columns(2), partition_id="p")
    two = client.put(columns(2), partition_id="q")
    both = tq.BatchMeta.concat([one, two])
    both.reorder([2, 0, 3, 1])
    client.put(TensorDict({"y": torch.arange(4)}, batch_size=4), metadata=both)
    assert client.get_data(both)["y"].tolist() == [0, 1, 2, 3]
    assert client.get_data(client.get_meta(["y"], 1, "q", mode="force_fetch"))["y"].tolist() == [
        0,
        2,
    ]
    client.clear_samples(both)
    assert everything(client, "p", "x").size == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"data": columns(2)},
        {"data": TensorDict({}, batch_size=0), "partition_id": "p"},
    ],
)
def test_a_bad_put_is_refused(client: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        client.put(**arguments)


@differs("the rows that are there are written before it fails")
def test_a_put_needs_as_many_rows_as_the_metadata(client: Any) -> None:
    meta = client.put(columns(2), partition_id="p")
    with pytest.raises(ValueError, match="3 rows for 2"):
        client.put(columns(3) + 7, metadata=meta)
    assert rows_of(client.get_data(meta)) == [[0, 1], [2, 3]]


@differs("indexes are given out again, so that the old metadata writes another sample's row")
def test_stale_metadata_is_an_error(client: Any) -> None:
    meta = client.put(columns(2), partition_id="p")
    client.clear_samples(meta)
    new = client.put(columns(2), partition_id="p")
    assert not set(meta.global_indexes) & set(new.global_indexes)
    for call in (lambda: client.put(columns(2), metadata=meta), lambda: client.get_data(meta)):
        with pytest.raises(tq.StorageKeyNotFoundError):
            call()


def test_what_belongs_to_a_batch_is_not_stored(client: Any) -> None:
    meta = client.put(columns(2), partition_id="p")
    meta.extra_info = {"temperature": 0.5}
    assert client.put(columns(2), metadata=meta).extra_info == {"temperature": 0.5}
    assert everything(client, "p", "x").extra_info == {}


# Reading


def test_data_comes_in_the_order_of_rows_and_fields(client: Any) -> None:
    meta = client.put(columns(3, y=torch.ones(3)), partition_id="p")
    got = client.get_data(meta.select_samples([2, 0, 2]))
    assert rows_of(got) == [[4, 5], [0, 1], [4, 5]]
    assert list(client.get_data(meta.select_fields(["y"])).keys()) == ["y"]


def test_nothing_asked_is_nothing_got(client: Any) -> None:
    meta = client.put(columns(2), partition_id="p")
    for empty in (tq.BatchMeta.empty(), meta.select_fields([])):
        got = client.get_data(empty)
        assert (list(got.keys()), got.batch_size) == ([], torch.Size([0]))


def test_reading_consumes_nothing(client: Any) -> None:
    meta = client.put(columns(2), partition_id="p")
    client.get_data(meta)
    assert client.get_consumption_status("t", "p")[1].tolist() == [0, 0]


def test_rows_that_were_cleared_cannot_be_read(client: Any) -> None:
    meta = client.put(columns(2), partition_id="p")
    client.clear_samples(meta)
    with pytest.raises(tq.StorageKeyNotFoundError):
        client.get_data(meta)
    assert issubclass(tq.StorageKeyNotFoundError, KeyError)


# Tags


def test_tags_of_the_metadata_are_put_with_it(client: Any) -> None:
    meta = client.put(columns(2), partition_id="p")
    meta.update_custom_meta([{"a": 1}, {"a": 2}])
    client.put(TensorDict({"y": torch.ones(2)}, batch_size=2), metadata=meta)
    found = everything(client, "p", "x")
    assert by_id(found, found.custom_meta) == by_id(meta, [{"a": 1}, {"a": 2}])


def test_tags_can_be_replaced(client: Any) -> None:
    tq.kv_batch_put(["k", "l"], "p", columns(2), [{"a": 1, "b": 1}, {}])
    meta = client.kv_retrieve_meta(["k", "l"], "p")
    meta.custom_meta = [{"b": 2}, {"c": 3}]
    client.set_custom_meta(meta)
    assert tq.kv_list("p") == {"p": {"k": {"b": 2}, "l": {"c": 3}}}
    client.set_custom_meta(tq.BatchMeta([1], ["nowhere"], custom_meta=[{"a": 1}]))


@differs("all tags of the metadata replace those that are there")
def test_a_put_does_not_undo_tags_that_changed_meanwhile(client: Any) -> None:
    tq.kv_put("k", "p", {"x": torch.ones(1)}, {"status": "running", "mine": 0})
    meta = client.kv_retrieve_meta("k", "p")
    tq.kv_put("k", "p", tag={"status": "finished"})
    meta.custom_meta[0]["mine"] = 1
    client.put(TensorDict({"y": torch.ones(1)}, batch_size=1), metadata=meta)
    assert tq.kv_list("p") == {"p": {"k": {"status": "finished", "mine": 1}}}


# Keys


def test_metadata_of_keys(client: Any) -> None:
    tq.kv_batch_put(["a", "b"], "p", columns(2), [{"n": 1}, {"n": 2}])
    tq.kv_put("a", "p", {"part": torch.ones(1)})
    meta = client.kv_retrieve_meta(["b", "gone", "a"], "p")
    assert (meta.size, meta.field_names, meta.is_ready) == (2, ["x"], True)
    assert meta.custom_meta == [{"n": 2}, {"n": 1}]
    assert meta.partition_ids == ["p", "p"]
    assert meta.get_dtypes("x") == [torch.int64] * 2
    assert client.kv_retrieve_keys(meta.global_indexes, "p") == ["b", "a"]
    assert client.kv_retrieve_keys(meta.global_indexes[0], "p") == ["b"]
    assert client.kv_retrieve_meta("gone", "p").size == 0
    assert client.kv_retrieve_meta("a", "nowhere").size == 0
    assert client.kv_list() == tq.kv_list()


def test_keys_can_be_made_without_columns(client: Any) -> None:
    meta = client.kv_retrieve_meta(["a", "b"], "p", create=True)
    assert (meta.size, meta.is_ready) == (2, False)
    assert client.kv_retrieve_meta(["a", "b"], "p").global_indexes == meta.global_indexes
    assert tq.kv_list("p") == {"p": {"a": {}, "b": {}}}


@pytest.mark.parametrize(("keys", "error"), [([], ValueError), ([1], TypeError)])
def test_bad_keys_are_refused(client: Any, keys: list[Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        client.kv_retrieve_meta(keys, "p")


def test_a_partition_that_is_not_there_has_no_keys(client: Any) -> None:
    with pytest.raises(RuntimeError):
        client.kv_retrieve_keys([1], "nowhere")


@differs("None stands in the list")
def test_rows_without_a_key_have_none(client: Any) -> None:
    meta = client.put(columns(2), partition_id="p")
    with pytest.raises(RuntimeError):
        client.kv_retrieve_keys(meta.global_indexes, "p")


# Clearing


def test_clearing_samples_forgets_them_for_all(client: Any) -> None:
    meta = client.put(columns(4), partition_id="p")
    client.get_meta(["x"], 2, "p", task_name="t")
    client.clear_samples(meta.select_samples([0, 1, 3]))
    ids, flags = client.get_consumption_status("t", "p")
    assert (ids.tolist(), flags.tolist()) == ([meta.global_indexes[2]], [0])
    client.clear_samples(meta)
    client.clear_samples(meta)
    client.clear_samples(tq.BatchMeta([1], ["nowhere"]))


def test_clearing_a_partition_forgets_it(client: Any) -> None:
    client.put(columns(2), partition_id="p")
    client.put(columns(2), partition_id="q")
    client.clear_partition("p")
    client.clear_partition("p")
    assert client.get_partition_list() == ["q"]
    assert client.get_consumption_status("t", "p") == (None, None)


# Status


def test_status_of_production(client: Any) -> None:
    meta = client.put(columns(3), partition_id="p")
    client.put(TensorDict({"y": torch.ones(1)}, batch_size=1), metadata=meta[1])
    ids, flags = client.get_production_status(["x", "y"], "p")
    assert dict(zip(ids.tolist(), flags.tolist(), strict=True)) == by_id(
        meta, [[1, 0], [1, 1], [1, 0]]
    )
    assert flags.dtype == torch.int8
    assert client.check_production_status(["x"], "p") is True
    assert client.check_production_status(["x", "y"], "p") is False
    assert client.check_production_status(["unknown"], "p") is False
    assert client.check_production_status(["x"], "nowhere") is False
    for fields, partition in ((["x", "unknown"], "p"), (["x"], "nowhere")):
        assert client.get_production_status(fields, partition) == (None, None)


def test_status_of_consumption(client: Any) -> None:
    meta = client.put(columns(3), partition_id="p")
    client.get_meta(["x"], 2, "p", task_name="t")
    ids, flags = client.get_consumption_status("t", "p")
    assert ids.tolist() == sorted(meta.global_indexes)
    assert (flags.tolist(), flags.dtype) == ([1, 1, 0], torch.int8)
    assert client.check_consumption_status("t", "p") is False
    client.get_meta(["x"], 1, "p", task_name="t")
    assert client.check_consumption_status("t", "p") is True
    assert client.check_consumption_status("t", "nowhere") is False


def test_consumption_can_be_reset(client: Any) -> None:
    client.put(columns(2), partition_id="p")
    for task in ("t", "u"):
        client.get_meta(["x"], 2, "p", task_name=task)
    assert client.reset_consumption("p", "t") is True
    assert client.get_meta(["x"], 2, "p", task_name="t").size == 2
    assert client.reset_consumption("p") is True
    for task in ("t", "u"):
        assert client.get_consumption_status(task, "p")[1].tolist() == [0, 0]
    assert client.reset_consumption("nowhere") is True


def test_a_partition_without_samples_is_not_consumed(client: Any) -> None:
    meta = client.put(columns(2), partition_id="p")
    client.get_meta(["x"], 2, "p", task_name="t")
    client.clear_samples(meta)
    assert client.check_consumption_status("t", "p") is False
    assert client.get_partition_list() == ["p"]


@differs("True")
def test_a_partition_without_samples_is_not_produced(client: Any) -> None:
    client.clear_samples(client.put(columns(2), partition_id="p"))
    assert client.check_production_status(["x"], "p") is False


# Loops


def test_twins_can_be_awaited_from_any_loop(client: Any) -> None:
    async def use(partition: str) -> None:
        meta = await client.async_put(columns(2), partition_id=partition)
        claimed = await client.async_get_meta(["x"], 2, partition, task_name="t")
        assert claimed.global_indexes == sorted(meta.global_indexes)
        assert rows_of(await client.async_get_data(meta)) == [[0, 1], [2, 3]]
        await client.async_set_custom_meta(meta)
        assert await client.async_check_consumption_status("t", partition)
        assert await client.async_check_production_status(["x"], partition)
        assert (await client.async_get_consumption_status("t", partition))[1].tolist() == [1, 1]
        assert (await client.async_get_production_status(["x"], partition))[1].sum() == 2
        assert await client.async_reset_consumption(partition)
        assert partition in await client.async_get_partition_list()
        assert (await client.async_kv_retrieve_meta(keys=["k"], partition_id=partition)).size == 0
        assert await client.async_kv_list(partition) == {partition: {}}
        await client.async_clear_samples(meta)
        await client.async_clear_partition(partition)

    for partition in ("p", "q"):
        asyncio.run(use(partition))


@differs("all other calls wait too")
def test_who_waits_for_samples_holds_up_nobody(client: Any) -> None:
    async def use() -> Any:
        waiting = asyncio.create_task(client.async_get_meta(["x"], 2, "p", task_name="t"))
        await asyncio.sleep(0)
        await asyncio.wait_for(client.async_put(columns(2), partition_id="p"), 2)
        return await asyncio.wait_for(waiting, 2)

    assert asyncio.run(use()).size == 2
