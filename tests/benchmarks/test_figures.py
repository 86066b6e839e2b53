"""What a line of the report says."""

from __future__ import annotations

import json

import pytest

from benchmarks.figures import Bar, compare, growth
from benchmarks.table import table

OURS = [[1.0, 2.0, 3.0], [2.0, 2.0, 8.0], [4.0, 4.0, 4.0]]
THEIRS = [[20.0], [30.0], [20.0]]


def test_medians_of_repetitions_and_percentiles_of_all() -> None:
    ours = compare("claim", "ms", OURS, None).ours
    assert ours["p50"] == 2.0
    assert ours["max"] == 8.0
    assert ours["p99"] == pytest.approx(7.68)
    assert (ours["runs"], ours["repetitions"]) == (9, 3)


def test_the_ratio_is_taken_repetition_by_repetition() -> None:
    assert compare("claim", "ms", OURS, THEIRS).ratio == 10.0
    assert compare("rows", "rows/s", THEIRS, OURS, better="higher").ratio == 10.0
    assert compare("rows", "rows/s", OURS, THEIRS, better="higher").ratio == 0.1


@pytest.mark.parametrize(
    ("bars", "text", "holds"),
    [
        ([], None, None),
        ([Bar("ratio", ">=", 10)], "ratio >= 10", True),
        ([Bar("ratio", ">=", 10.5)], "ratio >= 10.5", False),
        ([Bar("p50", "<", 2)], "p50 < 2", False),
        ([Bar("p50", "<=", 2), Bar("p99", "<", 5)], "p50 <= 2, p99 < 5", False),
    ],
)
def test_bars(bars: list[Bar], text: str | None, holds: bool | None) -> None:
    figure = compare("claim", "ms", OURS, THEIRS, bars=bars)
    assert (figure.bar, figure.holds) == (text, holds)


def test_without_the_peer_a_ratio_is_not_judged() -> None:
    figure = compare("claim", "ms", OURS, "left out", bars=[Bar("ratio", ">=", 10)])
    line = json.loads(figure.line())
    assert line["transfer_queue"] == {"not_measured": "left out"}
    assert (line["ratio"], line["holds"]) == (None, None)


def test_a_figure_that_is_compared_with_several_contenders() -> None:
    beside = {"torch.clone": [[2.0], [4.0], [4.0]], "plain Ray": "failed"}
    bars = [Bar("ratio", ">=", 4), Bar("ratio to torch.clone", ">=", 1)]
    figure = compare("put", "ms", OURS, THEIRS, bars=bars, beside=beside)
    assert figure.bar == "ratio >= 4, ratio to torch.clone >= 1"
    assert (figure.holds, figure.beside["torch.clone"]["ratio"]) == (True, 1.0)
    assert figure.beside["plain Ray"] == {"not_measured": "failed"}
    slower = compare("put", "ms", OURS, THEIRS, bars=bars, beside={"torch.clone": [[1.0]] * 3})
    assert slower.holds is False
    absent = compare("put", "ms", OURS, THEIRS, bars=bars, beside={"torch.clone": "failed"})
    assert absent.holds is None
    head, _, row, other = table([figure.line(), compare("list", "ms", [[1.0]], None).line()])
    assert head.endswith("| torch.clone p50 (ratio) | plain Ray p50 (ratio) |")
    assert row.endswith("| yes | 4 (1) |  |")
    assert other.endswith("|  |  |  |  |  |  |")


def test_growth_is_that_of_the_medians() -> None:
    assert growth([[1.0, 1.0, 9.0], [2.0]], [[3.0], [2.0]]) == [[3.0], [1.0]]


def test_a_table_of_the_lines() -> None:
    lines = [
        '{"machine":{"cores":2}}',
        compare("claim", "ms", OURS, THEIRS, bars=[Bar("ratio", ">=", 10)]).line(),
        compare("list", "ms", [[1234567.0]], "left out", bars=[Bar("p50", "<", 5)]).line(),
    ]
    _, _, claim, listing = table(lines)
    assert claim == "| claim | ms | 2 (7.68) | 20 (29.8) | 10 | ratio >= 10 | yes |"
    assert listing == "| list | ms | 1,230,000 |  |  | p50 < 5 | **no** |"
