"""The queue outside Ray: storage units as processes, clients that know only Redis."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import torch
from click.testing import CliRunner

import tq_redis as tq
from tests.conftest import WaitUntil
from tq_redis import storage_unit
from tq_redis.cli import main


@pytest.fixture
def environment(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """Of every process of the queue."""
    monkeypatch.setenv("TQ_REDIS_URL", redis_url)
    monkeypatch.setenv("TQ_REDIS_NAMESPACE", namespace)
    yield dict(os.environ)
    tq.close()


class UnitProcess:
    """``tq-redis storage-unit``, as a user starts it."""

    def __init__(self, environment: dict[str, str], *options: str) -> None:
        command = [sys.executable, "-m", "tq_redis", "storage-unit", "--capacity", "0.1", *options]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()

    def end(self) -> str:
        """Returns what it wrote to stderr."""
        self.process.terminate()
        _, errors = self.process.communicate(timeout=20)
        assert self.process.returncode == 0, errors
        return errors


@pytest.fixture
def units(environment: dict[str, str]) -> Iterator[list[UnitProcess]]:
    units = [UnitProcess(environment), UnitProcess(environment, "--curve")]
    yield units
    for unit in units:
        if unit.process.poll() is None:
            unit.end()


def run(code: str, environment: dict[str, str]) -> str:
    """In a process of its own; what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", f"import tq_redis as tq\n{code}\ntq.close()"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


READ = """
client = tq.get_client()
meta = client.get_meta(["x", "s"], 8, "p", task_name="t", timeout=20)
print(client.get_data(meta)["x"].sum().item(), client.get_columns(meta)["s"])
client.put({"y": client.get_data(meta)["x"] * 2}, meta)
"""


def test_a_queue_without_ray(
    environment: dict[str, str], namespace: str, redis_url: str, units: list[UnitProcess]
) -> None:
    assert all(namespace in unit.said and "tcp://127.0.0.1:" in unit.said for unit in units)
    tq.init({"data": {"backend": "zmq"}})
    client = tq.get_client()
    for turn in range(2):  # both units are used
        client.put({"x": torch.arange(4.0) + turn, "s": ["a", None, {"k": 1}, b"\0"]}, None, "p")
    printed = run(READ, environment)
    assert printed == str([16.0]).strip("[]") + " " + str(["a", None, {"k": 1}, b"\0"] * 2)
    meta = client.get_meta(["y"], 8, "p", task_name="u", timeout=20)
    assert client.get_data(meta)["y"].tolist() == [0, 2, 4, 6, 2, 4, 6, 8]
    tq.close()
    for unit in units:
        unit.end()
    with redis.Redis.from_url(redis_url, decode_responses=True) as admin:
        left = [key for key in admin.scan_iter(f"tq:{namespace}:*") if ":req:" not in key]
    assert set(left) <= {f"tq:{namespace}:next_sample", f"tq:{namespace}:counted_by"}


def test_units_serve_one_run_after_the_other(
    environment: dict[str, str], units: list[UnitProcess]
) -> None:
    for turn in range(2):
        tq.init({"data": {"backend": "zmq"}})
        client = tq.get_client()
        meta = client.put({"x": torch.full((3,), float(turn))}, partition_id="p")
        assert client.get_data(meta)["x"].tolist() == [float(turn)] * 3
        used = client.get_store_usage()
        assert sum(usage.blocks for usage in used) == 1  # nothing of the run before
        assert {usage.capacity for usage in used} == {int(0.1 * 2**30)}
        tq.close()


def test_a_unit_that_is_killed_is_a_loss_that_names_the_rows(
    environment: dict[str, str], wait_until: WaitUntil
) -> None:
    unit = UnitProcess(environment)
    try:
        tq.init({"data": {"backend": "zmq"}})
        client = tq.get_client()
        meta = client.put({"x": torch.zeros(3), "y": torch.zeros(3)}, partition_id="p")
        unit.process.kill()
        unit.process.wait()
        with pytest.raises(tq.DataLostError, match="put them again") as lost:
            client.get_data(meta, ["x"], timeout=20)
        assert (lost.value.rows, lost.value.fields) == (tuple(meta.global_indexes), ("x",))
    finally:
        unit.process.kill()
        unit.process.communicate()
    second = UnitProcess(environment)
    try:
        again = client.put({"x": torch.ones(3)}, meta)
        assert client.get_data(again, ["x"])["x"].tolist() == [1.0] * 3
        tq.close()
    finally:
        second.end()


@pytest.mark.usefixtures("ray_session")
def test_a_field_for_processes_outside_ray(
    environment: dict[str, str], units: list[UnitProcess]
) -> None:
    tq.init({"data": {"routes": {"image_*": "zmq"}}})
    client = tq.get_client()
    columns: dict[str, Any] = {"image_path": ["a.png", "b.png"], "x": torch.arange(2)}
    meta = client.put(columns, partition_id="p")
    assert client.get_columns(meta)["image_path"] == ["a.png", "b.png"]
    outside = """
client = tq.get_client()
meta = client.get_meta(["image_path", "x"], 2, "p", task_name="t", timeout=20)
print(client.get_columns(meta, ["image_path"]))
try:
    client.get_columns(meta, ["x"])
except tq.NotInitializedError as error:
    print(error)
"""
    printed = run(outside, environment)
    assert printed.startswith("{'image_path': ['a.png', 'b.png']}")
    assert "has not joined Ray" in printed


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--host", "0.0.0.0"], "advertise"),
        (["--host", "203.0.113.1"], "cannot listen at tcp://203.0.113.1"),
        (["--url", "redis://127.0.0.1:1/0"], "127.0.0.1:1"),
        (["--parser", "load"], "name=package.module:function, each name once, got 'load'"),
        (["--parser", "load=os:sep", "--parser", "load=os:sep"], "each name once"),
        (["--parser", "load=nowhere.at_all:f"], "Parser 'load' cannot be imported from 'nowhere"),
        (["--parser", "load=os:nothing"], "AttributeError"),
        (["--parser", "load=os:sep"], "is no function, but of type str"),
    ],
)
def test_what_is_wrong_with_a_unit_is_said(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, options: list[str], says: str
) -> None:
    monkeypatch.setattr(storage_unit, "_CONTACT_S", 2.0)
    result = CliRunner().invoke(main, ["storage-unit", *options])
    assert result.exit_code == 1
    assert says in result.output
    assert "Traceback" not in result.output
