"""A program written for transfer_queue, run by test_drop_in.py in a process of its own: it joins
the Ray cluster at the address given, with its queue in the Redis at the other.

Prints what its workers see, as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import ray
import torch
import transfer_queue as tq  # pyright: ignore[reportMissingImports]
from tensordict import TensorDict
from transfer_queue import KVBatchMeta  # pyright: ignore[reportMissingImports]
from transfer_queue.metadata import BatchMeta  # pyright: ignore[reportMissingImports]

ASK = "import transfer_queue, transfer_queue.metadata as m; print(m.__name__)"


def child() -> str:
    """What a process that this one starts imports."""
    found = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    return found.stdout.strip()


@ray.remote
class Worker:
    """Knows nothing of tq_redis."""

    def look(self, kv: Any, batch: Any) -> list[Any]:
        import transfer_queue as tq  # pyright: ignore[reportMissingImports]

        known = isinstance(kv, tq.KVBatchMeta) and isinstance(batch, tq.BatchMeta)
        data = tq.kv_batch_get_by_meta(kv)  # attaches by itself
        tq.init()
        tq.get_client().put(TensorDict({"y": data["x"] + 1}, batch_size=2), metadata=batch)
        tq.close()
        return [tq.__name__, known, child()]


def main(address: str, redis: str, namespace: str) -> None:
    """Put, let workers work on it, and tell."""
    ray.init(address=address, log_to_driver=False, runtime_env={"env_vars": {"MINE": "1"}})
    tq.init({"tq_redis": {"redis": {"url": redis, "namespace": namespace}}})
    kv = tq.kv_batch_put(["a", "b"], "p", TensorDict({"x": torch.zeros(2)}, batch_size=2))
    assert isinstance(kv, KVBatchMeta)
    batch = tq.get_client().kv_retrieve_meta(["a", "b"], "p")
    assert isinstance(batch, BatchMeta)
    kind: Any = Worker
    plain = kind.remote()
    own_settings = kind.options(runtime_env={"env_vars": {"OTHER": "1"}}).remote()
    seen = [ray.get(worker.look.remote(kv, batch)) for worker in (plain, own_settings)]
    written = tq.kv_batch_get(["a", "b"], "p", "y")["y"].tolist()
    tq.close()
    told = {"here": tq.__name__, "child": child(), "workers": seen, "y": written}
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
