"""Saving and loading the queue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.compat.peer import differs, stack, tq


def fill() -> Any:
    data = TensorDict({"x": torch.tensor([[1, 2], [3, 4]]), "u": stack("a", "b")}, batch_size=2)
    tq.kv_batch_put(["k", "l"], "p", data, [{"n": 1}, {"n": 2}])
    tq.kv_put("tagged", "q", tag={"status": "running"})
    return tq.get_client().get_meta(["x"], 1, "p", task_name="t")


def test_what_was_saved_comes_back(client: Any, tmp_path: Path) -> None:
    claimed = fill()
    folder = tmp_path / "step_1" / "transfer_queue"  # parents are made
    assert tq.save_checkpoint(folder, metadata={"global_steps": 1}) is None
    assert folder.is_dir()
    tq.kv_clear("k", "p")
    tq.kv_put("l", "p", {"x": torch.zeros(2, dtype=torch.int64)}, {"n": 9})
    client.clear_partition("q")
    assert tq.load_checkpoint(str(folder)) is None
    assert tq.kv_list() == {
        "p": {"k": {"n": 1}, "l": {"n": 2}},
        "q": {"tagged": {"status": "running"}},
    }
    got = tq.kv_batch_get(["l", "k"], "p")
    assert got["x"].to_padded_tensor(padding=0).tolist() == [[3, 4], [1, 2]]
    assert got.get("u").tolist() == ["b", "a"]
    assert client.get_data(claimed)["x"].to_padded_tensor(padding=0).tolist() == [[1, 2]]
    assert client.get_consumption_status("t", "p")[1].tolist() == [1, 0]


def test_a_save_replaces_the_one_before(client: Any, tmp_path: Path) -> None:
    fill()
    folder = tmp_path / "checkpoint"
    tq.save_checkpoint(folder)
    tq.kv_clear(["k", "l"], "p")
    tq.save_checkpoint(folder, include_storage=False)  # without effect
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    tq.kv_put("new", "p", tag={})
    tq.load_checkpoint(folder)
    assert tq.kv_list("p") == {"p": {}}


def test_what_is_not_there_cannot_be_loaded(client: Any, tmp_path: Path) -> None:
    fill()
    with pytest.raises(FileNotFoundError):
        tq.load_checkpoint(tmp_path / "nowhere")
    assert tq.kv_list("p") == {"p": {"k": {"n": 1}, "l": {"n": 2}}}


@differs("FileNotFoundError, and the storage may be replaced already")
def test_a_broken_checkpoint_changes_nothing(client: Any, tmp_path: Path) -> None:
    fill()
    (tmp_path / "broken").mkdir()
    with pytest.raises(RuntimeError, match="broken"):
        tq.load_checkpoint(tmp_path / "broken")
    assert tq.kv_list("p") == {"p": {"k": {"n": 1}, "l": {"n": 2}}}


def test_the_client_saves_in_two_parts(client: Any, tmp_path: Path) -> None:
    fill()
    client.save_controller_checkpoint(str(tmp_path / "controller"))
    client.save_storage_checkpoint(str(tmp_path))
    tq.kv_clear(["k", "l"], "p")
    client.load_storage_checkpoint(str(tmp_path))
    client.load_controller_checkpoint(str(tmp_path / "controller"))
    assert tq.kv_list("p") == {"p": {"k": {"n": 1}, "l": {"n": 2}}}
    assert tq.kv_batch_get("l", "p")["x"].to_padded_tensor(padding=0).tolist() == [[3, 4]]
