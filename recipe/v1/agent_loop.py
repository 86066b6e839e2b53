"""verl's single-turn agent loop, with a seed for every sample."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from recipe.v1.identity import sample_seed

_register: Any = register
_SingleTurnAgentLoop: Any = SingleTurnAgentLoop


@_register("seeded_single_turn")
class SeededAgentLoop(_SingleTurnAgentLoop):
    """The same words from the same seeds, whichever server generates, in whichever order."""

    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> AgentLoopOutput:
        """Answer one prompt once; ``sampling_params`` gains the ``seed`` of this sample."""
        seed = sample_seed(
            self.rollout_config.seed, sample["global_steps"], sample["index"], sample["session_id"]
        )
        return await super().run({**sampling_params, "seed": seed}, **sample)
