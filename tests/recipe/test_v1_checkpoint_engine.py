"""Weights on their way from training processes to rollout processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from recipe.v1.checkpoint_engine import GlooCheckpointEngine

ACTORS, ROLLOUTS = 2, 2

Weights = dict[str, torch.Tensor]


def engines() -> list[Any]:
    """Those of the actors, then those of the rollout processes; all of them in this process."""
    new: Any = GlooCheckpointEngine
    actors = [new(bucket_size=0, is_master=rank == 0) for rank in range(ACTORS)]
    return actors + [new(bucket_size=0) for _ in range(ROLLOUTS)]


async def exchange(all_engines: list[Any], weights: Weights) -> list[Weights]:
    """What each rollout process gets, in the order of calls in which verl exchanges weights."""
    metadata = [engine.prepare() for engine in all_engines]
    actors, rollouts = type(all_engines[0]).build_topology(ACTORS, ROLLOUTS, metadata)
    arguments = [
        {name: values[rank] for name, values in lists.items()}
        for lists, count in ((actors, ACTORS), (rollouts, ROLLOUTS))
        for rank in range(count)
    ]
    await asyncio.gather(
        *(
            asyncio.to_thread(engine.init_process_group, **its)
            for engine, its in zip(all_engines, arguments, strict=True)
        )
    )

    async def received(engine: Any) -> Weights:
        return {name: weight async for name, weight in engine.receive_weights(global_steps=1)}

    sent = [engine.send_weights(iter(weights.items()), 1) for engine in all_engines[:ACTORS]]
    got = [received(engine) for engine in all_engines[ACTORS:]]
    results = await asyncio.gather(*sent, *got)
    for engine in all_engines:
        engine.finalize()
    return results[ACTORS:]


@pytest.mark.timeout(60)
def test_every_rollout_process_gets_the_weights_as_they_are_each_time() -> None:
    table = torch.randn(5, 3)
    weights = {
        "embedding": table,
        "head": table,  # one tensor under two names
        "transposed": table.T,
        "half": torch.randn(4).bfloat16(),
        "scale": torch.tensor(2.5),
    }
    all_engines = engines()

    for _ in range(2):
        for got in asyncio.run(exchange(all_engines, weights)):
            assert got.keys() == weights.keys()
            for name, weight in weights.items():
                assert got[name].dtype == weight.dtype
                assert torch.equal(got[name], weight)
        table.mul_(2)
