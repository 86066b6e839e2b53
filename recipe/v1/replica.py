"""A rollout server on transformers: what verl asks of vLLM, on a CPU."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from recipe.generation import Generated, generate

NAME = "transformers_server"

# Rows of every batch. With one shape the results of a row are the same to the last bit, whatever
# else is in the batch (torch chooses its kernels by shape).
ROWS = 32

_RolloutReplica: Any = RolloutReplica


@dataclass(eq=False, slots=True)
class Request:
    """One prompt to answer once.

    Attributes:
        tokens: of the prompt, at most ``prompt_length`` of them.
        temperature: 0 is greedy.
        seed: of the draws; None takes them from torch's global generator.
        output: the answer, once it is there.
    """

    tokens: list[int]
    temperature: float
    seed: int | None
    output: TokenOutput | None = None


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
        self._step: int | None = None

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        **unused: Any,
    ) -> TokenOutput:
        """Continue a prompt.

        Args:
            request_id: of verl; nothing depends on it.
            prompt_ids: tokens of the prompt.
            sampling_params: ``temperature``, and the ``seed`` of this request.

        Raises:
            ValueError: the prompt is too long, or a way of sampling is asked for that this server
                does not have.
        """
        self._check(prompt_ids, sampling_params)
        request = Request(prompt_ids, sampling_params["temperature"], sampling_params.get("seed"))
        self._waiting.append(request)
        try:
            # Whoever gets the lock first answers for those that wait behind it.
            async with self._busy:
                if request.output is None:
                    await self._answer_batch(request.temperature)
        finally:
            self._waiting.remove(request)
        assert request.output is not None
        return request.output

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

    def _check(self, prompt_ids: list[int], sampling_params: dict[str, Any]) -> None:
        if len(prompt_ids) > self._prompt_length:
            raise ValueError(
                f"A prompt has {len(prompt_ids)} tokens, the limit is {self._prompt_length}"
            )
        neutral = {"top_p": 1, "top_k": -1, "repetition_penalty": 1}
        for name, value in neutral.items():
            if sampling_params.get(name, value) != value:
                raise ValueError(f"This server samples by temperature only, not with {name}")

    async def _answer_batch(self, temperature: float) -> None:
        """Answer the oldest requests with this temperature, up to ``ROWS``."""
        open_requests = [r for r in self._waiting if r.output is None]
        batch = [r for r in open_requests if r.temperature == temperature][:ROWS]
        generated = await asyncio.to_thread(self._generate, batch, temperature)
        for row, request in enumerate(batch):
            request.output = self._output(generated, row)

    def _generate(self, batch: list[Request], temperature: float) -> Generated:
        # The rows that no request needs repeat the first one.
        padded = batch + [batch[0]] * (ROWS - len(batch))
        ids, mask = left_padded([r.tokens for r in padded], self._prompt_length, self._pad)
        return generate(
            self._model,
            ids,
            mask,
            max_tokens=self._response_length,
            temperature=temperature,
            eos_token_id=self._model.config.eos_token_id,
            pad_token_id=self._pad,
            draws=torch.stack([draws_of(r.seed, self._response_length) for r in padded]),
        )

    @property
    def _pad(self) -> int:
        return self._model.config.pad_token_id

    def _output(self, generated: Generated, row: int) -> TokenOutput:
        length = int(generated.mask[row].sum())
        tokens = generated.responses[row, :length].tolist()
        ended = tokens[-1] == self._model.config.eos_token_id
        return TokenOutput(
            token_ids=tokens,
            log_probs=generated.log_probs[row, :length].tolist(),
            stop_reason="completed" if ended else "length",
            num_preempted=0,
            extra_fields={"global_steps": self._step},
        )


class TransformersReplica(_RolloutReplica):
    """verl's handle on one server."""

    async def launch_servers(self) -> None:
        """Start the server's actor. verl's trainer looks for it under its name."""
        if self.world_size != 1:
            raise ValueError("A transformers_server holds the whole model in one process")
        actor: Any = ray.remote(GenerationServer)
        server = actor.options(
            name=server_name(self.replica_rank), num_cpus=0, max_concurrency=self.max_concurrency
        ).remote(self.model_config.path, self.config.prompt_length, self.config.response_length)
        await server.wake_up.remote()  # the model is loaded
        self.servers = [server]
        self._server_handle = server
        self._server_address = server_name(self.replica_rank)


def server_name(rank: int) -> str:
    """The name of the actor of a replica."""
    return f"{NAME}_{rank}"


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
