"""The command on our side and plain Ray, and how it knows that what was read is what was put."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from benchmarks.data_work import ROW_BYTES, digest, make
from benchmarks.peer import ROOT


@pytest.mark.slow
def test_a_quick_run_prints_a_line_per_figure() -> None:
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.data", "--quick", "--no-peer"),
            *("--only", "dense", "metadata"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert finished.returncode == 0, finished.stderr
    machine, *lines = map(json.loads, finished.stdout.splitlines())
    assert machine["ours"]["server"]
    figures: dict[str, dict[str, Any]] = {line["figure"]: line for line in lines}
    assert len(figures) == len(lines) == 5
    put = figures["put 75 MB, dense, 256 rows x 9 fields"]
    assert set(put["beside"]) == {"plain Ray", "torch.clone", "warm memcpy"}
    for line in lines:
        assert "p50" in line["ours"]
        for other in line.get("beside", {}).values():
            assert other["p50"] > 0
            assert other["ratio"] > 0
    assert figures["pickled BatchMeta of 1024 rows x 9 fields"]["holds"] is True


def test_what_a_batch_weighs() -> None:
    dense, mixed = make("dense", 3), make("mixed", 3)
    assert digest(dense)[0] == 3 * ROW_BYTES
    assert len(mixed.keys()) == 9
    texts = sum(len(text) for n in range(3) for text in mixed.get(f"text{n}").tolist())
    numbers = sum(mixed.get(f"jagged{n}").values().numel() for n in range(3))
    assert digest(mixed)[0] == ROW_BYTES + 8 * numbers + texts


def test_a_digest_notices_a_change_but_not_another_layout() -> None:
    column = torch.arange(12.0).reshape(3, 4)
    nested = torch.nested.as_nested_tensor(list(column), layout=torch.jagged)
    found = digest(TensorDict({"x": column}, batch_size=(3,)))
    assert digest(TensorDict({"x": nested}, batch_size=(3,))) == found
    column[2, 3] += 1
    assert digest(TensorDict({"x": column}, batch_size=(3,))) != found
