"""tqbridge and meta_dispatch in verl's own worker groups, over Ray."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

import tq_redis as tq
from tq_redis.bridge import MetaFuture, call_actors, meta_dispatch, tqbridge


class Grid(Worker):
    """Two data-parallel ranks of two tensor-parallel ranks each; the first of a pair collects."""

    def __init__(self) -> None:
        super().__init__()
        self._register_dispatch_collect_info("grid", self.rank // 2, self.rank % 2 == 0)

    @register(dispatch_mode=meta_dispatch("grid"))
    @tqbridge(reads=("x",), writes=("y", "rank"))
    def compute(self, data: DataProto, factor: int) -> DataProto:
        y = data.batch["x"] * factor
        if self.rank % 2:
            y.fill_(-1)  # would be seen if this rank wrote too
        return DataProto.from_dict(
            {"y": y, "rank": torch.full((len(data),), self.rank)},
            meta_info={"metrics": {"loss": float(self.rank)}, "same": 1},
        )

    @register(dispatch_mode=meta_dispatch("grid", pad=True))
    @tqbridge(reads=("x",), writes=("z",))
    def padded(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"z": data.batch["x"] + len(data) / 100})

    @register(dispatch_mode=meta_dispatch("grid"), blocking=False)
    @tqbridge(reads=("x",), writes=("later",))
    def later(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"later": data.batch["x"]})

    @register(dispatch_mode=meta_dispatch("grid"))
    @tqbridge(reads=("x",))
    def fail(self, data: DataProto) -> DataProto:
        raise tq.NotReadyError("not yet", fields=["x"], rows=[1])


@pytest.fixture(scope="module")
def group(ray_session: None, redis_url: str) -> Iterator[Any]:
    tq.init({"redis": {"url": redis_url, "namespace": "worker-group"}})
    pool = RayResourcePool([4], use_gpu=False, max_colocate_count=1)
    workers = RayWorkerGroup(
        resource_pool=pool,
        ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(Grid)),
        device_name="cpu",
    )
    yield workers
    for worker in workers.workers:
        ray.kill(worker)
    for placement in pool.pgs or ():
        ray.util.remove_placement_group(placement)
    tq.close()


@pytest.fixture
def samples(group: Any) -> Iterator[tq.BatchMeta]:
    client = tq.get_client()
    yield client.put({"x": torch.arange(6.0)}, partition_id="p")
    client.clear_partition("p")


def test_one_call_over_all_ranks(group: Any, samples: tq.BatchMeta) -> None:
    out = group.compute(samples, 10)

    assert out.global_indexes == samples.global_indexes
    assert out.extra_info == {"metrics": {"loss": [0.0, 2.0]}, "same": 1}
    columns = tq.get_client().get_columns(out, ["y", "rank"])
    assert columns["y"].tolist() == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
    assert columns["rank"].tolist() == [0, 0, 0, 2, 2, 2]


def test_a_plain_dataproto_takes_the_same_way(group: Any) -> None:
    out = group.compute(DataProto.from_dict({"x": torch.arange(4.0)}), 2)
    assert out.batch["y"].tolist() == [0.0, 2.0, 4.0, 6.0]


def test_uneven_batches_are_refused_or_padded(group: Any, samples: tq.BatchMeta) -> None:
    five = samples[:5]
    with pytest.raises(tq.InputError, match="5 samples cannot be shared evenly by 2 ranks"):
        group.compute(five, 1)

    out = group.padded(five)

    assert out.global_indexes == five.global_indexes
    values = tq.get_client().get_columns(out, ["z"])["z"]
    assert torch.allclose(values, torch.arange(5.0) + 0.03)  # each rank saw three rows
    assert tq.get_client().get_summary("p")["produced:z"] == 5


def test_verls_own_batches_are_padded_too_and_come_back_without(group: Any) -> None:
    out = group.padded(DataProto.from_dict({"x": torch.arange(5.0)}))

    assert torch.allclose(out.batch["z"], torch.arange(5.0) + 0.03)


class Alone:
    """An actor that is in no worker group."""

    @tqbridge(reads=("x",), writes=("doubled",))
    def double(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"doubled": data.batch["x"] * 2})


def test_actors_that_are_no_worker_group_share_a_batch(group: Any, samples: tq.BatchMeta) -> None:
    kind: Any = ray.remote(num_cpus=0)(Alone)
    actors = [kind.remote() for _ in range(2)]
    methods = [actor.double for actor in actors]
    try:
        written = call_actors(samples[:5], methods).get()
        plain = call_actors(DataProto.from_dict({"x": torch.arange(3.0)}), methods).get()
        with pytest.raises(tq.InputError, match="Cannot share a int"):
            call_actors(3, methods)
    finally:
        for actor in actors:
            ray.kill(actor)

    columns = tq.get_client().get_columns(written, ["doubled"])
    assert columns["doubled"].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert plain.batch["doubled"].tolist() == [0.0, 2.0, 4.0]


def test_a_call_that_does_not_block(group: Any, samples: tq.BatchMeta) -> None:
    future = group.later(samples)
    assert isinstance(future, MetaFuture)
    assert future.get(timeout=60).field_names == ["later", "x"]


def test_errors_keep_their_type_and_facts(group: Any, samples: tq.BatchMeta) -> None:
    with pytest.raises(tq.NotReadyError, match="not yet") as caught:
        group.fail(samples)
    error: Any = caught.value  # Ray's: both its own error and ours
    assert error.cause.rows == (1,)
