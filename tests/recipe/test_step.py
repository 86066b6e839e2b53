"""One batch through its tasks, with workers in this process: over a real queue, and plain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from verl import DataProto

import tq_redis
from recipe.ppo.plain_step import PlainStep
from recipe.ppo.queue_step import QueueStep
from recipe.ppo.step import Step
from tq_redis import BaseSampler, ConfigError
from tq_redis.bridge import tqbridge
from tq_redis.samplers import Ready

Begin = Callable[[str], Step]


class Counter:
    """Tasks, of which the later ones need what the first wrote."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    @tqbridge(reads=("word",), writes=("length",), tags=("total_lengths",))
    def measure(self, data: DataProto) -> DataProto:
        self.seen.append(list(data.non_tensor_batch["word"]))
        lengths = [len(word) for word in data.non_tensor_batch["word"]]
        metrics = {"length/mean": [float(value) for value in lengths], "length/max": lengths}
        columns = {name: torch.tensor(lengths) for name in ("length", "total_lengths", "unasked")}
        return DataProto.from_dict(columns, meta_info={"metrics": metrics, "note": 7})

    @tqbridge(reads=("length",), may_read=("bonus",), writes=("score",))
    def score(self, data: DataProto) -> DataProto:
        if data.meta_info.get("strict") and data.batch["length"].max() > 3:
            raise ArithmeticError("too long")
        assert not data.non_tensor_batch
        return DataProto.from_dict({"score": data.batch["length"] + data.batch.get("bonus", 0)})

    @tqbridge(reads=("length",), writes=("bonus",))
    def add(self, data: DataProto, other: DataProto) -> DataProto:
        return DataProto.from_dict({"bonus": data.batch["length"] * 0 + other.batch["length"]})

    @tqbridge(reads=("word", "length"), writes=())
    def look(self, data: DataProto) -> DataProto:
        assert sorted(data.batch.keys()) == ["length"]
        self.seen.append(list(data.non_tensor_batch["word"]))
        return DataProto()


@pytest.fixture(params=["queue", "leases", "plain"])
def begin(request: pytest.FixtureRequest, client: tq_redis.Client) -> Begin:
    return {
        "queue": lambda name: QueueStep(client, name),
        "leases": lambda name: QueueStep(client, name, lease_s=30.0),
        "plain": PlainStep,
    }[request.param]


def put_words(step: Step, *words: str, repeat: int = 1) -> None:
    step.put({"word": words}, [str(row) for row in range(len(words))], repeat)


def test_tasks_pass_columns_to_each_other_and_metrics_to_the_driver(begin: Begin) -> None:
    counter = Counter()
    with begin("train_1") as step:
        put_words(step, "sun", "druse")
        assert step.run("measure", Counter.measure, counter) == {"note": 7}
        step.run("score", Counter.score, counter)
        step.run("look", Counter.look, counter)

    assert counter.seen == [["sun", "druse"]] * 2
    assert step.metrics["length/mean"] == 4.0
    assert step.metrics["length/max"] == 5.0
    assert set(step.seconds) == {"put", "measure", "score", "look"}


def test_answers_to_one_prompt_lie_together(begin: Begin) -> None:
    counter = Counter()
    with begin("train_1") as step:
        put_words(step, "a", "b", repeat=2)
        step.run("measure", Counter.measure, counter)

    assert step.size == 4
    assert counter.seen == [["a", "a", "b", "b"]]


def test_a_task_takes_what_was_put_since_it_last_ran(begin: Begin) -> None:
    counter = Counter()
    with begin("val_1") as step:
        for words in (("sun", "moon"), ("star",)):
            put_words(step, *words)
            step.run("measure", Counter.measure, counter)
        step.run("look", Counter.look, counter)

    assert counter.seen == [["sun", "moon"], ["star"], ["sun", "moon", "star"]]


def test_a_task_may_take_the_samples_of_another_step_too(begin: Begin) -> None:
    counter = Counter()
    with begin("train_1") as step, begin("greedy_1") as other:
        put_words(step, "a", "bb")
        put_words(other, "ccc", "dddd")
        for each in (step, other):
            each.run("measure", Counter.measure, counter)
        step.run("add", Counter.add, counter, other)
        step.run("score", Counter.score, counter)
        assert columns(step, "score") == [4, 6]


def columns(step: Step, name: str) -> list[Any]:
    """What the step holds, in the order in which the next task gets it."""
    found: list[Any] = []

    class Reader:
        @tqbridge(reads=(name,), writes=())
        def read(self, data: DataProto) -> DataProto:
            found.extend(data.batch[name].tolist())
            return DataProto()

    step.run(f"read {name}", Reader.read, Reader())
    return found


def test_parts_are_balanced_by_tokens_and_all_later_tasks_see_that_order(begin: Begin) -> None:
    with begin("train_1") as step:
        put_words(step, "a" * 8, "b" * 8, "c", "d")
        step.run("measure", Counter.measure, Counter())
        step.balance(2)
        lengths = columns(step, "length")
        step.run("score", Counter.score, Counter())

        assert sorted(lengths[:2]) == sorted(lengths[2:]) == [1, 8]
        assert columns(step, "score") == lengths
    assert step.metrics["global_seqlen/minmax_diff"] == 14
    assert step.metrics["global_seqlen/balanced_max"] == 9


def test_the_step_is_gone_after_a_task_failed(begin: Begin, client: tq_redis.Client) -> None:
    with pytest.raises(ArithmeticError, match="too long"), begin("train_1") as step:
        put_words(step, "sun", "druse")
        step.run("measure", Counter.measure, Counter())
        step.run("score", Counter.score, Counter(), strict=True)

    assert client.get_partition_list() == []


def test_progress_is_in_the_queue_while_the_step_lives(client: tq_redis.Client) -> None:
    with QueueStep(client, "train_1") as step:
        put_words(step, "sun", "druse")
        step.run("measure", Counter.measure, Counter())
        step.run("score", Counter.score, Counter())
        summary = client.get_summary("train_1")

    assert summary["produced:length"] == summary["consumed:score"] == 2
    assert client.get_partition_list() == []


class LastFirst(BaseSampler):
    """Takes so many samples, the newest first."""

    def __init__(self, most: int) -> None:
        self.most = most

    def sample(self, ready: Ready, batch_size: int, **sampling_config: Any) -> Sequence[int]:
        return list(reversed(ready.ids))[: self.most]


def test_a_sampler_orders_the_samples_of_each_task(client: tq_redis.Client) -> None:
    counter = Counter()
    with QueueStep(client, "train_1", sampler=LastFirst(3)) as step:
        put_words(step, "sun", "moon", "star")
        step.run("measure", Counter.measure, counter)

    assert counter.seen == [["star", "moon", "sun"]]


def test_a_sampler_that_leaves_samples_out_is_refused(client: tq_redis.Client) -> None:
    with (
        QueueStep(client, "train_1", sampler=LastFirst(2)) as step,
        pytest.raises(ConfigError, match="chose 2 of the 3 samples of 'train_1'"),
    ):
        put_words(step, "sun", "moon", "star")
        step.run("measure", Counter.measure, Counter())


def test_the_driver_keeps_no_column(client: tq_redis.Client) -> None:
    with QueueStep(client, "train_1") as step:
        put_words(step, "sun", "druse")
        step.run("measure", Counter.measure, Counter())
        held = [value for value in vars(step).values() if value is not client]

    assert not any(isinstance(value, torch.Tensor | DataProto) for value in held)
    assert all(isinstance(value, float) for value in step.metrics.values())


def test_samples_of_a_task_that_failed_can_be_claimed_again(client: tq_redis.Client) -> None:
    step = QueueStep(client, "train_1", lease_s=30.0)
    put_words(step, "druse")
    step.run("measure", Counter.measure, Counter())
    with pytest.raises(ArithmeticError):
        step.run("score", Counter.score, Counter(), strict=True)

    again = client.get_meta(["length"], 1, "train_1", task_name="score", timeout=0)

    assert again.size == 1


def test_a_step_that_a_kill_interrupted_goes_on(client: tq_redis.Client) -> None:
    killed, counter = QueueStep(client, "train_3"), Counter()
    put_words(killed, "sun", "druse")
    killed.run("measure", Counter.measure, counter)
    everything = client.get_meta(["length"], 0, "train_3", mode="force_fetch")
    client.put({"bonus": torch.tensor([2, 2])}, everything)

    with QueueStep(client, "train_3", left=True) as step:
        put_words(step, "sun", "druse")
        assert step.run("measure", Counter.measure, counter) == {}
        step.run("score", Counter.score, counter)
        step.run("look", Counter.look, counter)
        assert columns(step, "score") == [5, 7]  # with the bonus, which was there

    assert counter.seen == [["sun", "druse"], ["sun", "druse"]]  # measured once, looked at once
    assert client.get_partition_list() == []


def test_only_the_samples_that_a_killed_worker_did_not_finish_are_done_again(
    client: tq_redis.Client,
) -> None:
    killed, counter = QueueStep(client, "train_3"), Counter()
    put_words(killed, "sun", "druse")
    one = client.get_meta(["word"], 1, "train_3", task_name="measure")
    counter.measure(one)

    with QueueStep(client, "train_3", left=True) as step:
        put_words(step, "sun", "druse")
        step.run("measure", Counter.measure, counter)
        step.balance(1)
        assert sorted(columns(step, "length")) == [3, 5]

    assert counter.seen == [["sun"], ["druse"]]


def test_samples_of_other_prompts_are_not_taken_over(client: tq_redis.Client) -> None:
    killed = QueueStep(client, "train_3")
    killed.put({"word": ["old"]}, ["9-0"])
    killed.run("measure", Counter.measure, Counter())
    counter = Counter()

    with QueueStep(client, "train_3", left=True) as step:
        put_words(step, "new")
        step.run("measure", Counter.measure, counter)

    assert counter.seen == [["new"]]
