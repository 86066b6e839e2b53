"""One batch through its tasks, on a real queue, with workers in this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from verl import DataProto

import tq_redis
from recipe.ppo.step import Step
from tq_redis.bridge import tqbridge


class Counter:
    """Two tasks, the second of which needs what the first wrote."""

    @tqbridge(reads=("word",), writes=("length",))
    def measure(self, data: DataProto) -> DataProto:
        lengths = [len(word) for word in data.non_tensor_batch["word"]]
        metrics = {"length/mean": [float(value) for value in lengths], "length/max": lengths}
        return DataProto.from_dict(
            {"length": torch.tensor(lengths)}, meta_info={"metrics": metrics}
        )

    @tqbridge(reads=("length",), writes=())
    def check(self, data: DataProto) -> DataProto:
        if data.meta_info.get("strict") and data.batch["length"].max() > 3:
            raise ArithmeticError("too long")
        assert set(data.batch.keys()) == {"length"}
        assert not data.non_tensor_batch
        return DataProto()


def put_words(step: Step) -> None:
    step.put({"word": ["sun", "druse"], "uid": ["0", "1"]}, group_ids=["0", "1"])


def test_tasks_pass_columns_to_each_other_and_metrics_to_the_driver(
    client: tq_redis.Client,
) -> None:
    with Step(client, "train_1") as step:
        put_words(step)
        step.run("measure", Counter.measure, Counter())
        step.run("check", Counter.check, Counter())
        summary = client.get_summary("train_1")

    assert summary["produced:length"] == summary["consumed:check"] == 2
    assert step.metrics["length/mean"] == 4.0
    assert step.metrics["length/max"] == 5.0
    assert {"timing_s/put", "timing_s/measure", "timing_s/check"} <= set(step.metrics)


def test_the_driver_keeps_no_column(client: tq_redis.Client) -> None:
    with Step(client, "train_1") as step:
        put_words(step)
        step.run("measure", Counter.measure, Counter())
        held = [value for value in vars(step).values() if value is not client]

    assert all(isinstance(value, str | int | dict) for value in held)
    assert all(isinstance(value, float) for value in step.metrics.values())


def test_the_partition_is_gone_after_the_step(client: tq_redis.Client) -> None:
    with Step(client, "train_1") as step:
        put_words(step)
        assert client.get_partition_list() == ["train_1"]

    assert client.get_partition_list() == []


def test_the_partition_is_gone_after_a_task_failed(client: tq_redis.Client) -> None:
    with pytest.raises(ArithmeticError, match="too long"), Step(client, "train_1") as step:
        put_words(step)
        step.run("measure", Counter.measure, Counter())
        step.run("check", Counter.check, Counter(), strict=True)

    assert client.get_partition_list() == []


def test_a_task_takes_each_sample_once(client: tq_redis.Client) -> None:
    with Step(client, "train_1") as step:
        put_words(step)
        step.run("measure", Counter.measure, Counter())
        again: Any = client.get_meta(["word"], 2, "train_1", task_name="measure", timeout=0)

    assert again.size == 0
