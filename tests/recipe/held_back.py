"""An agent loop for tests: it writes down what it generates, and can stop within a step.

verl loads this module in place of recipe.v1.plugin. The variable ``GENERATED`` names a file, which
gets a line ``step row session`` for each answer; ``HOLD``, as ``step:answers``, the step in which
no more than so many answers are generated.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register

from recipe.v1.plugin import SeededAgentLoop

GENERATED = "TQ_TEST_GENERATED"
HOLD = "TQ_TEST_HOLD"

_register: Any = register
_begun: list[int] = []


@_register("held_back")
class HeldBackAgentLoop(SeededAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> AgentLoopOutput:
        step = int(sample["global_steps"])
        held_step, answers = map(int, os.environ.get(HOLD, "0:0").split(":"))
        _begun.append(step)
        if step == held_step and _begun.count(step) > answers:
            await asyncio.Event().wait()
        output = await super().run(sampling_params, **sample)
        _write_down(f"{step} {sample['index']} {sample['session_id']}\n")
        return output


def _write_down(line: str) -> None:
    with Path(os.environ[GENERATED]).open("a", encoding="utf-8") as file:
        file.write(line)
