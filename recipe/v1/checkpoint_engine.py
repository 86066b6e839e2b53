"""Weights from the training processes to rollout servers that have processes of their own.

verl's own engines for this need CUDA, an NPU or RDMA.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from datetime import timedelta
from typing import Any

import ray
import torch
from safetensors.torch import load, save
from verl.checkpoint_engine import CheckpointEngine

BACKEND = "gloo"

# For each step of an exchange.
_TIMEOUT = timedelta(minutes=5)

_CheckpointEngine: Any = CheckpointEngine
_distributed: Any = torch.distributed

Lists = dict[str, list[Any]]


class GlooCheckpointEngine(_CheckpointEngine):
    """The first training process broadcasts the weights, in one piece, over gloo.

    A piece of memory for all weights is taken in each process; a large model would want buckets.

    Args:
        bucket_size: of verl's settings; not used.
        is_master: this is the first training process.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._is_master = is_master
        self._store: Any = None
        self._group: Any = None

    def prepare(self) -> dict[str, Any]:
        """The address at which the processes meet, if this is the first one."""
        if not self._is_master:
            return {}
        host = ray.util.get_node_ip_address()
        self._store = _distributed.TCPStore(
            host, 0, is_master=True, timeout=_TIMEOUT, wait_for_workers=False
        )
        return {"host": host, "port": self._store.port}

    @classmethod
    def build_topology(
        cls, actors: int, rollouts: int, metadata: list[dict[str, Any]]
    ) -> tuple[Lists, Lists]:
        """Arguments of :meth:`init_process_group` for each actor, and for each rollout process.

        Args:
            actors: training processes. Only the first of them is in the group.
            rollouts: processes that get the weights.
            metadata: what :meth:`prepare` returned in the first actor, and in the others.
        """
        meeting = {**metadata[0], "size": 1 + rollouts}

        def arguments(ranks: list[int | None]) -> Lists:
            same = {name: [value] * len(ranks) for name, value in meeting.items()}
            return {"rank": ranks, **same}

        return arguments([0, *[None] * (actors - 1)]), arguments([*range(1, 1 + rollouts)])

    def init_process_group(self, rank: int | None, size: int, host: str, port: int) -> None:
        """Meet the others.

        Args:
            rank: of this process in the group; None: it is not in it.
            size: of the group.
            host: of the first process.
            port: of the first process.
        """
        if rank is None:
            return
        if self._store is None:
            self._store = _distributed.TCPStore(host, port, is_master=False, timeout=_TIMEOUT)
        self._group = _distributed.ProcessGroupGloo(self._store, rank, size, _TIMEOUT)

    def finalize(self) -> None:
        """Part."""
        self._group = self._store = None

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> None:
        """Broadcast the weights. Each training process must call this: gathering them is a
        collective."""
        # Copies: two names may share one tensor, which safetensors refuses.
        state = {name: weight.detach().clone().contiguous() for name, weight in weights}
        if self._group is not None:
            content = torch.frombuffer(bytearray(save(state)), dtype=torch.uint8)
            await asyncio.to_thread(self._broadcast, torch.tensor([len(content)]), content)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Names and weights."""
        size = torch.zeros(1, dtype=torch.int64)
        await asyncio.to_thread(self._broadcast, size)
        content = torch.empty(int(size), dtype=torch.uint8)
        await asyncio.to_thread(self._broadcast, content)
        for named in load(content.numpy().tobytes()).items():
            yield named

    def _broadcast(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            self._group.broadcast([tensor], _distributed.BroadcastOptions()).wait()
