"""Starting, attaching to and ending an instance; and what is refused with which words."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import torch

import tq_redis as tq
from tq_redis import instance
from tq_redis.redis_server import start_server
from tq_redis.session import is_owner

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not answer is given up sooner."""
    monkeypatch.setattr(instance, "_CONTACT_S", 2.0)


@pytest.fixture(autouse=True)
def _closed_afterwards() -> Iterator[None]:
    yield
    tq.close()


def memory(url: str | None, namespace: str, **more: Any) -> dict[str, Any]:
    settings = {"redis": {"url": url, "namespace": namespace}, "data": {"backend": "memory"}}
    return settings | more


def python(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> str:
    """What it printed."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()


TRAINER = """
    import logging, time, ray, torch
    ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)

    @ray.remote(num_cpus=0)
    class Runner:
        def start(self):
            import tq_redis.compat.transfer_queue as tq
            from tq_redis.session import is_owner
            tq.init({{"resume": {state!r} == "resume", "tq_redis": {settings!r}}})
            found = tq.kv_list("p").get("p", {{}})
            columns = [tq.kv_batch_get("k", "p")["x"][0].tolist()] if found else ""
            tq.kv_put("k", "p", {{"x": torch.arange(2.0)}}, {{"n": 1}})
            return f"{{is_owner()}} {{found}} {{columns}}".strip()

        def close(self):
            import tq_redis.compat.transfer_queue as tq
            tq.close()

    runner = Runner.remote()
    print(ray.get(runner.start.remote()), flush=True)
    if {state!r} == "killed":
        time.sleep(600)
    ray.get(runner.close.remote())
"""


def test_without_settings_an_embedded_server_is_started_and_ended(
    namespace: str, wait_until: Callable[..., None]
) -> None:
    config = tq.init(memory(None, namespace))
    assert isinstance(config.redis.url, str)
    with redis.Redis.from_url(config.redis.url) as admin:
        tq.get_client().put({"x": torch.zeros(1)}, partition_id="p")
        assert admin.hget(f"tq:{namespace}:{{p}}", "samples") == b"1"
        tq.close()
        with pytest.raises(redis.ConnectionError):
            admin.ping()
    tq.close()  # idempotent


def test_close_leaves_no_key_without_a_lifetime(redis_url: str, namespace: str) -> None:
    tq.init(memory(redis_url, namespace))
    tq.get_client().put({"x": torch.zeros(2), "s": ["a", None]}, partition_id="p")
    tq.kv_put("k", "q", {"x": torch.zeros(1)}, {"tag": 1})
    tq.get_client().get_meta(["x"], 1, "p", task_name="t")
    tq.close()
    with redis.Redis.from_url(redis_url, decode_responses=True) as admin:
        left = list(admin.scan_iter(f"tq:{namespace}:*"))
        may_stay = (":next_sample", ":counted_by")
        assert all(":req:" in key or key.endswith(may_stay) for key in left), left
        assert all(admin.ttl(key) > 0 for key in left)


def test_the_environment_names_the_server(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_REDIS_URL", redis_url)
    monkeypatch.setenv("TQ_REDIS_NAMESPACE", namespace)
    config = tq.init({"data": {"backend": "memory"}})
    assert (config.redis.url, config.redis.namespace) == (redis_url, namespace)


def test_a_second_init_is_refused_only_with_settings(redis_url: str, namespace: str) -> None:
    config = tq.init(memory(redis_url, namespace))
    assert tq.init() == config
    with pytest.raises(tq.ConfigError, match="initialised already"):
        tq.init(memory(redis_url, "other"))


def test_no_instance_to_attach_to() -> None:
    with pytest.raises(tq.NotInitializedError, match=r"tq_redis\.init\(\)"):
        tq.get_client()
    with pytest.raises(tq.NotInitializedError):
        tq.kv_list()


def test_no_such_server_is_said_within_the_deadline(namespace: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(tq.ServerUnavailableError, match=f"127.0.0.1:{port}.*within 10 s") as caught:
        tq.init(memory(f"redis://:secret@127.0.0.1:{port}/0", namespace))
    assert time.monotonic() - start < 15
    assert caught.value.deadline == 10
    assert "secret" not in str(caught.value)


def test_a_server_can_be_checked_before_anything_is_started(
    redis_url: str, in_a_hurry: None
) -> None:
    tq.check_server({"redis": {"url": redis_url}})
    tq.check_server()
    with pytest.raises(tq.ServerUnavailableError, match="127.0.0.1:1/0"):
        tq.check_server({"redis": {"url": "redis://127.0.0.1:1/0"}})
    with pytest.raises(tq.ConfigError):
        tq.check_server({"rediss": {}})


def test_a_server_that_does_not_answer_is_said_within_the_deadline(
    namespace: str, in_a_hurry: None
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        start = time.monotonic()
        with pytest.raises(tq.ServerUnavailableError):
            tq.init(memory(url, namespace))
        assert time.monotonic() - start < 6


def test_a_wrong_password_is_said_at_once(namespace: str) -> None:
    with start_server() as server:
        with redis.Redis.from_url(server.url) as admin:
            admin.config_set("requirepass", "right")
        url = server.url.replace("redis://", "redis://:wrong@")
        start = time.monotonic()
        with pytest.raises(tq.AuthenticationError, match="refused this user"):
            tq.init(memory(url, namespace))
        assert time.monotonic() - start < 5


def test_a_server_that_evicts_is_refused(namespace: str) -> None:
    with start_server(options={"maxmemory-policy": "allkeys-lru"}) as server:
        with pytest.raises(tq.ServerPolicyError, match="allkeys-lru.*noeviction"):
            tq.init(memory(server.url, namespace))
        config = memory(server.url, namespace)
        config["redis"]["allow_eviction"] = True
        tq.init(config)
        tq.close()


def test_close_ends_the_rest_when_the_server_is_gone(
    namespace: str, caplog: pytest.LogCaptureFixture, in_a_hurry: None
) -> None:
    server = start_server()
    tq.init(memory(server.url, namespace))
    client = tq.get_client()
    server.stop()
    start = time.monotonic()
    tq.close()
    assert time.monotonic() - start < 15
    assert "expire by themselves" in caplog.text
    with pytest.raises(tq.ClosedError):
        client.get_partition_list()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"timeut_s": 3}, "timeut_s. Did you mean 'timeout_s'"),
        ({"redis": {"nmespace": "a"}}, "redis.nmespace. Did you mean 'namespace'"),
        ({"redis": {"namespace": "a b"}}, "redis.namespace must be a word"),
        ({"redis": {"url": "http://x"}}, "Bad Redis address"),
        ({"data": {"backend": "disk"}}, "backend"),
        ({"timeout_s": 0}, "timeout_s must be positive"),
    ],
)
def test_bad_settings(settings: dict[str, Any], says: str) -> None:
    settings.setdefault("data", {"backend": "memory"})
    with pytest.raises(tq.ConfigError, match=says):
        tq.init(settings)


def test_a_namespace_in_use_is_refused(redis_url: str, namespace: str) -> None:
    tq.init(memory(redis_url, namespace))
    other = python(f"""
        import tq_redis as tq
        try:
            tq.init({memory(redis_url, namespace)!r})
        except tq.ConfigError as error:
            print(error)
    """)
    out, err = other.communicate(timeout=60)
    assert f"Namespace {namespace!r}" in out, err
    assert f"in use by process {os.getpid()}" in out


def test_after_a_crash_the_next_run_takes_over_and_clears(redis_url: str, namespace: str) -> None:
    crashed = python(f"""
        import os, signal, torch, tq_redis as tq
        tq.init({memory(redis_url, namespace)!r})
        tq.get_client().put({{"x": torch.zeros(2)}}, partition_id="train_1")
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    crashed.communicate(timeout=60)
    assert crashed.returncode == -signal.SIGKILL
    with redis.Redis.from_url(redis_url) as admin:
        assert admin.exists(f"tq:{namespace}:{{train_1}}")
        left = list(admin.scan_iter(f"tq:{namespace}:*"))
        assert all(admin.ttl(key) > 0 for key in left), "a key without a lifetime"

    tq.init(memory(redis_url, namespace))

    assert tq.get_client().get_partition_list() == []


def test_ids_go_on_after_a_crash(redis_url: str, namespace: str) -> None:
    tq.init(memory(redis_url, namespace))
    first = tq.get_client().put({"x": torch.zeros(2)}, partition_id="p")
    tq.close()
    tq.init(memory(redis_url, namespace))
    second = tq.get_client().put({"x": torch.zeros(2)}, partition_id="p")
    assert min(second.global_indexes) > max(first.global_indexes)


def test_progress_command_shows_the_summary(redis_url: str, namespace: str) -> None:
    tq.init(memory(redis_url, namespace))
    tq.get_client().put({"x": torch.zeros(3)}, partition_id="train 1")
    shown = subprocess.run(
        tq.progress_command("train 1"), shell=True, capture_output=True, text=True, check=True
    ).stdout.split()
    assert shown[shown.index("samples") + 1] == "3"
    assert shown[shown.index("produced:x") + 1] == "3"


def test_progress_command_shows_no_password(namespace: str) -> None:
    with start_server() as server:
        with redis.Redis.from_url(server.url) as admin:
            admin.config_set("requirepass", "secret")
        tq.init(memory(server.url.replace("redis://", "redis://:secret@"), namespace))
        command = tq.progress_command("p")
        assert "secret" not in command
        shown = subprocess.run(
            command.replace("REDISCLI_AUTH=...", "REDISCLI_AUTH=secret"),
            shell=True,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "NOAUTH" not in shown.stdout + shown.stderr
        tq.close()


class TestOnRay:
    """The instance of a Ray job."""

    @pytest.fixture
    def queue(self, ray_session: None, redis_url: str, namespace: str) -> tq.Client:
        tq.init({"redis": {"url": redis_url, "namespace": namespace}})
        return tq.get_client()

    def test_workers_attach_by_themselves_and_end_nothing(self, queue: tq.Client) -> None:
        import ray

        @ray.remote(num_cpus=0)
        def work(meta: tq.BatchMeta) -> tuple[list[float], int]:
            client = tq.get_client()
            values = client.get_columns(meta)["x"].tolist()
            size = client.put({"y": torch.ones(2)}, meta).size
            tq.close()
            return values, size

        meta = queue.put({"x": torch.arange(2.0)}, partition_id="p")
        assert ray.get(work.remote(meta), timeout=60) == ([0.0, 1.0], 2)
        assert queue.get_columns(meta, ["y"])["y"].tolist() == [1.0, 1.0]

    def test_samples_outlive_the_worker_that_wrote_them(self, queue: tq.Client) -> None:
        import ray

        @ray.remote(num_cpus=0)
        class Producer:
            def put(self) -> tq.BatchMeta:
                return tq.get_client().put({"x": torch.arange(1000.0)}, partition_id="p")

        actor: Any = Producer
        producer = actor.remote()
        meta: Any = ray.get(producer.put.remote(), timeout=60)
        ray.kill(producer)

        assert torch.equal(queue.get_columns(meta)["x"], torch.arange(1000.0))

    def test_a_process_started_by_hand_reads_status_and_data(self, queue: tq.Client) -> None:
        import ray

        queue.put({"x": torch.arange(3.0)}, partition_id="train_1")
        other = python(
            """
            import json, logging, ray, tq_redis as tq
            ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
            tq.init()
            client = tq.get_client()
            meta = client.get_meta(["x"], 1, "train_1", mode="force_fetch")
            print(json.dumps([
                client.get_partition_list(),
                client.get_summary("train_1")["samples"],
                client.get_columns(meta)["x"].tolist(),
            ]))
            tq.close()
            """,
            RAY_ADDRESS=ray.get_runtime_context().gcs_address,
        )
        out, err = other.communicate(timeout=90)
        assert other.returncode == 0, err
        assert json.loads(out) == [["train_1"], 3, [0.0, 1.0, 2.0]]
        assert queue.get_summary("train_1")["samples"] == 3  # it ended nothing

    def test_workers_may_say_what_the_trainer_said(
        self, queue: tq.Client, redis_url: str, namespace: str
    ) -> None:
        import ray

        @ray.remote(num_cpus=0)
        def work(**settings: Any) -> str:
            try:
                tq.init({"redis": {"url": redis_url, "namespace": namespace}, **settings})
                return str(tq.get_client().get_partition_list())
            except tq.ConfigError as error:
                return error.message
            finally:
                tq.close()

        queue.put({"x": torch.zeros(1)}, partition_id="p")
        task: Any = work
        same, other = ray.get([task.remote(), task.remote(timeout_s=7, data={"units": 1})])
        assert same == "['p']"
        assert "data.units is 0, not 1; timeout_s is 60.0, not 7" in other
        assert queue.get_partition_list() == ["p"]

    @pytest.mark.parametrize("how", ["tq.init(settings)", "drop_in.init({'tq_redis': settings})"])
    def test_a_second_trainer_in_the_same_cluster_is_refused(
        self, queue: tq.Client, redis_url: str, namespace: str, how: str
    ) -> None:
        import ray

        queue.put({"x": torch.zeros(1)}, partition_id="p")
        other = python(
            f"""
            import logging, ray, tq_redis as tq, tq_redis.compat.transfer_queue as drop_in
            ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
            settings = {{"redis": {{"url": {redis_url!r}, "namespace": {namespace!r}}}}}
            try:
                {how}
            except tq.ConfigError as error:
                print(error)
            """,
            RAY_ADDRESS=ray.get_runtime_context().gcs_address,
        )
        out, err = other.communicate(timeout=90)
        assert f"Namespace {namespace!r}" in out, err
        assert f"in use by process {os.getpid()}" in out
        assert queue.get_partition_list() == ["p"]

    @pytest.mark.parametrize("end", ["pass", "sys.exit()", "1 / 0"])
    def test_a_program_that_does_not_close_leaves_nothing(
        self, ray_session: None, redis_url: str, namespace: str, end: str
    ) -> None:
        import ray

        settings = {"redis": {"url": redis_url, "namespace": namespace}}
        program = python(
            f"""
            import logging, sys, torch, ray, tq_redis as tq
            ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
            tq.init({settings!r})
            tq.get_client().put({{"x": torch.zeros(2)}}, partition_id="p")
            {end}
            """,
            RAY_ADDRESS=ray.get_runtime_context().gcs_address,
        )
        errors = program.communicate(timeout=90)[1]

        # Closing needs threads of executors, which Python ends before it calls atexit's functions.
        assert "Exception ignored" not in errors
        assert ("Traceback" in errors) == (end == "1 / 0"), errors
        with redis.Redis.from_url(redis_url, decode_responses=True) as admin:
            assert admin.exists(f"tq:{namespace}:{{p}}", f"tq:{namespace}:owner") == 0

    def test_what_a_run_left_in_a_ray_cluster_of_its_own_is_cleared(
        self, ray_session: None, redis_url: str, namespace: str
    ) -> None:
        settings = {"redis": {"url": redis_url, "namespace": namespace}}
        directory = tempfile.mkdtemp(prefix="tq-ray-")  # short, for Ray's sockets
        crashed = python(
            f"""
            import logging, os, signal, torch, ray, tq_redis as tq
            ray.init(
                address="local", num_cpus=1, object_store_memory=100 << 20,
                include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False,
                _temp_dir={directory!r},
            )
            tq.init({settings!r})
            tq.get_client().put({{"x": torch.zeros(2)}}, partition_id="train_1")
            os.kill(os.getpid(), signal.SIGKILL)
            """
        )
        _, err = crashed.communicate(timeout=120)
        assert crashed.returncode == -signal.SIGKILL, err

        tq.init(settings)

        assert tq.get_client().get_partition_list() == []
        shutil.rmtree(directory, ignore_errors=True)

    def test_a_trainer_that_is_killed_leaves_its_samples_to_the_next_one(
        self,
        ray_session: None,
        redis_url: str,
        namespace: str,
        wait_until: Callable[..., None],
    ) -> None:
        """In a Ray cluster that was there before. As with verl, the owner is an actor."""
        import ray

        settings = {"redis": {"url": redis_url, "namespace": namespace}}
        address = ray.get_runtime_context().gcs_address

        def trainer(state: str) -> subprocess.Popen[str]:
            return python(TRAINER.format(settings=settings, state=state), RAY_ADDRESS=address)

        first = trainer("killed")
        assert first.stdout is not None
        assert first.stdout.readline() == "True {}\n", first.communicate()
        first.kill()
        first.communicate()
        with redis.Redis.from_url(redis_url) as admin:
            owner = json.loads(admin.get(f"tq:{namespace}:owner") or "")["pid"]
        wait_until(lambda: not psutil.pid_exists(owner), 60.0)
        assert finished(trainer("resume")) == "True {'k': {'n': 1}} [[0.0, 1.0]]"

    @pytest.mark.parametrize("backend", ["ray", "zmq"])
    def test_of_processes_of_one_job_that_start_at_once_one_owns_and_all_attach(
        self, ray_session: None, redis_url: str, namespace: str, backend: str
    ) -> None:
        import ray

        settings = {
            "redis": {"url": redis_url, "namespace": namespace},
            "data": {"backend": backend, "units": int(backend == "zmq")},
        }

        class Starter:
            def start(self) -> bool:
                tq.init(settings)
                return is_owner()

            def partitions(self) -> list[str]:
                return tq.get_client().get_partition_list()

            def close(self) -> None:
                tq.close()

        actor: Any = ray.remote(num_cpus=0)(Starter)
        starters = [actor.remote() for _ in range(3)]
        ray.get([starter.__ray_ready__.remote() for starter in starters], timeout=120)
        owns = ray.get([starter.start.remote() for starter in starters], timeout=120)
        assert sorted(owns) == [False, False, True]
        tq.init(settings)
        meta = tq.get_client().put({"x": torch.arange(3.0)}, partition_id="p")
        assert tq.get_client().get_columns(meta)["x"].tolist() == [0, 1, 2]
        listed = ray.get([starter.partitions.remote() for starter in starters], timeout=90)
        assert listed == [["p"]] * 3
        tq.close()
        for _, starter in sorted(zip(owns, starters, strict=True), key=lambda pair: pair[0]):
            ray.get(starter.close.remote(), timeout=90)

    def test_close_ends_the_stores(
        self, queue: tq.Client, namespace: str, wait_until: Callable[..., None]
    ) -> None:
        from ray.util import list_named_actors

        def stores() -> list[str]:
            named: Any = list_named_actors(all_namespaces=True)
            return [actor["name"] for actor in named if namespace in actor["name"]]

        queue.put({"x": torch.zeros(1)}, partition_id="p")
        assert stores()
        tq.close()
        wait_until(lambda: not stores())
