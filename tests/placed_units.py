"""Storage units over two nodes, as placement groups find them: run by test_placement.py.

``python -m tests.placed_units`` exits with 0 when every step was right.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
import ray
import torch
from ray.util import list_named_actors, placement_group_table

import tq_redis as tq
from tests.raylets import two_raylets
from tq_redis.config import Config, load_config
from tq_redis.data.unit_parsers import load_parsers
from tq_redis.unit_actors import start_units

SETTINGS: dict[str, Any] = {"redis": {"namespace": "placed"}}

# Starts units that reserve the CPU of both nodes, and lives until it is killed.
TRAINER = """
import sys, ray, tq_redis as tq
ray.init(address=sys.argv[1], log_to_driver=False)
tq.init({"redis": {"namespace": "placed"},
         "data": {"backend": "zmq", "units": 2, "placement": {"cpus": 1}}})
print("started", flush=True)
sys.stdin.read()
"""


def data(units: int, **placement: Any) -> dict[str, Any]:
    return {"backend": "zmq", "units": units, "placement": placement}


def nodes() -> list[str]:
    """Of the units that run."""
    actors: Any = ray._private.state.actors()  # type: ignore[attr-defined]
    return sorted(
        actor["Address"]["NodeID"]
        for actor in actors.values()
        if actor["State"] == "ALIVE" and actor["Name"].startswith("unit:placed:")
    )


def until(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, condition
        time.sleep(0.02)


def nothing_is_left() -> None:
    assert list_named_actors(all_namespaces=True) == []
    groups: dict[str, Any] = placement_group_table()
    assert {group["state"] for group in groups.values()} <= {"REMOVED"}
    until(lambda: ray.available_resources().get("CPU") == 2)


def works() -> None:
    client = tq.get_client()
    metas = [client.put({"x": torch.arange(3)}, partition_id="p") for _ in range(2)]
    assert [client.get_data(meta)["x"].tolist() for meta in metas] == [[0, 1, 2]] * 2
    assert [usage.blocks for usage in client.get_store_usage()] == [1, 1]


def a_crash_leaves_nothing(address: str, both: list[str]) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "started\n"
        assert nodes() == both
        others_use_it()
        trainer.kill()
    assert nodes() == both  # they outlive it, and what they hold
    tq.init({**SETTINGS, "data": data(2, strategy="STRICT_SPREAD", cpus=1)})
    assert nodes() == both
    assert len(list_named_actors(all_namespaces=True)) == 2
    works()
    tq.close()
    nothing_is_left()


def others_use_it() -> None:
    with pytest.raises(tq.DeadlineError, match=r"for 1 storage .*'CPU': 1.0}.*'CPU': 0.* is free"):
        start_units(elsewhere(data(1, cpus=1)), 2.5, load_parsers)


def elsewhere(settings: dict[str, Any]) -> Config:
    """Of an instance whose Redis nobody gets to ask."""
    return load_config({"redis": {"url": "redis://x", "namespace": "other"}, "data": settings})


def what_cannot_be_placed_is_said() -> None:
    for placement, says in (
        ({"cpus": 1}, r"Only 2 of 3 .* SPREAD: each takes {'CPU': 1.0} of its node"),
        ({"strategy": "STRICT_PACK", "cpus": 0.5}, "Only 2 of 3 .* the one node that all share"),
        ({"resources": {"storage": 1}}, "Only 2 of 3 .*'storage': 1.0.* 2 nodes, 1 of them"),
        ({"resources": {"nowhere": 1}}, "Only 0 of 3 .*'nowhere': 1.0.* 2 nodes, 0 of them"),
    ):
        with pytest.raises(tq.ConfigError, match=says):
            start_units(elsewhere(data(3, **placement)), 60.0, load_parsers)
    says = "Only 2 of 3 .* STRICT_SPREAD: .* a node of its own, .* has 2 nodes, 2 of them"
    with pytest.raises(tq.ConfigError, match=says):
        tq.init({**SETTINGS, "data": data(3, strategy="STRICT_SPREAD")})
    nothing_is_left()


def main() -> None:
    with two_raylets(100 << 20, resources={"storage": 2}) as (cluster, far):
        both = sorted(node["NodeID"] for node in ray.nodes())
        what_cannot_be_placed_is_said()
        a_crash_leaves_nothing(cluster.address, both)
        tq.init({**SETTINGS, "data": data(2, resources={"storage": 1, "memory": 1 << 20})})
        assert nodes() == [far.node_id] * 2
        works()
        tq.close()
        nothing_is_left()


if __name__ == "__main__":
    main()
