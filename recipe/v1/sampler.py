"""verl's replay buffers, with the samples of a step in an order that does not depend on timing."""

from __future__ import annotations

import importlib
from typing import Any

from verl.trainer.ppo.v1 import replay_buffer

from recipe.v1.identity import sample_order

_ReplayBuffer: Any = replay_buffer.ReplayBuffer
_ReplayBufferAsync: Any = replay_buffer.ReplayBufferAsync
# Or what stands in its place.
_queue: Any = importlib.import_module("transfer_queue")


class _Ordered:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        untyped: Any = super()
        # A step of the tiny model takes less than the two seconds for which verl would sleep.
        untyped.__init__(*args, poll_interval=0.05, **kwargs)

    def _materialize_batch(self, partition_id: str, *args: Any) -> Any:
        untyped: Any = super()
        batch = untyped._materialize_batch(partition_id, *args)
        columns = _queue.kv_batch_get(batch.keys, partition_id, select_fields=["index"])
        batch.reorder(sample_order(batch.keys, list(columns["index"])))
        return batch


class OrderedReplayBuffer(_Ordered, _ReplayBuffer):
    """Samples in the order of the data. Chosen with ``trainer.v1.sampler.custom_sampler``.

    verl takes them in the order in which they were made, and their order decides which worker
    trains on which, and so the rounding of every sum.
    """


class OrderedReplayBufferAsync(_Ordered, _ReplayBufferAsync):
    """The same for verl's asynchronous modes. Which samples a step has, timing still decides."""
