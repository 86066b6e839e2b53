from __future__ import annotations

import pytest

from tests.control.build import write
from tq_redis.control.packing import (
    append_rows,
    append_runs,
    arguments,
    number_or_text,
    write_arguments,
)
from tq_redis.control.records import Rows, Run
from tq_redis.control.replies import DescribeReply, LocateReply
from tq_redis.errors import InputError


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(InputError, match="not valid Unicode"):
        arguments({"keys": ["a\ud800"]})


def test_the_arguments_of_a_write() -> None:
    put = write(2, ["a b"], keys=["k", "l"], groups=["g:", "g:"], tags=[{"t": 1}, {}])
    packed = write_arguments(put)
    (block,) = packed["blocks"]
    assert block[2:] == (0, 2, ["a%20b"], ["float32"], 0, 0)
    assert packed["schema"][0] == "a%20b"
    assert packed["tags"] == [("t", ["1", ""])]
    assert (packed["count"], packed["keys"], packed["groups"]) == (2, ["k", "l"], ["g%3A"] * 2)
    assert write_arguments(write(3, ids=[7, 8, 3]))["ids"] == [7, 2, 3, 1]


def test_pages_of_locations_are_joined() -> None:
    where: dict[str, list[Run]] = {"x": [], "y": [], "z": []}
    reply = LocateReply("ok", columns=[[1, 0, 2, 2, 5, 1], 1, []], blocks=[(1, "a"), (2, "b")])
    append_runs(where, ["x", "y", "z"], reply)
    append_runs(
        where, ["x", "y", "z"], LocateReply("ok", columns=[[3, 0, 1], 1, 1], blocks=[(3, "c")])
    )
    assert where["x"] == where["y"] == [("a", 0, 2), ("b", 5, 1), ("c", 0, 1)]
    assert where["z"] == [("c", 0, 1)]


def test_pages_of_descriptions_are_joined() -> None:
    rows = Rows([], [], [], {}, {}, [], [])
    form = '{"kind":"dense","dtype":"float32"}'
    one = DescribeReply(
        "ok",
        [1, 2],
        keys=["a", ""],
        fields=[("x", form, "10")],
        states="-c",
        groups=["", "=%25"],
    )
    other = DescribeReply(
        "ok",
        [3],
        keys=["c"],
        tags=[("t", "[1]", "")],
        fields=[("y", form, "1")],
        states="l",
        groups=["="],
    )
    append_rows(rows, one)
    append_rows(rows, other)
    assert rows.keys == ["a", None, "c"]
    assert rows.tags == [{}, {}, {"t": 1}]
    assert rows.produced == {"x": [True, False, False], "y": [False, False, True]}
    assert rows.states == ["open", "consumed", "leased"]
    assert rows.groups == [None, "%", ""]


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("-3", -3), ("12", 12), ("", ""), ("-", "-"), ("1.5", "1.5"), ("²", "²")],
)
def test_values_of_the_summary(text: str, value: int | str) -> None:
    assert number_or_text(text) == value
