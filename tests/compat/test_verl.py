"""What verl 0.9.1 does with transfer_queue, step by step, without a trainer."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from tests.compat.conftest import Start
from tests.compat.peer import IS_PEER, stack, tq

pytest.importorskip("verl")
pytestmark = pytest.mark.skipif(IS_PEER, reason="verl is not in its environment")


@pytest.fixture
def bridge(start: Start, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A second copy of verl's bridge, which finds the drop-in where it imports transfer_queue, and
    a queue with rows. The first copy may have been imported without any."""
    monkeypatch.setitem(sys.modules, "transfer_queue", tq)
    spec = importlib.util.find_spec("verl.utils.transferqueue_utils")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    start()
    nested = torch.nested.as_nested_tensor(
        [torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged
    )
    tq.kv_batch_put(
        ["a_0_0", "b_0_0"],
        "train",
        TensorDict({"responses": nested, "uid": stack("a", "b")}, batch_size=2),
        [{"seq_len": 2, "status": "success"}, {"seq_len": 1, "status": "success"}],
    )
    yield module
    module._shutdown_async_bridge_runtime()


def batch(fields: list[str] | None = None) -> Any:
    keys = ["b_0_0", "a_0_0"]
    meta = tq.KVBatchMeta(partition_id="train", keys=keys, tags=[{"n": 1}, {"n": 2}], fields=fields)
    meta.extra_info["temperature"] = 0.5
    return meta


def double(data: TensorDict) -> TensorDict:
    """A worker's method."""
    assert data["temperature"] == 0.5
    made: Any = TensorDict({"doubled": data["responses"] * 2}, batch_size=data.batch_size)
    made["metrics"] = NonTensorData({"loss": 1.0})
    return made


def check(returned: Any) -> None:
    assert isinstance(returned, tq.KVBatchMeta)
    assert returned.keys == ["b_0_0", "a_0_0"]
    assert returned.tags == [{"n": 1}, {"n": 2}]
    assert set(returned.fields or ()) >= {"doubled"}
    assert returned.extra_info == {"metrics": {"loss": 1.0}}
    got = tq.kv_batch_get(["a_0_0", "b_0_0"], "train", ["doubled"])["doubled"]
    assert [row.tolist() for row in got.unbind()] == [[2, 4], [6]]
    assert tq.kv_list("train")["train"]["a_0_0"] == {"seq_len": 2, "status": "success"}


def test_a_worker_method_reads_and_writes(bridge: Any) -> None:
    check(bridge.tqbridge()(double)(batch(["responses"])))


def test_a_coroutine_reads_and_writes(bridge: Any) -> None:
    async def work(data: TensorDict) -> TensorDict:
        return double(data)

    check(asyncio.run(bridge.tqbridge()(work)(batch())))


def test_a_batch_is_dealt_out_to_ranks_and_collected(bridge: Any) -> None:
    whole = bridge.kv_batch_meta2batch_meta(batch())
    parts = whole.chunk(chunks=2)
    results = [bridge.tqbridge()(double)(part) for part in parts]
    for part in results:
        part.extra_info = {}
    together = bridge.batch_meta2kv_batch_meta(tq.BatchMeta.concat(results))
    assert together.keys == ["b_0_0", "a_0_0"]
    assert "doubled" in together.fields


def test_a_rank_that_is_not_collected_returns_an_empty_batch(bridge: Any) -> None:
    returned = bridge._postprocess_common(TensorDict({}, batch_size=0), True, False)
    assert (type(returned), returned.size) == (tq.BatchMeta, 0)


def test_a_prompt_goes_through_its_states(bridge: Any) -> None:
    tq.kv_batch_put(["a"], "train", tags=[{"is_prompt": True, "global_steps": 1}])

    async def generate() -> None:
        await tq.async_kv_put(key="a", partition_id="train", tag={"status": "running"})
        await tq.async_kv_put(key="a", partition_id="train", tag={"status": "finished"})

    asyncio.run(generate())
    listed = tq.kv_list()["train"]
    assert listed["a"] == {"is_prompt": True, "global_steps": 1, "status": "finished"}
    tq.kv_clear(partition_id="train", keys=["a", "gone"])
    assert sorted(tq.kv_list("train")["train"]) == ["a_0_0", "b_0_0"]


def test_the_returned_batch_is_used_on(bridge: Any) -> None:
    data = tq.kv_batch_get(
        keys=batch().keys, partition_id="train", select_fields=["responses", "values", "uid"]
    )
    assert data.pop("uid").tolist() == ["b", "a"]
    advantages = TensorDict({"advantages": data["responses"].float()}, batch_size=2)
    meta = tq.kv_batch_put(keys=batch().keys, partition_id="train", fields=advantages)
    meta.extra_info["global_token_num"] = [1, 2]
    meta.extra_info.update({"step": 1})
    meta.reorder([1, 0])
    got = tq.kv_batch_get(meta.keys, meta.partition_id, ["advantages"])["advantages"]
    assert got.offsets().diff().tolist() == [2, 1]
    tq.kv_clear(keys=meta.keys, partition_id=meta.partition_id)
    assert tq.kv_list("train") == {"train": {}}


def test_verls_modules_import_with_the_drop_in() -> None:
    code = (
        "from tq_redis.compat import install; install()\n"
        "import verl.trainer.ppo.v1.replay_buffer as r, verl.protocol\n"
        "import verl.trainer.ppo.padding_utils as p\n"
        "print(r.KVBatchMeta.__module__, p.tq.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    ours = "tq_redis.compat.transfer_queue"
    assert done.stdout.split()[-2:] == [f"{ours}.metadata.kv", ours], done.stderr
