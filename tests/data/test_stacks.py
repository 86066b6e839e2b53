"""Stacks made from lists behave as tensordict's own, whatever is done to them."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tests.data.columns import value_columns
from tests.data.same import assert_same
from tq_redis.data.stacks import stack_of, values_of

_stack: Any = NonTensorStack  # typed in part
COLUMNS = value_columns()


def ordinary(values: list[Any]) -> Any:
    return _stack(*map(NonTensorData, values))


@pytest.mark.parametrize("name", COLUMNS)
def test_values_go_in_and_come_out(name: str) -> None:
    values = COLUMNS[name]
    assert_same(stack_of(values).tolist(), values)
    assert_same(values_of(stack_of(values)), values)


@pytest.mark.parametrize("name", COLUMNS)
def test_the_short_way_to_the_values_gives_what_tolist_gives(name: str) -> None:
    stack = ordinary(COLUMNS[name])
    assert_same(values_of(stack), stack.tolist())


@pytest.mark.parametrize("name", COLUMNS)
def test_the_entries_are_those_of_an_ordinary_stack(name: str) -> None:
    stack: Any = stack_of(COLUMNS[name])
    entries = stack.tensordicts
    assert type(stack) is NonTensorStack
    expected = ordinary(COLUMNS[name]).tensordicts
    assert_same([e.data for e in entries], [e.data for e in expected])
    assert_same(stack.tolist(), ordinary(COLUMNS[name]).tolist())


def saved_and_loaded(stack: Any) -> Any:
    file = io.BytesIO()
    torch.save(stack, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


USES: dict[str, Callable[[Any], Any]] = {
    "whole": lambda stack: stack,
    "row": lambda stack: stack[1],
    "slice": lambda stack: stack[1:],
    "mask": lambda stack: stack[torch.tensor([True, False, True])],
    "iteration": lambda stack: stack_of_all(list(stack)),
    "stacked": lambda stack: torch.stack([stack, stack]),
    "concatenated": lambda stack: torch.cat([stack, stack]),
    "reshaped": lambda stack: stack.reshape(3, 1),
    "expanded": lambda stack: stack.expand(2, 3),
    "split": lambda stack: stack.split(2)[1],
    "copied": copy.copy,
    "copied deeply": copy.deepcopy,
    "cloned": lambda stack: stack.clone(),
    "cloned in part": lambda stack: stack.clone(recurse=False),
    "moved": lambda stack: stack.to("cpu"),
    "locked": lambda stack: stack.lock_(),
    "updated": lambda stack: stack.update(stack_of(["q", "r", "s"])),
    "pickled": lambda stack: pickle.loads(pickle.dumps(stack)),
    "saved": saved_and_loaded,
}


def stack_of_all(entries: list[Any]) -> Any:
    return _stack(*entries)


@pytest.mark.parametrize("use", USES)
def test_every_use_gives_what_an_ordinary_stack_gives(use: str) -> None:
    values = ["a", "b", {"c": [1]}]
    got, expected = USES[use](stack_of(values)), USES[use](ordinary(values))
    assert isinstance(got, type(expected))
    assert got.batch_size == expected.batch_size
    assert_same(got.tolist(), expected.tolist())
    assert (got.device, got.is_locked) == (expected.device, expected.is_locked)


def test_a_pickle_needs_nothing_but_tensordict() -> None:
    assert b"tq_redis" not in pickle.dumps(stack_of(["a", "b"]))


def test_in_a_tensordict_it_is_read_changed_and_put_again() -> None:
    batch: Any = TensorDict({"x": stack_of(["a", "b"])}, batch_size=[2])
    assert (len(batch["x"]), batch["x"][1], batch[1]["x"]) == (2, "b", "b")
    batch = TensorDict({"x": stack_of(["a", "b"])}, batch_size=[2])
    batch["x"][1] = "c"
    assert values_of(batch.get("x")) == ["a", "c"]


def test_a_changed_list_does_not_change_the_stack() -> None:
    values = ["a", "b"]
    stack = stack_of(values)
    values[0] = "x"
    stack.tolist()[1] = "x"
    assert stack.tolist() == ["a", "b"]


def test_values_kept_once_for_many_rows_become_many() -> None:
    batch: Any = TensorDict({}, batch_size=[3])
    batch["x"] = "same"
    assert values_of(batch.get("x")) == ["same"] * 3


def test_stacks_of_stacks_and_shared_values_take_the_long_way() -> None:
    inner = ordinary(["a", "b"])
    assert values_of(torch.stack([inner, inner])) == [["a", "b"], ["a", "b"]]  # pyright: ignore[reportArgumentType]
    shared = ordinary([1, 2]).share_memory_()
    assert values_of(shared) == shared.tolist()


def test_many_threads_get_the_same_entries() -> None:
    stack: Any = stack_of(["x"] * 200)
    start = threading.Barrier(8)
    seen: list[tuple[int, int]] = []

    def look() -> None:
        start.wait(10)
        listed = stack.tolist()
        seen.append((id(stack.tensordicts), len(listed)))

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert seen == [(id(stack.tensordicts), 200)] * 8
