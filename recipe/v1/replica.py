"""verl's handle on a rollout server."""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.replica import RolloutReplica

from recipe.v1.server import GenerationServer

NAME = "transformers_server"

_RolloutReplica: Any = RolloutReplica


class TransformersReplica(_RolloutReplica):
    """One server."""

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
