"""verl's agent loops, behind a run that died: what it had finished is not generated again.

``python -m tq_redis.verl --state resume`` names :class:`ResumingAgentLoopManager` in verl's setting
``actor_rollout_ref.rollout.agent.agent_loop_manager_class``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import ray as untyped_ray
from tensordict import NonTensorData, NonTensorStack
from verl.trainer.ppo.v1 import agent_loop_tq

from tq_redis.compat.kept import IDENTITY, KeptTrajectories, identity
from tq_redis.errors import ConfigError

ray: Any = untyped_ray  # its own types are partial

_stack: Any = NonTensorStack  # typed in part
_agent_loops: Any = agent_loop_tq
# Ray has wrapped the class; a class of one's own must derive from what it was.
_Worker: Any = _agent_loops.AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__
_Manager: Any = _agent_loops.AgentLoopManagerTQ


class ResumingAgentLoopWorker(_Worker):
    """Leaves out sessions whose trajectories are there."""

    # Ray sends copies of inherited methods; a copy that says super() would not know its class.
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        base: Any = super()
        base.__init__(*args, **kwargs)

    async def _run_agent_loop(
        self,
        *args: Any,
        session_id: int,
        kept_sessions: Collection[int] = (),
        **sample: Any,
    ) -> None:
        if session_id not in kept_sessions:
            base: Any = super()
            await base._run_agent_loop(*args, session_id=session_id, **sample)


class ResumingAgentLoopManager(_Manager):
    """Gives the prompts of the interrupted step what a run that died had generated for them.

    Raises:
        ConfigError: verl is not in its synchronous mode. In the others it saves the queue with its
            checkpoints, and loads it from there.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        base: Any = super()
        base.__init__(*args, **kwargs)
        mode = self.config.trainer.v1.trainer_mode
        if mode != "sync":
            raise ConfigError(
                f"--state resume is for trainer.v1.trainer_mode=sync, not {mode}: there verl loads "
                f"the queue from its own checkpoint. Leave --state resume out."
            )
        self.agent_loop_workers_class = ray.remote(ResumingAgentLoopWorker)
        self._kept = KeptTrajectories()

    def generate_sequences(self, prompts: Any) -> None:
        """As verl's own, but for sessions that are kept."""
        if self._kept.size and "validate" not in prompts:
            names = zip(*(prompts[field] for field in IDENTITY), strict=True)
            kept = self._kept.give(
                prompts["global_steps"],
                list(prompts["uid"]),
                [identity(*name) for name in names],
                list(prompts.get("__rollout_n__", [self.rollout_config.n] * len(prompts))),
            )
            prompts["kept_sessions"] = _stack(*map(NonTensorData, kept))
        base: Any = super()
        base.generate_sequences(prompts)
