"""reasoning-gym's ``spell_backward`` task: its problems, its scorer, and who may see which word.

The word lists come with the package reasoning-gym. A problem reads
``Spell this word backward (example: sun -> nus): druse`` and its answer is ``esurd``.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas

NAME = "spell_backward"
DATA_SOURCE = f"reasoning_gym/{NAME}"

_PROBLEMS = 30_000
_WARM_START = 2_000
_VALIDATION = 256
_TUNING = 500
_TEST = 1_000

_GOES_ON = 0.2


@dataclass(frozen=True, slots=True)
class Problem:
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Splits:
    """Five sets of problems; no word is in two of them, in any case of its letters.

    Attributes:
        warm_start: labelled words of the supervised warm start.
        train: words that reinforcement learning may ask; their answers only score.
        validation: words that decide when the warm start stops.
        tuning: held-out words that were watched while learning rate, schedule and sizes were
            chosen. They draw the curve during training, and are not evidence.
        test: held-out words that nobody looked at. The reported accuracy is on these.
    """

    warm_start: Sequence[Problem]
    train: Sequence[Problem]
    validation: Sequence[Problem]
    tuning: Sequence[Problem]
    test: Sequence[Problem]


@cache
def make_splits() -> Splits:
    """The same splits in every run: a hash of the question decides, and no seed enters."""
    pools: dict[str, list[Problem]] = {"test": [], "validation": [], "train": []}
    for problem in _distinct_problems():
        pools[_pool(problem.question)].append(problem)
    for pool in pools.values():
        random.Random(123).shuffle(pool)
    held_out, validation, train = pools["test"], pools["validation"], pools["train"]

    # The package lists some words twice, capitalised and not. The sets are filled in this order.
    taken: set[str] = set()
    tuning = _without(taken, held_out[:_TUNING])
    test = _without(taken, held_out[_TUNING : _TUNING + _TEST])
    validation = _without(taken, validation[:_VALIDATION])
    warm_start = _without(taken, train[:_WARM_START])
    return Splits(
        warm_start=warm_start,
        train=_without(taken, train[_WARM_START:]),
        validation=validation,
        tuning=tuning,
        test=test,
    )


def _distinct_problems() -> list[Problem]:
    """The first 30,000 distinct questions of the dataset's own defaults, seed 1."""
    problems: dict[str, Problem] = {}
    for entry in _reasoning_gym().create_dataset(NAME, seed=1, size=4 * _PROBLEMS):
        problems.setdefault(entry["question"], Problem(entry["question"], entry["answer"]))
        if len(problems) == _PROBLEMS:
            break
    return list(problems.values())


def _pool(question: str) -> str:
    digit = int(hashlib.sha256(question.encode()).hexdigest(), 16) % 10
    return {0: "test", 1: "validation"}.get(digit, "train")


def _without(taken: set[str], problems: Iterable[Problem]) -> list[Problem]:
    """The problems whose word is not yet in ``taken``; adds their words to it."""
    kept: list[Problem] = []
    for problem in problems:
        if problem.answer.casefold() not in taken:
            taken.add(problem.answer.casefold())
            kept.append(problem)
    return kept


def messages(problem: Problem) -> list[dict[str, str]]:
    """The chat that asks a problem."""
    return [{"role": "user", "content": problem.question}]


def write_parquet(problems: Sequence[Problem], split: str, path: Path) -> None:
    """One row a problem, in the columns of verl's ``RLHFDataset``. A file that exists stays."""
    if path.exists():
        return
    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": messages(problem),
            "ability": "spelling",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"split": split, "index": index},
        }
        for index, problem in enumerate(problems)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    pandas.DataFrame(rows).to_parquet(unfinished)
    unfinished.replace(path)


def score_response(response: str, answer: str) -> float:
    """The dataset's own score in [0, 1]: the share of letters at their place, 1.0 when exact.

    An answer that is right but goes on loses 0.2. The dataset means that too, but adds 1/n n times
    and compares the sum with 1.0, which a rounding error misses for most lengths.
    """
    given, right = response.lower(), answer.lower()
    if given != right and given.startswith(right):
        return 1.0 - _GOES_ON
    return float(_dataset().score_answer(response, {"answer": answer}))


@cache
def _dataset() -> Any:
    return _reasoning_gym().create_dataset(NAME, seed=1, size=1)


def _reasoning_gym() -> Any:
    with warnings.catch_warnings():
        # A package that it imports compares with "is" what "==" is meant for.
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
    return reasoning_gym


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **unused: Any,
) -> dict[str, float]:
    """verl's reward function: the graded score, and ``acc``, which is 1.0 for an exact answer."""
    if data_source != DATA_SOURCE:
        raise ValueError(f"{NAME} cannot score a problem of {data_source!r}")
    score = score_response(solution_str, ground_truth)
    return {"score": score, "acc": float(score == 1.0)}
