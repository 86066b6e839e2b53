"""The task: who may see which word, and what counts as right."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest

from recipe.tasks.spell_backward import (
    DATA_SOURCE,
    Problem,
    Splits,
    compute_score,
    make_splits,
    score_response,
    write_parquet,
)

SIZES = {"warm_start": 2_000, "validation": 256, "tuning": 500, "test": 1_000}


@pytest.fixture(scope="module")
def splits() -> Splits:
    return make_splits()


def test_no_word_is_in_two_splits_in_any_case(splits: Splits) -> None:
    words = [
        problem.answer.casefold() for name in Splits.__slots__ for problem in getattr(splits, name)
    ]
    assert len(words) == len(set(words))


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_sizes_of_the_labelled_and_the_held_out_sets(splits: Splits, name: str, size: int) -> None:
    assert len(getattr(splits, name)) == pytest.approx(size, abs=5)


def test_training_never_repeats_a_prompt_in_a_default_run(splits: Splits) -> None:
    assert len(splits.train) >= 100 * 64


def test_the_question_contains_the_word_and_the_answer_is_its_reverse(splits: Splits) -> None:
    for problem in splits.test[:50]:
        assert problem.question.endswith(f": {problem.answer[::-1]}")


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [("esurd", "esurd", 1.0), ("esuxx", "esurd", 0.6), ("", "esurd", 0.0), ("ESURD", "esurd", 1.0)],
)
def test_score_is_the_share_of_letters_at_their_place(
    response: str, answer: str, score: float
) -> None:
    assert score_response(response, answer) == pytest.approx(score)


@pytest.mark.parametrize("length", range(3, 11))
@pytest.mark.parametrize("more", ["x", "X y", "abcdefghij"])
def test_a_right_answer_that_goes_on_loses_a_fifth_whatever_its_length(
    length: int, more: str
) -> None:
    """The dataset's own sum misses 1.0 by a rounding error for most lengths, and keeps its 0.2."""
    answer = "abcdefghij"[:length]

    result = compute_score(DATA_SOURCE, f"{answer.upper()}{more}", answer)

    assert result == {"score": 0.8, "acc": 0.0}


def test_another_data_source_is_refused() -> None:
    with pytest.raises(ValueError, match="openai/gsm8k"):
        compute_score("openai/gsm8k", "72", "72")


def test_parquet_has_the_columns_that_verl_reads(tmp_path: Path) -> None:
    problems = [Problem("Spell this word backward (example: sun -> nus): druse", "esurd")]

    write_parquet(problems, "test", tmp_path / "test.parquet")

    row = pandas.read_parquet(tmp_path / "test.parquet").iloc[0]
    assert row["data_source"] == DATA_SOURCE
    assert list(row["prompt"]) == [{"role": "user", "content": problems[0].question}]
    assert row["reward_model"]["ground_truth"] == "esurd"
    assert row["extra_info"] == {"split": "test", "index": 0}
