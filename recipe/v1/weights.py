"""The training process's end of a rollout server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout

from recipe.v1.replica import server_name


class ServerWeights(BaseRollout):
    """Sends the actor's weights to the server of this rank: each has one."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self._rank: int = torch.distributed.get_rank()
        self._server: Any = None

    async def resume(self, tags: list[str]) -> None:
        """Nothing to do: the server's weights stay in memory."""

    async def release(self) -> None:
        """Nothing to do: the server's weights stay in memory."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **unused: Any,
    ) -> None:
        """Send the weights of training step ``global_steps``, and wait until the server has them.

        Every rank must consume ``weights`` to the end: gathering a sharded tensor is a collective.

        Raises:
            ValueError: the weights come in another wire format.
        """
        if wire_format != "named_tensors":
            raise ValueError(f"The transformers_server cannot read {wire_format!r} weights")
        if self._server is None:
            self._server = ray.get_actor(server_name(self._rank))
        state = {name: weight.detach().float() for name, weight in weights}
        await self._server.load_weights.remote(state, global_steps)
