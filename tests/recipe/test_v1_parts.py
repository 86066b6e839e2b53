"""What makes a run of verl's trainer repeat itself: seeds, order, and batches of one shape."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe.tasks.tiny_model import ModelSettings, byte_tokenizer, random_model
from recipe.v1.identity import sample_order, sample_seed
from recipe.v1.replica import ROWS, GenerationServer

Request = tuple[list[int], dict[str, Any]]
Answer = Callable[[list[Request]], list[Any]]

PROMPTS = [[5, 6, 7], [8, 9], [5, 6, 7, 8, 9, 10]]
PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    settings = ModelSettings(hidden=32, intermediate=64, layers=2, heads=2)
    random_model(settings, byte_tokenizer()).save_pretrained(folder)
    return folder


@pytest.fixture
def server(model_path: Path) -> Any:
    threads = torch.get_num_threads()
    yield GenerationServer(str(model_path), prompt_length=12, response_length=5)
    torch.set_num_threads(threads)


@pytest.fixture
def answer(server: Any, runner: asyncio.Runner) -> Answer:
    """``answer(requests)``: what the server answers to requests that come at the same time."""

    def ask(requests: list[Request]) -> list[Any]:
        async def all_at_once() -> list[Any]:
            asked = (server.generate("id", prompt, params) for prompt, params in requests)
            return await asyncio.gather(*asked)

        return runner.run(all_at_once())

    return ask


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def seeded(row: int, temperature: float = 1.0) -> Request:
    params = {**PARAMS, "temperature": temperature, "seed": row}
    return PROMPTS[row % len(PROMPTS)], params


def test_an_answer_is_the_same_to_the_last_bit_in_whatever_company(answer: Answer) -> None:
    alone = answer([seeded(7)])[0]

    for place in (0, 3, ROWS - 1):
        others = [seeded(100 + place + i) for i in range(ROWS - 1)]
        in_company = answer([*others[:place], seeded(7), *others[place:]])[place]

        assert in_company.token_ids == alone.token_ids
        assert in_company.log_probs == alone.log_probs


def test_each_seed_draws_its_own_answer(answer: Answer) -> None:
    prompt, params = seeded(0)

    answers = answer([(prompt, {**params, "seed": seed}) for seed in range(8)])

    assert len({tuple(a.token_ids) for a in answers}) > 1


def test_more_requests_than_a_batch_has_rows_are_all_answered(answer: Answer) -> None:
    requests = [seeded(row, temperature=float(row % 2)) for row in range(2 * ROWS + 3)]

    answers = answer(requests)

    assert [a.token_ids for a in answers] == [answer([r])[0].token_ids for r in requests]


def test_a_failed_batch_fails_its_requests_and_not_the_next_ones(answer: Answer) -> None:
    with pytest.raises(IndexError):
        answer([([10**6], {**PARAMS, "seed": 1})])

    assert answer([seeded(1)])[0].token_ids


def test_the_server_generates_with_the_weights_it_was_sent(
    answer: Answer, server: Any, runner: asyncio.Runner
) -> None:
    before = answer([seeded(1, temperature=0.0)])[0]
    weights = {name: -weight for name, weight in server._model.state_dict().items()}

    runner.run(server.load_weights(weights, 3))

    after = answer([seeded(1, temperature=0.0)])[0]
    assert after.log_probs != before.log_probs
    assert after.extra_fields["global_steps"] == 3


@pytest.mark.parametrize("asked", [{"top_p": 0.9}, {"top_k": 5}, {"repetition_penalty": 1.1}])
def test_a_way_of_sampling_that_is_not_there_is_refused(
    answer: Answer, asked: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=f"not with {next(iter(asked))}"):
        answer([([5], {**PARAMS, **asked})])


def test_a_prompt_over_the_limit_is_refused(answer: Answer) -> None:
    with pytest.raises(ValueError, match="the limit is 12"):
        answer([([5] * 13, PARAMS)])


def test_samples_are_ordered_by_data_row_session_and_output() -> None:
    keys = ["b_10_0", "a_2_1", "b_2_0", "a_2_0"]

    order = sample_order(keys, rows=[3, 8, 3, 8])

    assert [keys[place] for place in order] == ["b_2_0", "b_10_0", "a_2_0", "a_2_1"]


def test_every_sample_of_a_run_has_a_seed_of_its_own() -> None:
    names = [
        (s, step, row, n) for s in (0, 1) for step in (1, 2) for row in (1, 12) for n in (2, 3)
    ]

    seeds = [sample_seed(*name) for name in names]

    assert len(set(seeds)) == len(names)
    assert seeds == [sample_seed(*name) for name in names]
    assert all(0 <= seed < 2**63 for seed in seeds)
