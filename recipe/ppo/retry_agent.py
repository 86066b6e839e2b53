"""A conversation of two turns: whoever answers wrong is told so, and answers again."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    register,
)

_register: Any = register
_AgentLoop: Any = AgentLoopBase

_QUESTION = "Try again: "


@_register("retry")
class RetryAgentLoop(_AgentLoop):
    """verl's name for it is ``retry`` (``rollout.agent.default_agent_loop``).

    The tokens of the second question stand in the response, with 0 in ``response_mask``: they are
    read by the model, and not trained on.
    """

    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> AgentLoopOutput:
        """Answer one prompt once or twice; both answers share ``response_length`` tokens."""
        prompt = await self.ct_build_initial_tokens(list(sample["raw_prompt"]))
        question: list[int] = self.tokenizer(_QUESTION, add_special_tokens=False)["input_ids"]
        width = self.rollout_config.response_length
        sampling_params = {**sampling_params, "max_tokens": (width - len(question)) // 2}
        answer = await self._answer(prompt, sampling_params)
        tokens, log_probs = list(answer.token_ids), list(answer.log_probs or [])
        mask, turns = [1] * len(tokens), 2
        if self._text(tokens) != sample["reward_model"]["ground_truth"]:
            tokens, mask = tokens + question, mask + [0] * len(question)
            log_probs += [0.0] * len(question)
            answer = await self._answer(prompt + tokens, sampling_params)
            tokens, mask = tokens + list(answer.token_ids), mask + [1] * len(answer.token_ids)
            log_probs += list(answer.log_probs or [])
            turns = 4
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=tokens,
            response_mask=mask,
            response_logprobs=log_probs or None,
            num_turns=turns,
            metrics=AgentLoopMetrics(),
        )

    async def _answer(self, tokens: list[int], sampling_params: dict[str, Any]) -> Any:
        return await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=tokens, sampling_params=sampling_params
        )

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)
