"""The shelf: what it keeps, and how many bytes that takes."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tq_redis.store.shelf import Block, Shelf

CAPACITY = 100
NAMES = st.sampled_from("abcdefgh")
SIZES = st.integers(min_value=0, max_value=60)


def block(nbytes: int, partition: str = "p") -> Block:
    return Block(partition, nbytes, (b"", ()))


class Bytes(RuleBasedStateMachine):
    """Whatever is asked of it, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf(CAPACITY)
        self.held: dict[str, int] = {}
        self.reserved: list[int] = []
        self.told = 0
        self.shelf.on_room.append(self.tell)

    def tell(self) -> None:
        self.told += 1

    @property
    def used(self) -> int:
        return sum(self.held.values()) + sum(self.reserved)

    @rule(blocks=st.dictionaries(NAMES, SIZES, max_size=4))
    def hold(self, blocks: dict[str, int]) -> None:
        new = {name: size for name, size in blocks.items() if name not in self.held}
        fits = self.used + sum(new.values()) <= CAPACITY
        assert self.shelf.hold([(name, block(size)) for name, size in blocks.items()]) == fits
        if fits:
            self.held.update(new)

    @rule(size=SIZES)
    def reserve(self, size: int) -> None:
        fits = self.used + size <= CAPACITY
        assert self.shelf.reserve(size) == fits
        if fits:
            self.reserved.append(size)

    @precondition(lambda self: self.reserved)
    @rule(name=NAMES)
    def place(self, name: str) -> None:
        size = self.reserved.pop()
        self.shelf.place([(name, block(size))])
        self.held.setdefault(name, size)

    @precondition(lambda self: self.reserved)
    @rule()
    def give_back(self) -> None:
        size, before = self.reserved.pop(), self.told
        self.shelf.give_back(size)
        assert self.told == before + (size > 0)

    @rule(names=st.lists(NAMES, max_size=4))
    def drop(self, names: list[str]) -> None:
        freed = sum(self.held.pop(name, 0) for name in names)
        before = self.told
        self.shelf.drop(names)
        assert self.told == before + (freed > 0)

    @invariant()
    def counts_right(self) -> None:
        assert self.shelf.used == self.used <= CAPACITY
        assert len(self.shelf) == len(self.held)
        kept = {
            name: found.nbytes for name in "abcdefgh" for found in self.shelf.find(name) if found
        }
        assert kept == self.held


TestBytes = Bytes.TestCase
TestBytes.settings = settings(max_examples=100, stateful_step_count=30)


def test_a_repetition_keeps_the_first_block() -> None:
    shelf = Shelf(CAPACITY)
    first = block(80)
    assert shelf.hold([("a", first)])
    assert shelf.hold([("a", block(80)), ("b", block(20))])
    assert shelf.find(["a"]) == [first]
    assert shelf.used == 100
    assert not shelf.hold([("a", block(80)), ("c", block(1))])
    assert shelf.find(["c"]) == [None]


@pytest.mark.parametrize(
    ("capacity", "nbytes", "can"), [(None, 1 << 60, True), (9, 9, True), (9, 10, False)]
)
def test_what_can_ever_be_held(capacity: int | None, nbytes: int, can: bool) -> None:
    shelf = Shelf(capacity)
    assert shelf.can_ever_hold(nbytes) == can
    assert shelf.hold([("a", block(nbytes))]) == can
    assert shelf.can_ever_hold(nbytes) == can


def test_unconfirmed_blocks_by_partition_and_age() -> None:
    shelf = Shelf()
    old = time.monotonic() - 60
    shelf.hold([("a", Block("p", 1, (b"", ()), since=old)), ("b", block(1, "q")), ("c", block(1))])
    assert shelf.unconfirmed(-1.0) == {"p": ["a", "c"], "q": ["b"]}
    assert shelf.unconfirmed(30.0) == {"p": ["a"]}
    shelf.confirm(["a", "unknown"])
    assert shelf.unconfirmed(-1.0) == {"p": ["c"], "q": ["b"]}
    shelf.clear()
    assert (shelf.unconfirmed(-1.0), shelf.used, len(shelf)) == ({}, 0, 0)


def test_many_threads_count_together() -> None:
    shelf = Shelf(500)
    most = 0
    held = threading.Lock()

    def work(thread: int) -> int:
        nonlocal most
        refused = 0
        for turn in range(300):
            names = [f"{thread % 4}-{turn % 7}", f"{thread}-{turn}"]
            if not shelf.hold([(name, block(11 + turn % 13)) for name in names]):
                refused += 1
            with held:
                most = max(most, shelf.used)
            if turn % 3 == 0 and shelf.reserve(17):
                shelf.place([(names[0], block(17))])
            shelf.drop(names)
        return refused

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(work, range(16)))
    shelf.clear()
    assert shelf.used == 0
    assert 0 < most <= 500
