"""The scripts that start trainings: every setting in them exists, and verl accepts them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

import recipe.ppo
from tq_redis import Config
from tq_redis.config import RedisConfig, load_config

FOLDER = Path(str(recipe.ppo.__file__)).parent
QWEN = ["run_qwen3-8b_gpu.sh", "run_qwen3-8b_npu.sh"]


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """In Python's place: prints the arguments that the shell gives it, and trains nothing."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    program.chmod(0o755)
    return program


def started(script: str, python: Path, *more: str) -> DictConfig:
    """The configuration that a script trains with, which has no key that it does not have."""
    done = subprocess.run(
        [FOLDER / script, *more],
        env=os.environ | {"PYTHON": str(python), "MODEL": "a model", "DATA": "/da ta"},
        capture_output=True,
        text=True,
        check=True,
    )
    module, *words = done.stdout.split("\0")[1:-1]
    assert module == "recipe.ppo.main_ppo"
    name = "ppo"
    if words[0] == "--config-name":
        _, name, *words = words
    config = composed(name, words)
    OmegaConf.resolve(config)
    return config


def composed(name: str, overrides: Sequence[str]) -> DictConfig:
    added = [override for override in overrides if override.startswith("+")]
    assert added == [], "of a key that is added nobody knows whether anybody reads it"
    with initialize_config_dir(str(FOLDER / "config"), version_base=None):
        return compose(name, overrides=list(overrides))


def test_all_scripts_are_checked() -> None:
    assert sorted(path.name for path in FOLDER.glob("*.sh")) == ["run_cpu.sh", *QWEN]


@pytest.mark.parametrize("script", ["run_cpu.sh", *QWEN])
def test_verl_accepts_what_a_script_sets(script: str, python: Path) -> None:
    config = started(script, python)

    assert OmegaConf.missing_keys(config.actor_rollout_ref) == set()
    validate_config(config, need_reference_policy(config), need_critic(config))


@pytest.mark.parametrize(
    "misspelt",
    [
        "trainer.n_gpu_per_node=8",
        "actor_rollout_ref.rollout.tensor_parallel_size=2",
        "tq_redis.data.unit=2",
        "tq_redis.step.leases=1",
        "reward.launch_reward_async=true",
    ],
)
def test_a_misspelt_setting_is_found(python: Path, misspelt: str) -> None:
    with pytest.raises(HydraException, match="Could not override"):
        started("run_qwen3-8b_npu.sh", python, misspelt)


@pytest.mark.parametrize("script", QWEN)
def test_a_setting_at_the_end_counts(script: str, python: Path) -> None:
    config = started(script, python, "actor_rollout_ref.rollout.n=7", "trainer.device=cpu")

    assert config.actor_rollout_ref.rollout.n == config.actor_rollout_ref.actor.rollout_n == 7
    assert config.trainer.device == "cpu"


def test_paths_may_have_spaces(python: Path) -> None:
    config = started(QWEN[0], python)

    assert config.data.train_files == "/da ta/train.parquet"
    assert config.actor_rollout_ref.model.path == "a model"


def test_qwen_runs_are_what_they_say(python: Path) -> None:
    gpu, npu = (started(script, python) for script in QWEN)

    assert (gpu.trainer.device, npu.trainer.device) == ("cuda", "npu")
    for config in (gpu, npu):
        assert config.algorithm.adv_estimator == "grpo"
        assert config.actor_rollout_ref.ref.strategy == "fsdp2"
        assert config.actor_rollout_ref.rollout.name == "vllm"
        assert config.actor_rollout_ref.rollout.mode == "async"
        assert config.data.train_batch_size == 256
        assert config.actor_rollout_ref.rollout.n == 5


def test_the_block_says_the_defaults_of_tq_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_REDIS_NAMESPACE", raising=False)
    search = "hydra.searchpath=[pkg://verl.trainer.config]"
    config = composed("tq_redis_ppo_trainer", [search, "trainer.experiment_name=mine"])

    block = cast(dict[str, Any], OmegaConf.to_container(config.tq_redis, resolve=True))
    assert block.pop("step") == {
        "queue": True,
        "lease_s": None,
        "sampler": {"_target_": "tq_redis.samplers.SequentialSampler"},
        "staleness": 0,
        "save_rollouts": False,
    }
    assert load_config(block) == Config(redis=RedisConfig(namespace="mine"))
    assert set(block["data"]) == set(Config().data.__struct_fields__)
