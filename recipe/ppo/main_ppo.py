"""Train: ``python -m recipe.ppo.main_ppo [name=value ...]``.

The names are those of ``config/ppo.yaml`` and of verl's own configuration. The same command
continues a run that was killed.
"""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from recipe.ppo.environment import prepare_environment

METRICS = "metrics.jsonl"
PLOT = "accuracy.png"

# Settings of verl that exist, but with one value here.
_FIXED = {
    "task.name": "spell_backward",
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.val_kwargs.n": 1,
    "reward.reward_model.enable": False,
    "distillation.enabled": False,
    "trainer.balance_batch": False,
    "trainer.resume_mode": "auto",
    "trainer.val_before_train": True,
    "trainer.val_only": False,
}


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
    """Make the data and the warm start, train from the last checkpoint, and report.

    Raises:
        TQError: a setting is wrong, or the queue cannot be used as configured.
    """
    output = Path(config.output_dir).resolve()
    config.output_dir = str(output)
    OmegaConf.resolve(config)
    settings = _check(config)
    # reasoning-gym imports matplotlib, which writes to the home folder unless told before.
    os.environ.setdefault("MPLCONFIGDIR", str(Path(config.task.cache_dir) / "matplotlib"))

    from recipe.ppo.checkpoints import Checkpoints
    from recipe.ppo.records import Records

    output.mkdir(parents=True, exist_ok=True)
    records = Records(output / METRICS)
    checkpoints = Checkpoints(
        Path(config.trainer.default_local_dir), config.trainer.max_actor_ckpt_to_keep
    )
    if (checkpoints.latest or 0) < config.trainer.total_training_steps:
        _train(config, settings, records)
    _report(records, output)


def _check(config: DictConfig) -> Any:
    """Settings of the warm start; refuses a configuration that would fail later.

    Raises:
        ConfigError: a setting is unknown, out of range, or one that this recipe has no code for.
        ServerUnavailableError, AuthenticationError, ServerPolicyError: Redis cannot be used.
    """
    import msgspec
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import validate_config

    from recipe.tasks.warm_start import WarmStartSettings
    from tq_redis import ConfigError, check_server

    check_server(config.tq_redis)
    for name, value in _FIXED.items():
        if OmegaConf.select(config, name) != value:
            raise ConfigError(f"{name} must be {value}, got {OmegaConf.select(config, name)!r}")
    try:
        with redirect_stdout(StringIO()):  # verl prints that all is well
            validate_config(config, need_reference_policy(config), use_critic=False)
        return msgspec.convert(
            OmegaConf.to_container(config.task.warm_start, resolve=True), WarmStartSettings
        )
    except (AssertionError, ValueError, msgspec.ValidationError) as error:
        raise ConfigError(str(error)) from error


def _train(config: DictConfig, settings: Any, records: Any) -> None:
    import ray

    import tq_redis as tq
    from recipe.ppo.cluster import ray_cluster
    from recipe.ppo.ray_trainer import RayPPOTrainer
    from recipe.tasks.spell_backward import make_splits, write_parquet
    from recipe.tasks.warm_start import warm_start

    with ray_cluster(config):
        try:
            tq.init(config.tq_redis)
            _announce(ray.get_runtime_context().gcs_address)
            splits = make_splits()
            write_parquet(splits.train, "train", Path(config.data.train_files))
            write_parquet(splits.tuning, "tuning", Path(config.data.val_files))
            write_parquet(splits.test, "test", Path(config.data.test_files))
            model = warm_start(settings, splits, Path(config.task.cache_dir))
            config.actor_rollout_ref.model.path = str(model)
            trainer = RayPPOTrainer(config, tq.get_client(), records)
            trainer.start_workers()
            trainer.fit()
        finally:
            tq.close()


def _announce(ray_address: str) -> None:
    """Say how to look into the running job."""
    import tq_redis as tq

    print(
        f"watch step 1 (the number in the key is the step's):\n  {tq.progress_command('train_1')}\n"
        f"attach from Python: RAY_ADDRESS={ray_address} RAY_AUTH_MODE=disabled",
        flush=True,
    )


def _report(records: Any, output: Path) -> None:
    """Print accuracy before and after, and draw the curves."""
    from recipe.ppo.plot import draw

    history = records.read()
    before, after = history[0]["test/acc"], history[-1]["test/acc"]
    draw(history, output / PLOT)
    print(
        f"held-out accuracy, greedy: {before:.3f} before RL, {after:.3f} after "
        f"{history[-1]['step']} steps ({100 * (after - before):+.1f} points)\n"
        f"metrics: {records.path}\nplot:    {output / PLOT}"
    )


if __name__ == "__main__":
    prepare_environment()
    main()
