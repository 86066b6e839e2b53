"""The error tree: catchable by its root and by Python's own kinds, whole after pickling."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

from tq_redis import errors
from tq_redis.errors import DataLostError, PartitionNotFoundError, TQError, nearest, shorten

KINDS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TQError)
]


def test_the_drawn_tree_is_the_real_one() -> None:
    """Depth, order, names and the Python kind in brackets, as the docstring draws them."""
    drawn: list[tuple[int, str, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^ {4}([│├└─ ]*)(\w+Error|TQError)(?: \((\w+)\))?", line)
        if match:
            drawn.append((len(match[1]) // 4, match[2], match[3] or ""))
    assert drawn == list(walk(TQError, 0))


def walk(kind: type[TQError], depth: int) -> list[tuple[int, str, str]]:
    foreign = [base.__name__ for base in kind.__bases__ if not issubclass(base, TQError)]
    own = (depth, kind.__name__, "" if kind is TQError else "".join(foreign))
    # Other modules have kinds of their own.
    children = [child for child in kind.__subclasses__() if child in KINDS]
    return [own, *(line for child in children for line in walk(child, depth + 1))]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_survive_pickling(kind: type[TQError]) -> None:
    error = kind("what happened", partition="p", fields=["a"], rows=[1, 2], deadline=3.0)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is kind
        assert str(twin) == "what happened"
        assert (twin.partition, twin.fields, twin.rows, twin.deadline) == ("p", ("a",), (1, 2), 3.0)


def test_lost_data_keeps_its_handles() -> None:
    error = DataLostError("gone", handles=["n/1"], partition="p")
    twin = pickle.loads(pickle.dumps(error))
    assert (twin.handles, twin.partition) == (("n/1",), "p")


def test_a_not_found_message_is_not_quoted() -> None:
    # KeyError prints the repr of its argument.
    error = PartitionNotFoundError("no partition 'x'")
    assert str(error) == "no partition 'x'"
    assert isinstance(error, KeyError)


def test_context_is_optional() -> None:
    error = TQError("bare")
    assert (error.partition, error.fields, error.rows, error.deadline) == (None, (), (), None)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "[]"),
        ([1, 2], "[1, 2]"),
        (list(range(8)), "[0, 1, 2, 3, 4, 5, 6, 7]"),
        (list(range(100)), "[0, 1, 2, 3, 4, 5, 6, 7, ... 92 more]"),
        (["a"], "['a']"),
    ],
)
def test_shorten(values: list[object], text: str) -> None:
    assert shorten(values) == text


@pytest.mark.parametrize(
    ("name", "known", "text"),
    [
        ("promts", ["prompts", "rewards"], "Did you mean 'prompts'?"),
        ("zzz", ["b", "a"], "Known: ['a', 'b']."),
        ("zzz", [], "None is known yet."),
    ],
)
def test_nearest(name: str, known: list[str], text: str) -> None:
    assert nearest(name, known) == text
