"""The rollout server: batches of one shape, and aborts in the middle of answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe.tasks.tiny_model import ModelSettings, byte_tokenizer, random_model
from recipe.v1.server import ROWS, GenerationServer

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


class Pause:
    """Holds the model back before its third token, until it is let go."""

    def __init__(self, model: Any) -> None:
        self._reached, self._go = threading.Event(), threading.Event()
        self._tokens = 0
        self._hook = model.register_forward_pre_hook(self._before_a_token)

    def _before_a_token(self, *_: Any) -> None:
        self._tokens += 1
        if self._tokens == 3:
            self._reached.set()
            assert self._go.wait(30)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, 30)

    def let_go(self) -> None:
        self._hook.remove()
        self._go.set()


async def aborted(server: Any, requests: list[Request], reject: bool = False) -> list[Any]:
    """The server's answers to requests that come at the same time, aborted with three tokens."""
    pause = Pause(server._model)
    answers = [asyncio.create_task(server.generate("id", *request)) for request in requests]
    await pause.reached()
    abort = asyncio.create_task(server.abort_all_requests(reject_request=reject))
    await asyncio.sleep(0)  # the abort has begun
    pause.let_go()
    await abort
    assert all(answer.done() for answer in answers)
    return [answer.result() for answer in answers]


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


def test_an_aborted_answer_keeps_its_tokens_and_goes_on_where_it_stopped(
    answer: Answer, server: Any, runner: asyncio.Runner
) -> None:
    requests = [seeded(row) for row in range(3)]
    whole = answer(requests)

    parts = runner.run(aborted(server, requests))
    runner.run(server.resume_generation())
    rest = answer(
        [
            (prompt + part.token_ids, {**params, "max_tokens": 5 - len(part.token_ids)})
            for (prompt, params), part in zip(requests, parts, strict=True)
        ]
    )

    for all_of_it, part, remainder in zip(whole, parts, rest, strict=True):
        assert part.stop_reason == "aborted"
        assert part.token_ids == all_of_it.token_ids[:3]
        assert part.log_probs == all_of_it.log_probs[:3]
        assert part.token_ids + remainder.token_ids == all_of_it.token_ids
        assert part.log_probs + remainder.log_probs == pytest.approx(all_of_it.log_probs)
        assert remainder.stop_reason == all_of_it.stop_reason


def test_an_abort_leaves_answers_alone_that_are_whole_and_ends_those_that_have_not_begun(
    server: Any, runner: asyncio.Runner
) -> None:
    prompt, params = seeded(0)
    short = (prompt, {**params, "max_tokens": 2})

    answers = runner.run(aborted(server, [short, *map(seeded, range(1, ROWS + 4))]))

    assert [(a.stop_reason, len(a.token_ids)) for a in answers] == [
        ("length", 2),
        *[("aborted", 3)] * (ROWS - 1),
        *[("aborted", 0)] * 4,
    ]


def test_requests_to_a_stopped_server_wait_until_it_goes_on_with_new_weights(
    server: Any, runner: asyncio.Runner
) -> None:
    async def scenario() -> Any:
        await server.abort_all_requests()
        late = asyncio.create_task(server.generate("id", *seeded(1)))
        await server.load_weights({}, 7)
        assert not late.done()
        await server.resume_generation()
        return await asyncio.wait_for(late, 30)

    late = runner.run(scenario())

    assert late.stop_reason == "length"
    assert late.extra_fields["global_steps"] == 7


def test_a_server_that_is_taken_away_refuses_requests_until_it_is_back(
    answer: Answer, server: Any, runner: asyncio.Runner
) -> None:
    runner.run(aborted(server, [seeded(1)], reject=True))
    refused = answer([seeded(2)])[0]
    runner.run(server.resume_generation())

    assert (refused.stop_reason, refused.token_ids, refused.log_probs) == ("aborted", [], [])
    assert answer([seeded(2)])[0].stop_reason == "length"


@pytest.mark.parametrize("tokens", [0, 6])
def test_an_answer_of_an_impossible_length_is_refused(answer: Answer, tokens: int) -> None:
    with pytest.raises(ValueError, match="possible are 1 to 5"):
        answer([([5], {**PARAMS, "max_tokens": tokens})])
