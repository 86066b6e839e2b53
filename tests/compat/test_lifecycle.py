"""init, close and settings."""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict

import tq_redis
from tests.compat.conftest import Start
from tests.compat.peer import IS_PEER, differs, tq

NAMES = """
    init close get_metrics_endpoint kv_put kv_batch_put kv_batch_get kv_batch_get_by_meta kv_list
    kv_clear async_kv_put async_kv_batch_put async_kv_batch_get async_kv_batch_get_by_meta
    async_kv_list async_kv_clear KVBatchMeta save_checkpoint load_checkpoint get_client BatchMeta
    TransferQueueClient StorageKeyNotFoundError BaseSampler GRPOGroupNSampler SequentialSampler
    RankAwareSampler SeqlenBalancedSampler
"""


@pytest.fixture
def memory(redis_url: str, namespace: str) -> dict[str, Any]:
    """Settings of a queue of this process alone."""
    return {
        "redis": {"url": redis_url, "namespace": namespace},
        "data": {"backend": "memory"},
        "timeout_s": 20,
    }


@pytest.fixture
def closed() -> Iterator[None]:
    """No queue before and after."""
    tq.close()
    yield
    tq.close()


def test_the_module_has_the_names() -> None:
    assert set(re.findall(r"\w+", NAMES)) <= set(tq.__all__)
    assert all(hasattr(tq, name) for name in tq.__all__)
    assert tq.__version__ == "0.1.11"


@pytest.mark.parametrize(
    "module",
    ["client", "interface", "metadata", "sampler", "sampler.base", "sampler.sequential_sampler"],
)
def test_the_module_has_these_parts(module: str) -> None:
    from importlib import import_module

    assert import_module(f"{tq.__name__}.{module}")


@pytest.mark.usefixtures("closed")
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(tq.get_client, id="get_client"),
        pytest.param(tq.kv_list, id="kv_list"),
        pytest.param(lambda: tq.kv_put("k", "p", tag={}), id="kv_put"),
    ],
)
def test_without_a_queue_calls_say_so(call: Any) -> None:
    with pytest.raises(AssertionError, match="init"):
        call()


@pytest.mark.usefixtures("closed")
def test_without_a_queue_there_is_nothing_to_save() -> None:
    for call in (tq.save_checkpoint, tq.load_checkpoint):
        with pytest.raises(RuntimeError, match=r"init"):
            call("anywhere")


def test_init_returns_the_settings_and_then_what_it_is_given(start: Start) -> None:
    conf = start(polling_mode=False)
    assert isinstance(conf, DictConfig)
    assert conf.controller.sampler == "SequentialSampler"
    assert conf.backend.SimpleStorage.num_data_storage_units == 2
    assert tq.init() is None
    assert tq.init(conf) is conf
    assert tq.get_metrics_endpoint() is None


@differs("the metrics of tq_redis are served too, and each is read when it is asked for")
@pytest.mark.usefixtures("closed")
def test_metrics_are_served_by_who_started_the_queue(memory: dict[str, Any]) -> None:
    tq.init(OmegaConf.create({"metrics": {"enabled": True}, "tq_redis": memory}))
    meta = tq.get_client().put(TensorDict({"x": torch.ones(4, 1)}, [4]), partition_id="p")
    tq.get_client().get_meta(["x"], 1, "p", task_name="train")
    with urlopen(f"http://{tq.get_metrics_endpoint()}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    assert meta.size == 4
    assert {
        'tq_partition_samples{partition="p"} 4.0',
        "tq_partitions_total 1.0",
        'tq_partition_samples_total{partition_id="p"} 4.0',
        'tq_partition_production_progress{partition_id="p",task_name="all"} 1.0',
        'tq_partition_consumption_progress{partition_id="p",task_name="train"} 0.25',
        "tq_global_index_allocated_total 4.0",
    } <= set(lines)
    tq.close()
    assert tq.get_metrics_endpoint() is None


@differs("it has nothing that redis-cli shows")
@pytest.mark.usefixtures("closed")
def test_who_starts_a_queue_says_how_redis_cli_shows_it(
    memory: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    tq.init(OmegaConf.create({"announce": True, "tq_redis": memory}))
    tq.kv_put("a", "train", {"x": torch.ones(1)}, {"n": 1})
    command = capsys.readouterr().out.partition(": ")[2].strip()
    shown = subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout
    assert shown.split()[:2] == ["samples", "1"]


def test_close_can_be_repeated_and_init_starts_anew(start: Start) -> None:
    start(polling_mode=False)
    tq.kv_put("k", "p", {"x": torch.ones(1)})
    tq.close()
    tq.close()
    start(polling_mode=False)
    assert tq.kv_list() == {}


@differs("needs the addresses of its servers")
def test_a_client_can_be_made_by_hand(start: Start) -> None:
    start()
    client = tq.TransferQueueClient("mine", None)
    client.initialize_storage_manager("SimpleStorage", {})
    client.put(tq_dict(1), partition_id="p")
    client.close()
    assert client.get_partition_list() == ["p"]


def tq_dict(rows: int) -> Any:
    from tensordict import TensorDict

    return TensorDict({"x": torch.ones(rows)}, batch_size=rows)


@pytest.mark.skipif(IS_PEER, reason="settings of ours")
def test_settings_of_both_stand_side_by_side(
    memory: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    conf = OmegaConf.create(
        {
            "enable": True,
            "metrics": {"enabled": False},
            "backend": {
                "storage_backend": "MooncakeStore",
                "SimpleStorage": {"num_data_storage_units": 8},
            },
            "tq_redis": memory,
        }
    )
    OmegaConf.set_struct(conf, True)
    with caplog.at_level(logging.INFO, logger="tq_redis"):
        complete = tq.init(conf)
    assert complete.backend.SimpleStorage.num_data_storage_units == 8
    assert tq_redis.get_client().config.timeout_s == 20
    (line,) = [record.message for record in caplog.records if "ignored" in record.message]
    assert "backend.SimpleStorage.num_data_storage_units" in line
    assert "enable," not in line
    tq.close()


@pytest.mark.skipif(IS_PEER, reason="settings of ours")
def test_a_wrong_setting_of_ours_is_refused(memory: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"redis\.ulr.*redis|Did you mean"):
        tq.init({"tq_redis": {**memory, "redis": {"ulr": "redis://nowhere"}}})
    with pytest.raises(ValueError, match="tq_redis"):
        tq.init({"tq_redis": 5})


@pytest.mark.skipif(IS_PEER, reason="errors of ours")
def test_errors_are_of_both_worlds(start: Start) -> None:
    start(polling_mode=True)
    for call, kinds in (
        (lambda: tq.kv_batch_get("k", "p"), (ValueError, tq_redis.NotFoundError)),
        (lambda: tq.kv_put("k", "p"), (ValueError, tq_redis.InputError)),
        (lambda: tq.kv_put(1, "p", tag={}), (TypeError, tq_redis.InputError)),
        (lambda: tq.get_client().get_meta(["x"], 0, "p"), (RuntimeError, tq_redis.InputError)),
    ):
        for kind in kinds:
            with pytest.raises(kind):
                call()


@pytest.mark.skipif(IS_PEER, reason="tags are JSON with us")
def test_tags_may_be_numbers_of_arrays_and_tensors(start: Start) -> None:
    import numpy as np

    start()
    tq.kv_put("k", "p", tag={"n": np.int64(3), "t": torch.tensor(2), "l": np.arange(2)})
    assert tq.kv_list("p") == {"p": {"k": {"n": 3, "t": 2, "l": [0, 1]}}}
    with pytest.raises(ValueError, match="JSON"):
        tq.kv_put("k", "p", tag={"o": object()})
