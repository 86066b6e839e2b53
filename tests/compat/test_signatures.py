"""What can be called, with which arguments in which order."""

from __future__ import annotations

import inspect
from importlib import resources
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.compat.peer import tq

# A name with "=" may be left out.
FUNCTIONS = {
    "init": "conf=",
    "close": "",
    "get_client": "",
    "get_metrics_endpoint": "",
    "kv_put": "key partition_id fields= tag= data_parser=",
    "kv_batch_put": "keys partition_id fields= tags= data_parser=",
    "kv_batch_get": "keys partition_id select_fields=",
    "kv_batch_get_by_meta": "meta select_fields=",
    "kv_list": "partition_id=",
    "kv_clear": "keys partition_id",
    "save_checkpoint": "checkpoint_dir include_storage= metadata=",
    "load_checkpoint": "checkpoint_dir",
    "KVBatchMeta": "keys= tags= partition_id= fields= extra_info=",
    "StreamingDataset": "config batch_size micro_batch_size data_fields partition_id task_name "
    "dp_rank should_check_consumption_status= fetch_batch_fn= process_batch_fn=",
    "StreamingDataLoader": "dataset num_workers= collate_fn= pin_memory= worker_init_fn= "
    "multiprocessing_context= prefetch_factor= persistent_workers= pin_memory_device=",
    "SequentialSampler": "",
    "GRPOGroupNSampler": "n_samples_per_prompt=",
    "RankAwareSampler": "",
    "SeqlenBalancedSampler": "n_samples_per_prompt= dp_size=",
}
METHODS = {
    "get_meta": "data_fields batch_size partition_id mode= task_name= sampling_config=",
    "put": "data metadata= partition_id= data_parser=",
    "get_data": "metadata",
    "set_custom_meta": "metadata",
    "clear_samples": "metadata",
    "clear_partition": "partition_id",
    "get_consumption_status": "task_name partition_id",
    "get_production_status": "data_fields partition_id",
    "check_consumption_status": "task_name partition_id",
    "check_production_status": "data_fields partition_id",
    "reset_consumption": "partition_id task_name=",
    "get_partition_list": "",
    "kv_retrieve_meta": "keys partition_id create=",
    "kv_retrieve_keys": "global_indexes partition_id",
    "kv_list": "partition_id=",
    "save_controller_checkpoint": "path",
    "load_controller_checkpoint": "path",
    "save_storage_checkpoint": "checkpoint_dir",
    "load_storage_checkpoint": "checkpoint_dir",
}
VALUES = {
    "BatchMeta": "get_dtypes get_shapes get_extra_info set_extra_info update_extra_info "
    "remove_extra_info clear_extra_info has_extra_info get_all_extra_info get_all_custom_meta "
    "update_custom_meta clear_custom_meta add_fields select_samples select_fields copy chunk "
    "chunk_by_partition union concat reorder empty",
    "KVBatchMeta": "select_keys reorder chunk concat",
    "BaseSampler": "sample has_cached_result clear_cache save_checkpoint load_checkpoint",
    "StreamingDataset": "reset step",
    "StreamingDataLoader": "reset step get_buffer",
}


def arguments(call: Any) -> str:
    """Names of a call's arguments, but for the socket that transfer_queue passes itself."""
    found = inspect.signature(call).parameters.values()
    named = [one for one in found if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    return " ".join(
        one.name + ("" if one.default is one.empty else "=")
        for one in named
        if one.name not in ("self", "socket")
    )


@pytest.mark.parametrize(("name", "expected"), FUNCTIONS.items())
def test_functions_and_constructors(name: str, expected: str) -> None:
    assert arguments(getattr(tq, name)) == expected
    twin = getattr(tq, f"async_{name}", None)
    assert (twin is not None) == name.startswith("kv_")
    assert twin is None or (arguments(twin) == expected and inspect.iscoroutinefunction(twin))


@pytest.mark.parametrize(("name", "expected"), METHODS.items())
def test_methods_of_the_client_and_their_twins(name: str, expected: str) -> None:
    assert arguments(getattr(tq.TransferQueueClient, name)) == expected
    twin = getattr(tq.TransferQueueClient, f"async_{name}")
    assert arguments(twin) == expected
    assert inspect.iscoroutinefunction(twin)


@pytest.mark.parametrize(("kind", "names"), VALUES.items())
def test_methods_of_values(kind: str, names: str) -> None:
    assert all(callable(getattr(getattr(tq, kind), name)) for name in names.split())


def test_default_settings_are_a_file_of_the_module() -> None:
    file: Any = resources.files(tq.__name__) / "config.yaml"
    conf = OmegaConf.load(file)
    assert conf.controller.sampler == "SequentialSampler"
    assert conf.backend.SimpleStorage.num_data_storage_units == 2
