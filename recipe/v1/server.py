"""A rollout server on transformers: what verl asks of vLLM, on a CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from verl.workers.rollout.replica import TokenOutput

from recipe.generation import Generated, generate

# Rows of every batch. With one shape the results of a row are the same to the last bit, whatever
# else is in the batch (torch chooses its kernels by shape).
ROWS = 32


@dataclass(eq=False, slots=True)
class Request:
    """One prompt to answer once.

    Attributes:
        tokens: of the prompt. That of an answer to go on with ends in what was generated before.
        max_tokens: of the answer.
        temperature: 0 is greedy.
        seed: of the draws; None takes them from torch's global generator.
        output: the answer, once it is there.
    """

    tokens: list[int]
    max_tokens: int
    temperature: float
    seed: int | None
    output: TokenOutput | None = None


class Interruptible:
    """A model for :func:`recipe.generation.generate` that can be stopped between two tokens.

    Once it is stopped it can only say the end token, which ends the generation.

    Args:
        model: a transformers causal language model.
        stopped: read before each token, in the thread that generates.

    Attributes:
        drawn: tokens that were drawn from the model itself.
    """

    def __init__(self, model: Any, stopped: Callable[[], bool]) -> None:
        self._model = model
        self._stopped = stopped
        self.drawn = 0

    def __call__(self, input_ids: torch.Tensor, **settings: Any) -> Any:
        """An output with logits (B, 1, V)."""
        if self._stopped():
            return SimpleNamespace(logits=self._only_the_end(len(input_ids)))
        self.drawn += 1
        return self._model(input_ids, **settings)

    def _only_the_end(self, rows: int) -> torch.Tensor:
        config = self._model.config
        logits = torch.full((rows, 1, config.vocab_size), -torch.inf)
        logits[..., config.eos_token_id] = 0
        return logits


class GenerationServer:
    """One copy of the model in a Ray actor; requests that wait at the same time share a batch.

    Args:
        model_path: folder in transformers' format.
        prompt_length: the longest prompt, in tokens.
        response_length: the longest response, in tokens.
    """

    def __init__(self, model_path: str, prompt_length: int, response_length: int) -> None:
        torch.set_num_threads(1)  # as many servers as cores
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._model = model.requires_grad_(False).eval()
        self._prompt_length = prompt_length
        self._response_length = response_length
        self._waiting: list[Request] = []
        self._busy = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._rejecting = False
        self._step: int | None = None

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        **unused: Any,
    ) -> TokenOutput:
        """Continue a prompt.

        An answer that an abort cut short has the stop reason ``aborted``. It goes on where it
        stopped when its tokens are asked for again, behind the prompt, with the ``max_tokens``
        that are left: the seed then draws what it would have drawn without the abort.

        Args:
            request_id: of verl; nothing depends on it.
            prompt_ids: tokens of the prompt.
            sampling_params: ``temperature``, the ``seed`` of this request and its ``max_tokens``
                (by default the response length).

        Raises:
            ValueError: the prompt is too long, or a way of sampling is asked for that this server
                does not have.
        """
        request = Request(
            prompt_ids,
            sampling_params.get("max_tokens", self._response_length),
            sampling_params["temperature"],
            sampling_params.get("seed"),
        )
        self._check(request, sampling_params)
        # verl may close a server again before those that wait here have run.
        while not self._open.is_set():
            if self._rejecting:
                return self._output([], [], "aborted")
            await self._open.wait()
        self._waiting.append(request)
        try:
            # Whoever gets the lock first answers for those that wait behind it.
            async with self._busy:
                if request.output is None:
                    await self._answer_batch(request)
        finally:
            self._waiting.remove(request)
        assert request.output is not None
        return request.output

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End the requests under way with the tokens they have. Later ones wait to be resumed.

        Args:
            reject_request: later ones are aborted at once, for verl to ask another server.
        """
        self._rejecting = reject_request
        self._open.clear()
        # The lock is fair: all that came before have their answers.
        async with self._busy:
            pass

    async def resume_generation(self) -> None:
        """Generate again."""
        self._rejecting = False
        self._open.set()

    async def load_weights(self, weights: dict[str, torch.Tensor], step: int | None) -> None:
        """Take the actor's weights, those of training step ``step``.

        Raises:
            KeyError: the actor has a weight that this model has not.
        """
        own = self._model.state_dict()
        async with self._busy:
            for name, weight in weights.items():
                own[name].copy_(weight)
            self._step = step

    async def wake_up(self) -> None:
        """Nothing to do: the weights stay in memory."""

    async def sleep(self) -> None:
        """Nothing to do: the weights stay in memory."""

    async def release_kv_cache(self) -> None:
        """Nothing to do: each batch has its own cache."""

    async def resume_kv_cache(self) -> None:
        """Nothing to do: each batch has its own cache."""

    def _check(self, request: Request, sampling_params: dict[str, Any]) -> None:
        limit = self._prompt_length + self._response_length - request.max_tokens
        if not 0 < request.max_tokens <= self._response_length:
            raise ValueError(
                f"An answer of {request.max_tokens} tokens is asked for, "
                f"possible are 1 to {self._response_length}"
            )
        if len(request.tokens) > limit:
            raise ValueError(f"A prompt has {len(request.tokens)} tokens, the limit is {limit}")
        neutral = {"top_p": 1, "top_k": -1, "repetition_penalty": 1}
        for name, value in neutral.items():
            if sampling_params.get(name, value) != value:
                raise ValueError(f"This server samples by temperature only, not with {name}")

    async def _answer_batch(self, first: Request) -> None:
        """Answer the oldest requests that can share a batch with ``first``, up to ``ROWS``."""
        await asyncio.sleep(0)  # those that came together with the first one are in the list then

        def kind(request: Request) -> tuple[float, int]:
            return request.temperature, self._width(request)

        open_requests = [r for r in self._waiting if r.output is None]
        batch = [r for r in open_requests if kind(r) == kind(first)][:ROWS]
        model = Interruptible(self._model, stopped=lambda: not self._open.is_set())
        generated = await asyncio.to_thread(self._generate, model, batch)
        for row, request in enumerate(batch):
            request.output = self._answer(request, generated, row, model.drawn)

    def _width(self, request: Request) -> int:
        """Tokens of the prompts in its batch: one width for most, another for answers to go on."""
        short = len(request.tokens) <= self._prompt_length
        return self._prompt_length + (0 if short else self._response_length)

    def _generate(self, model: Interruptible, batch: list[Request]) -> Generated:
        # The rows that no request needs repeat the first one.
        padded = batch + [batch[0]] * (ROWS - len(batch))
        ids, mask = left_padded([r.tokens for r in padded], self._width(batch[0]), self._pad)
        return generate(
            model,
            ids,
            mask,
            max_tokens=self._response_length,
            temperature=batch[0].temperature,
            eos_token_id=self._end,
            pad_token_id=self._pad,
            draws=torch.stack([self._draws(r) for r in padded]),
        )

    def _draws(self, request: Request) -> torch.Tensor:
        """(response length,) float64: an answer that goes on has used the first of its own."""
        draws = draws_of(request.seed, self._response_length)
        return draws.roll(request.max_tokens)

    def _answer(self, request: Request, generated: Generated, row: int, drawn: int) -> TokenOutput:
        length = min(int(generated.mask[row].sum()), drawn, request.max_tokens)
        tokens = generated.responses[row, :length].tolist()
        if tokens[-1:] == [self._end]:
            reason = "completed"
        else:
            reason = "length" if length == request.max_tokens else "aborted"
        return self._output(tokens, generated.log_probs[row, :length].tolist(), reason)

    def _output(self, tokens: list[int], log_probs: list[float], reason: str) -> TokenOutput:
        return TokenOutput(
            token_ids=tokens,
            log_probs=log_probs,
            stop_reason=reason,
            num_preempted=0,
            extra_fields={"global_steps": self._step},
        )

    @property
    def _pad(self) -> int:
        return self._model.config.pad_token_id

    @property
    def _end(self) -> int:
        return self._model.config.eos_token_id


def draws_of(seed: int | None, count: int) -> torch.Tensor:
    """(count,) float64 in [0, 1)."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.rand(count, dtype=torch.float64, generator=generator)


def left_padded(
    rows: list[list[int]], width: int, pad_token_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B, width) and their mask (B, width), both int64."""
    ids = torch.full((len(rows), width), pad_token_id, dtype=torch.int64)
    mask = torch.zeros((len(rows), width), dtype=torch.int64)
    for row, tokens in enumerate(rows):
        ids[row, width - len(tokens) :] = torch.tensor(tokens)
        mask[row, width - len(tokens) :] = 1
    return ids, mask
