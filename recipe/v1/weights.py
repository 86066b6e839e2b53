"""What hands weights to a rollout server: in a training process, or beside a server of its own."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from recipe.v1.replica import server_name

Named = tuple[str, torch.Tensor]


class ServerWeights(BaseRollout):
    """Sends the actor's weights to one server.

    Args:
        config: of the rollout.
        model_config: of the model.
        device_mesh: of the training processes.
        replica_rank: of the server; by default that of this training process: each has one.
    """

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int | None = None
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self._rank = torch.distributed.get_rank() if replica_rank is None else replica_rank
        self._server: Any = None

    async def resume(self, tags: list[str]) -> None:
        """Nothing to do: the server's weights stay in memory."""

    async def release(self) -> None:
        """Nothing to do: the server's weights stay in memory."""

    async def update_weights(
        self,
        weights: Iterable[Named] | AsyncIterable[Named],
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
        named: Any = ensure_async_iterator(weights)
        state = {name: weight.detach().float() async for name, weight in named}
        await self._server.load_weights.remote(state, global_steps)
