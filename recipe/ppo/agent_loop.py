"""Generation by rollout servers: verl's agent loops, with several turns and tools among them."""

from __future__ import annotations

from typing import Any

import numpy
import ray
from omegaconf import DictConfig
from verl import DataProto
from verl.checkpoint_engine import CheckpointEngineManager
from verl.experimental.agent_loop import agent_loop
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.skip.skip_manager import SkipManager
from verl.workers.rollout.llm_server import LLMServerManager

from recipe.ppo import retry_agent, rollout_skip
from recipe.ppo.engine_batch import SEQUENCE
from tq_redis.bridge import call_actors, tqbridge

__all__ = ["AgentLoopWorker", "AgentLoops", "retry_agent"]  # which registers itself

_AgentLoopWorker: Any = agent_loop.AgentLoopWorker
_Servers: Any = LLMServerManager
_Checkpoints: Any = CheckpointEngineManager
_Skip: Any = SkipManager


class AgentLoopWorker(_AgentLoopWorker):
    """verl's worker, which holds the conversations of its samples at the same time.

    Args:
        config: the whole configuration.
        servers: verl's client of the rollout servers.
        rank: which of the workers this is.
    """

    def __init__(self, config: DictConfig, servers: Any, rank: int) -> None:
        super().__init__(config, servers)
        rollout_skip.start(config, rank)

    @tqbridge(
        reads=("raw_prompt", "uid", "data_source", "reward_model"),
        # Of the dataset, where it has them.
        may_read=("extra_info", "agent_name", "index", "tools_kwargs", "multi_modal_data"),
        writes=(*SEQUENCE, "__num_turns__"),
        may_write=("rollout_log_probs", "multi_modal_inputs"),
        tags=("total_lengths",),
    )
    async def generate_sequences(self, data: DataProto) -> DataProto:
        """Answer chats, in as many turns as their agent loop takes.

        ``meta_info["validate"]`` decodes as ``rollout.val_kwargs`` says, ``meta_info["greedy"]``
        takes the most likely token.
        """
        rollout_skip.note_step(data)
        if data.meta_info.get("greedy"):
            data.non_tensor_batch["__do_sample__"] = numpy.zeros(len(data), dtype=bool)
        output = await self._generate(data)
        output.batch["total_lengths"] = output.batch["attention_mask"].sum(dim=1)
        output.meta_info = {}
        return output

    @_Skip.annotate(role="rollout")
    async def _generate(self, data: DataProto) -> DataProto:
        return await super().generate_sequences(data)


class AgentLoops:
    """Rollout servers, and the workers that talk to them.

    Args:
        config: the whole configuration.
        actor: the worker group whose weights the servers have.
        pool: the resources of the worker group, which the servers share.
    """

    task = AgentLoopWorker.generate_sequences

    def __init__(self, config: DictConfig, actor: Any, pool: Any) -> None:
        settings = config.actor_rollout_ref.rollout
        self._servers = _Servers.create(
            config=config, worker_group=actor, rollout_resource_pool=pool
        )
        client = self._servers.get_client()
        kind: Any = ray.remote(AgentLoopWorker)
        spread = kind.options(scheduling_strategy="SPREAD", num_cpus=0)
        self._workers = [
            spread.remote(config, client, rank) for rank in range(settings.agent.num_workers)
        ]
        self._checkpoints = _Checkpoints(
            config=omega_conf_to_dataclass(settings.checkpoint_engine),
            actor_wg=actor,
            replicas=self._servers.get_replicas(),
        )
        self._checkpoints.sleep_replicas()

    def generate_sequences(self, batch: Any) -> Any:
        """Let the workers answer the samples of a batch, or of its metadata; does not wait."""
        return call_actors(batch, [worker.generate_sequences for worker in self._workers])

    def update_weights(self, step: int) -> None:
        """Give the servers the actor's weights, those of training step ``step``."""
        self._checkpoints.update_weights(step)

    def end(self) -> None:
        """End the servers and the workers."""
        servers = [server for replica in self._servers.get_replicas() for server in replica.servers]
        for actor in (*self._workers, *servers):
            ray.kill(actor)

    def sleep(self) -> None:
        """Give the accelerators' memory to training, until weights come again."""
        self._checkpoints.sleep_replicas()
