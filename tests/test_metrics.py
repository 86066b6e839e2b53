"""What Prometheus gets, scraped over HTTP and read by its own parser."""

from __future__ import annotations

import logging
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from urllib.request import urlopen

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import tq_redis as tq
from tests.conftest import WaitUntil
from tq_redis.config import load_config
from tq_redis.metrics import MetricsServer
from tq_redis.redis_server import start_server

Samples = dict[tuple[str, ...], float]
LABELS = ("partition", "task", "field", "fields")


def scrape(endpoint: str) -> dict[str, Samples]:
    """Metric -> values of its labels -> value."""
    with urlopen(f"http://{endpoint}/metrics", timeout=10) as answer:
        text = answer.read().decode()

    def values(labels: dict[str, str]) -> tuple[str, ...]:
        return tuple(labels[name] for name in LABELS if name in labels)

    return {
        family.name: {values(sample.labels): sample.value for sample in family.samples}
        for family in text_string_to_metric_families(text)
    }


def test_an_unbounded_queue_is_scraped_again_and_again(
    client: tq.Client,
    redis_url: str,
    namespace: str,
    wait_until: WaitUntil,
    caplog: pytest.LogCaptureFixture,
) -> None:
    meta = client.put({"x": torch.zeros(4)}, partition_id="train_1")
    client.put({"y": torch.zeros(1)}, meta[:1])
    client.get_meta(["x"], 2, "train_1", task_name="actor", lease=60)
    server = MetricsServer(load_config({"redis": {"url": redis_url, "namespace": namespace}}))
    try:
        with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING):
            waiter = pool.submit(client.get_meta, ["y"], 2, "train_1", task_name="critic")
            wait_until(lambda: client.get_standing("train_1").tasks.get("critic"))
            wait_until(lambda: client.get_standing("train_1").tasks["critic"].waiters)
            found = [scrape(server.endpoint) for _ in range(3)][-1]
            client.expect("train_1", 6)
            client.limit("train_1", "actor", 5)
            client.put({"y": torch.zeros(1)}, meta[1:2])
            waiter.result(timeout=10)
            after = scrape(server.endpoint)
        assert caplog.records == []
    finally:
        server.close()
    assert found["tq_up"] == {(): 1}
    assert found["tq_partitions"] == {(): 1}
    assert found["tq_partition_samples"] == {("train_1",): 4}
    assert found["tq_partition_samples_expected"] == {}
    assert found["tq_partition_produced"] == {("train_1", "x"): 4, ("train_1", "y"): 1}
    assert found["tq_task_ready"] == {("train_1", "actor", "x"): 2, ("train_1", "critic", "y"): 1}
    assert found["tq_task_leased"] == {("train_1", "actor"): 2, ("train_1", "critic"): 0}
    assert found["tq_task_waiting"] == {("train_1", "actor"): 0, ("train_1", "critic"): 1}
    assert found["tq_task_oldest_wait_seconds"]["train_1", "critic"] > 0
    assert after["tq_partition_samples_expected"] == {("train_1",): 6}
    assert after["tq_task_consumed"]["train_1", "critic"] == 2
    assert found["tq_task_limit"] == {}
    assert after["tq_task_limit"] == {("train_1", "actor"): 5}
    assert after["tq_task_unconsumed"] == {("train_1", "actor"): 4, ("train_1", "critic"): 2}
    assert after["tq_task_evicted"] == {("train_1", "actor"): 0, ("train_1", "critic"): 0}


def test_a_redis_that_is_gone_is_a_metric() -> None:
    with start_server() as redis:
        server = MetricsServer(load_config({"redis": {"url": redis.url}}))
    try:
        assert scrape(server.endpoint) == {"tq_up": {(): 0}}
    finally:
        server.close()


def test_an_address_that_cannot_be_listened_at(redis_url: str) -> None:
    config = load_config({"redis": {"url": redis_url}})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(tq.ConfigError, match=f"127.0.0.1:{port}.*port 0"):
            MetricsServer(config, port=port)


def test_the_command_serves_until_it_is_ended(
    client: tq.Client, redis_url: str, namespace: str
) -> None:
    client.put({"x": torch.zeros(4)}, partition_id="p")
    where = ["--url", redis_url, "--namespace", namespace]
    command = [sys.executable, "-m", "tq_redis", "metrics", *where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        (endpoint,) = re.findall(r"http://(.*)/metrics", said)
        assert scrape(endpoint)["tq_partition_samples"] == {("p",): 4}
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
