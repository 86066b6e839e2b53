"""The command, on our side alone: it runs, and prints lines that can be read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.control import main
from benchmarks.peer import ROOT, find_or_make


@pytest.mark.slow
def test_a_quick_run_prints_a_line_per_figure(tmp_path: Path) -> None:
    out = tmp_path / "lines.json"
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.control", "--quick", "--no-peer", "--json-out", out],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert finished.returncode == 0, finished.stderr
    assert out.read_text(encoding="utf-8") == finished.stdout
    machine, *lines = map(json.loads, finished.stdout.splitlines())
    assert machine["machine"]["cores"] >= 1
    assert machine["ours"]["server"]
    figures: dict[str, dict[str, Any]] = {line["figure"]: line for line in lines}
    assert len(figures) == len(lines)
    for line in lines:
        assert line["ours"]["p50"] > 0
        assert line["ours"]["p50"] <= line["ours"]["max"]
        assert line["ours"]["runs"] >= line["ours"]["repetitions"] >= 1
        assert line["ratio"] is None
    for name in (
        "claim 64 of 50000 rows",
        "clear of 50000 rows",
        "put -> waiting consumer has data",
    ):
        assert figures[name]["bar"]
    assert figures["Redis memory per row and field, 9 fields, produced"]["holds"] is True


@pytest.mark.slow
def test_a_side_that_cannot_start_is_a_short_message(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TQ_REDIS_URL", "nonsense://")
    with pytest.raises(SystemExit) as stopped:
        main(["--quick", "--no-peer", "--only", "memory"])
    assert "tq_redis ended during" in str(stopped.value)
    assert "ConfigError" in capfd.readouterr().err


def test_a_directory_without_the_peer_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(FileExistsError, match="no transfer_queue 0.1.11"):
        find_or_make(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
