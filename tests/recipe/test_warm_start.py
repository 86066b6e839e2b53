"""The warm start's cache and its stop rule, with a model that learns nothing in two steps."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.tasks.spell_backward import Splits, make_splits
from recipe.tasks.tiny_model import ModelSettings
from recipe.tasks.warm_start import WarmStartSettings, warm_start

TINY = WarmStartSettings(
    model=ModelSettings(hidden=16, intermediate=32, layers=1, heads=2), max_steps=2, batch_size=4
)


@pytest.fixture(scope="module")
def splits() -> Splits:
    full = make_splits()
    return Splits(*(getattr(full, name)[:8] for name in Splits.__slots__))


def test_the_second_call_finds_the_first_result(splits: Splits, tmp_path: Path) -> None:
    said: list[str] = []
    first = warm_start(TINY, splits, tmp_path, said.append)
    written = (first / "model.safetensors").stat().st_mtime_ns

    second = warm_start(TINY, splits, tmp_path, said.append)

    assert second == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    assert "found" in said[-1]


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"max_steps": 3}, {"model": ModelSettings(16, 32, 1, 1)}]
)
def test_other_settings_are_another_model(
    splits: Splits, tmp_path: Path, change: dict[str, object]
) -> None:
    first = warm_start(TINY, splits, tmp_path)

    assert warm_start(msgspec.structs.replace(TINY, **change), splits, tmp_path) != first


def test_a_warm_start_that_fails_leaves_nothing(tmp_path: Path, splits: Splits) -> None:
    broken = msgspec.structs.replace(TINY, prompt_length=4)

    with pytest.raises(ValueError, match="the limit is 4"):
        warm_start(broken, splits, tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_transformers_loads_what_was_written(splits: Splits, tmp_path: Path) -> None:
    folder = warm_start(TINY, splits, tmp_path)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)

    assert model.config.vocab_size == len(tokenizer) == 259
    assert tokenizer.decode(tokenizer("esurd")["input_ids"]) == "esurd"


def test_the_stop_rule_ends_it_at_the_first_check(splits: Splits, tmp_path: Path) -> None:
    """Every accuracy reaches 0, so the first check ends the training."""
    eager = msgspec.structs.replace(
        TINY, stop_accuracy=0.0, check_below=100.0, check_every=1, max_steps=50
    )

    folder = warm_start(eager, splits, tmp_path)

    assert msgspec.json.decode((folder / "warm_start.json").read_bytes())["steps"] == 1
