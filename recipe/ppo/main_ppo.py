"""Train: ``python -m recipe.ppo.main_ppo [name=value ...]``.

The names are those of ``config/ppo.yaml`` and of verl's own configuration. The same command
continues a run that was killed.
"""

from __future__ import annotations

import copy
import os
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf, open_dict

from recipe.ppo.environment import prepare_environment

PLOT = "accuracy.png"

# Where libraries write that would else choose the home or the working folder.
_PLACES = {
    "MPLCONFIGDIR": "cache/matplotlib",
    "TENSORBOARD_DIR": "tensorboard",
    "WANDB_DIR": ".",
    "VERL_FILE_LOGGER_PATH": "tracking.jsonl",
}

# Settings of verl that exist, but with one value here.
_FIXED = {
    "reward.reward_model.enable_resource_pool": False,
    "distillation.enabled": False,
    "trainer.default_hdfs_dir": None,
    "actor_rollout_ref.actor.calculate_sum_pi_squared": False,
}

_ESTIMATORS = (
    *("gae", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo"),
    *("opo", "grpo_passk", "gpg", "rloo_vectorized", "grpo_vectorized"),
)


@hydra.main(version_base=None, config_path="config", config_name="ppo")
def main(config: DictConfig) -> None:
    """Train as ``config`` says. An error that the user can mend is one line, and status 2."""
    from tq_redis.errors import TQError

    try:
        run(config)
    except TQError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)


def run(config: DictConfig) -> None:
    """Make the data and the warm start where there is a task, train from the last checkpoint, and
    report.

    Raises:
        TQError: a setting is wrong, or the queue cannot be used as configured.
    """
    output = Path(config.output_dir).resolve()
    config.output_dir = str(output)
    OmegaConf.resolve(config)
    _check(config)
    for variable, place in _PLACES.items():
        os.environ.setdefault(variable, str(output / place))
    output.mkdir(parents=True, exist_ok=True)
    if not _is_finished(config):
        _train(config)
    if "task" in config:
        _report(output)


def _is_finished(config: DictConfig) -> bool:
    """Whether the run that would go on is at its end."""
    from recipe.ppo.checkpoints import Checkpoints

    trainer = config.trainer
    if trainer.resume_mode != "auto" or trainer.total_training_steps is None:
        return False
    latest = Checkpoints(Path(trainer.default_local_dir), None).latest
    return latest is not None and latest >= trainer.total_training_steps


def _check(config: DictConfig) -> None:
    """Refuse a configuration that would fail later.

    Raises:
        ConfigError: a setting is unknown, out of range, or one that this recipe has no code for.
        ServerUnavailableError, AuthenticationError, ServerPolicyError: Redis cannot be used.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from recipe.ppo.planes import queue_settings
    from tq_redis import ConfigError, check_server

    if config.tq_redis.step.queue:
        check_server(queue_settings(config.tq_redis))
    for name, value in _FIXED.items():
        if OmegaConf.select(config, name) != value:
            raise ConfigError(f"{name} must be {value}, got {OmegaConf.select(config, name)!r}")
    _check_step(config)
    if config.algorithm.adv_estimator not in _ESTIMATORS:
        raise ConfigError(
            f"algorithm.adv_estimator must be one of {', '.join(_ESTIMATORS)}, got "
            f"{config.algorithm.adv_estimator!r}"
        )
    without_model = copy.deepcopy(config)
    without_model.critic.model = None  # it may not be there yet
    try:
        with redirect_stdout(StringIO()):  # verl prints that all is well
            validate_config(without_model, need_reference_policy(config), need_critic(config))
    except (AssertionError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if "task" in config:
        from recipe.tasks import spell_backward

        if config.task.name != spell_backward.NAME:
            raise ConfigError(
                f"task.name must be {spell_backward.NAME}, got {config.task.name!r}. For data of "
                "your own take --config-name tq_redis_ppo_trainer"
            )
        _warm_start_settings(config)


def _check_step(config: DictConfig) -> None:
    """Refuse what the trainer cannot do.

    Raises:
        ConfigError: the sampler, or the staleness.
    """
    from recipe.ppo.planes import make_sampler
    from recipe.ppo.rollout import NAME as IN_PROCESS
    from tq_redis import ConfigError

    step, rollout = config.tq_redis.step, config.actor_rollout_ref.rollout.name
    make_sampler(step.sampler)
    if step.staleness not in (0, 1):
        raise ConfigError(f"tq_redis.step.staleness must be 0 or 1, got {step.staleness!r}")
    if step.staleness and rollout == IN_PROCESS:
        raise ConfigError(
            f"tq_redis.step.staleness=1 needs rollout servers: {rollout!r} generates in the "
            "training processes. Take +experiment=servers, or actor_rollout_ref.rollout.name=vllm."
        )


def _warm_start_settings(config: DictConfig) -> Any:
    import msgspec

    from recipe.tasks.warm_start import WarmStartSettings
    from tq_redis import ConfigError

    try:
        return msgspec.convert(
            OmegaConf.to_container(config.task.warm_start, resolve=True), WarmStartSettings
        )
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error


def _train(config: DictConfig) -> None:
    from recipe.ppo.cluster import ray_cluster
    from recipe.ppo.planes import open_plane
    from recipe.ppo.ray_trainer import RayPPOTrainer
    from recipe.ppo.reports import Reports
    from recipe.ppo.workers import start_workers

    if "task" in config:
        prepare(config)
    _use_rollout_correction(config)
    with ray_cluster(config), open_plane(config.tq_redis) as plane:
        trainer = RayPPOTrainer(config, plane, start_workers(config), Reports(config))
        trainer.fit()


def prepare(config: DictConfig) -> None:
    """Data and model of the task."""
    from recipe.tasks.spell_backward import make_splits, write_parquet
    from recipe.tasks.warm_start import warm_start

    splits = make_splits()
    write_parquet(splits.train, "train", Path(config.data.train_files))
    write_parquet(splits.tuning, "tuning", Path(config.data.val_files))
    write_parquet(splits.test, "test", Path(config.data.test_files))
    model = warm_start(_warm_start_settings(config), splits, Path(config.task.cache_dir))
    config.actor_rollout_ref.model.path = str(model)
    for other in (config.critic.model, config.reward.reward_model):
        for name in ("path", "tokenizer_path", "model_path"):
            if name in other:
                other[name] = str(model)


def _use_rollout_correction(config: DictConfig) -> None:
    """In bypass mode the loss corrects, so the actor must know how."""
    correction = config.algorithm.get("rollout_correction")
    if correction and correction.get("bypass_mode"):
        loss = config.actor_rollout_ref.actor.policy_loss
        with open_dict(loss):
            loss.rollout_correction = correction
            loss.loss_mode = "bypass_mode"


def _report(output: Path) -> None:
    """Print accuracy before and after, and draw the curves."""
    from recipe.ppo.plot import TEST_ACCURACY, draw
    from recipe.ppo.records import Records
    from recipe.ppo.reports import METRICS

    history = Records(output / METRICS).read()
    draw(history, output / PLOT)
    print(f"metrics: {output / METRICS}\nplot:    {output / PLOT}")
    tested = [record for record in history if TEST_ACCURACY in record]
    if len(tested) > 1:
        before, after = tested[0][TEST_ACCURACY], tested[-1][TEST_ACCURACY]
        print(
            f"held-out accuracy, greedy: {before:.3f} before RL, {after:.3f} after "
            f"{tested[-1]['step']} steps ({100 * (after - before):+.1f} points)"
        )


if __name__ == "__main__":
    prepare_environment()
    main()
