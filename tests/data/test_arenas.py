"""Memory of columns that are gone serves the next ones, and never that of columns in use."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tq_redis.data import arenas
from tq_redis.data.arenas import Memory
from tq_redis.data.tensors import Bytes, from_numpy, to_tensor

MB = 1 << 20


@pytest.fixture(autouse=True)
def none_free() -> Iterator[None]:
    arenas._free.clear()
    yield
    arenas._free.clear()


def filled(memory: Memory, value: int, nbytes: int = 4 * MB) -> torch.Tensor:
    array = memory.take(nbytes)
    array[:] = value
    return to_tensor(array, "uint8", (nbytes,))


def test_memory_of_dropped_columns_is_used_again() -> None:
    columns = [filled(memory := Memory(), 1), filled(memory, 2)]
    place = columns[0].data_ptr()
    del memory
    columns.pop()
    assert Memory().take(4 * MB).ctypes.data != place
    columns.pop()
    assert Memory().take(4 * MB).ctypes.data == place


KEPT: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda column: column,
    "row": lambda column: column[7],
    "view of a view": lambda column: column[1:].view(-1)[5:9],
    "array": lambda column: column.numpy(),
    "row of an array": lambda column: column.numpy()[3:],
    "storage": lambda column: column.untyped_storage(),
    "detached": lambda column: column.detach(),
    "parameter": lambda column: torch.nn.Parameter(column, requires_grad=False),
    "capsule": np.from_dlpack,
    "buffer": lambda column: column.numpy().data,
}


@pytest.mark.parametrize("kind", KEPT)
def test_whatever_is_kept_of_a_column_keeps_its_memory(kind: str) -> None:
    column = filled(Memory(), 1)
    place = column.data_ptr()
    kept = KEPT[kind](column)
    del column
    gc.collect()
    assert arenas._free == []
    del kept
    gc.collect()
    assert Memory().take(4 * MB).ctypes.data == place


def test_a_column_moved_to_shared_memory_leaves_its_arena() -> None:
    column = filled(Memory(), 1)
    column.share_memory_()
    assert len(arenas._free) == 1
    filled(Memory(), 2)
    assert column.eq(1).all()


def test_a_pickle_is_a_copy() -> None:
    column = filled(Memory(), 1)
    written = pickle.dumps(column)
    del column
    filled(Memory(), 2)
    assert pickle.loads(written).eq(1).all()


def test_a_bounded_number_waits_to_be_used_again() -> None:
    columns = [filled(Memory(), number) for number in range(5)]
    columns.clear()
    assert len(arenas._free) == arenas._MOST_FREE


def test_small_and_very_large_columns_have_memory_of_their_own() -> None:
    memory = Memory()
    taken = [memory.take(nbytes) for nbytes in (0, 100, 40 * MB)]
    assert [len(array) for array in taken] == [0, 100, 40 * MB]
    del taken
    assert arenas._free == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_parent_and_child_do_not_write_into_each_other() -> None:
    def marked(value: int) -> Bytes:
        array = Memory().take(MB)  # torch does not work in threads after a fork
        array[:] = value
        return array

    array = marked(1)
    marked(9)  # leaves a free arena to both
    child = os.fork()
    if child == 0:
        array[:] = 3
        os._exit(0 if (marked(4) == 4).all() and (array == 3).all() else 1)
    mine = marked(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (array == 1).all()
    assert (mine == 2).all()


steps = st.lists(st.tuples(st.booleans(), st.integers(0, 99), st.sampled_from([1, 5, 20, 32])))


@given(steps)
def test_columns_in_use_keep_what_was_written(steps: list[tuple[bool, int, int]]) -> None:
    """Batches come and go in any order; each column is marked at its ends."""
    kept: list[tuple[int, torch.Tensor]] = []
    memory = Memory()
    for number, (drop, which, megabytes) in enumerate(steps):
        if drop and kept:
            del kept[which % len(kept)]
            continue
        if which % 3 == 0:
            memory = Memory()
        column = from_numpy(memory.take(megabytes * MB))
        column[0] = column[-1] = number % 256
        kept.append((number % 256, column))
    assert [(c[0].item(), c[-1].item()) for _, c in kept] == [(n, n) for n, _ in kept]
