"""The configuration: verl's own, ours on top, and nothing that neither knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf

import recipe.ppo
from recipe.ppo.checkpoints import Checkpoints
from recipe.ppo.main_ppo import _is_finished, run
from tq_redis import ConfigError

Compose = Callable[..., DictConfig]

_SAMPLER = "tq_redis.step.sampler._target_"


@pytest.fixture
def composed() -> Iterator[Compose]:
    folder = Path(str(recipe.ppo.__file__)).parent / "config"
    with initialize_config_dir(str(folder), version_base=None):
        yield lambda *overrides: compose("ppo", overrides=list(overrides))


def test_the_default_is_a_grpo_run_of_verl(composed: Compose) -> None:
    config = composed()

    OmegaConf.resolve(config)
    assert config.algorithm.adv_estimator == "grpo"
    assert config.actor_rollout_ref.actor.clip_ratio == 0.2
    assert config.actor_rollout_ref.actor.optim.total_training_steps == 100
    assert config.task.warm_start.response_length == config.data.max_response_length


def readme_settings() -> list[str]:
    """What stands in the README behind ``python -m recipe.ppo.main_ppo ...``."""
    readme = (Path(str(recipe.ppo.__file__)).parents[1] / "README.md").read_text()
    table = readme.partition("### What a step can do")[2].partition("### A step")[0]
    cells = [line.split("|")[2].strip() for line in table.splitlines() if line.startswith("| ")]
    return [cell.strip("`") for cell in cells if "=" in cell]


@pytest.mark.parametrize("settings", readme_settings())
def test_the_settings_of_the_readme_exist(composed: Compose, settings: str) -> None:
    config = composed(*settings.split())

    OmegaConf.resolve(config)
    for setting in settings.split():
        name, _, value = setting.partition("=")
        if not name.startswith("+") and value.isidentifier():
            assert str(OmegaConf.select(config, name)).lower() == value.lower()


def test_a_finished_run_is_not_trained_again_unless_it_is_to_begin_anew(
    composed: Compose, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=None)
    checkpoints.start(100)
    checkpoints.finish(100)

    assert _is_finished(composed(f"output_dir={tmp_path}"))
    for override in (
        "trainer.resume_mode=disable",
        "trainer.total_training_steps=101",
        "trainer.total_training_steps=null",
    ):
        assert not _is_finished(composed(f"output_dir={tmp_path}", override))


def test_one_seed_sets_all(composed: Compose) -> None:
    config = composed("seed=2")

    OmegaConf.resolve(config)
    assert config.data.seed == config.actor_rollout_ref.rollout.seed == 2
    assert config.task.warm_start.seed == 2
    assert config.output_dir == "outputs/spell_backward_seed2"


def test_every_file_lies_in_the_output_folder(composed: Compose, tmp_path: Path) -> None:
    config = composed(f"output_dir={tmp_path}")

    OmegaConf.resolve(config)
    for path in (
        config.data.train_files,
        config.data.val_files,
        config.data.test_files,
        config.task.cache_dir,
        config.trainer.default_local_dir,
    ):
        assert Path(path).is_relative_to(tmp_path)


@pytest.mark.parametrize(
    "override", ["tq_redis.redis.urll=redis://x", "task.warm_start.sead=1", "trainer.total_steps=3"]
)
def test_an_unknown_key_is_refused(composed: Compose, override: str) -> None:
    with pytest.raises(ConfigCompositionException, match="Could not override"):
        composed(override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+tq_redis.redis.urll=redis://x", "url"),
        ("+task.warm_start.sead=1", "sead"),
        ("algorithm.adv_estimator=gdpo", "adv_estimator must be one of gae, grpo"),
        ("task.name=chain_sum", "task.name must be spell_backward"),
        ("distillation.enabled=true", "distillation.enabled must be False"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=128", "train_batch_size"),
        ("tq_redis.step.staleness=1", "needs rollout servers: 'transformers'"),
        ("tq_redis.step.staleness=2", "staleness must be 0 or 1, got 2"),
        (f"{_SAMPLER}=tq_redis.samplers.RankAwareSampler", "chooses for one rank"),
        (f"{_SAMPLER}=tq_redis.samplers.NoSampler", "sampler cannot be made"),
    ],
)
def test_a_bad_setting_is_refused_before_anything_is_written(
    composed: Compose, tmp_path: Path, override: str, message: str
) -> None:
    config = composed(f"output_dir={tmp_path / 'out'}", override)

    with pytest.raises(ConfigError, match=message):
        run(config)

    assert not (tmp_path / "out").exists()
