"""Trainings of two steps, several in one process and one Ray; what they reported, as JSON.

``python -m tests.recipe.trainings <output folder> <redis url> <namespace>``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tq_redis
from recipe.ppo.environment import prepare_environment

LORA = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora.merge=true")
CORRECTION = (
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.rollout_correction.rollout_rs=token_k1",
    "algorithm.rollout_correction.rollout_rs_threshold='0.5_2.0'",
)

REMAX = "algorithm.adv_estimator=remax"

# Half of the processes to start.
ALONE = "trainer.n_gpus_per_node=1"

# Between them, all that a step can consist of.
TRAININGS = {
    "grpo_twice": (
        "algorithm.adv_estimator=grpo",
        "trainer.balance_batch=true",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
    ),
    "gae_twice": ("algorithm.adv_estimator=gae", "trainer.critic_warmup=2", ALONE),
    "reward_model": (
        "algorithm.adv_estimator=gae",
        "reward.reward_model.enable=true",
        "data.val_batch_size=3",
        "tq_redis.step.lease_s=60",
    ),
    "remax": (
        ALONE,
        REMAX,
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "reward.launch_reward_fn_async=true",
        "reward.num_workers=2",
    ),
    "reinforce": (
        *("algorithm.adv_estimator=reinforce_plus_plus", *CORRECTION, *LORA, ALONE),
        "actor_rollout_ref.actor.use_kl_loss=true",
        "trainer.logger=[tensorboard,file]",
    ),
    "rloo": (
        ALONE,
        "algorithm.adv_estimator=rloo",
        "tq_redis.step.sampler._target_=tq_redis.samplers.GRPOGroupNSampler",
        "+tq_redis.step.sampler.n_samples_per_prompt=2",
        "algorithm.rollout_correction.bypass_mode=true",
        "algorithm.use_kl_in_reward=true",
        "trainer.log_val_generations=2",
        "trainer.rollout_data_dir=${output_dir}/rollouts",
        "trainer.validation_data_dir=${output_dir}/validations",
        "skip.rollout.enable=true",
        "skip.rollout.steps=[1]",
        "skip.rollout.dump_dir=${output_dir}/skip",
        "global_profiler.tool=torch",
        "global_profiler.steps=[2]",
        "global_profiler.save_path=${output_dir}/profile",
        "actor_rollout_ref.actor.profiler.enable=true",
        "actor_rollout_ref.actor.profiler.all_ranks=true",
    ),
    "agent_loop": (
        "+experiment=[smoke,servers]",
        "actor_rollout_ref.rollout.val_kwargs.n=2",
        ALONE,
    ),
    "ahead": (
        "+experiment=[smoke,servers]",
        "tq_redis.step.staleness=1",
        # Moves the weights even where all answers are as wrong as their baselines.
        "actor_rollout_ref.actor.entropy_coeff=0.1",
        REMAX,
        ALONE,
    ),
}


def main(output: Path, redis_url: str, namespace: str) -> None:
    """Do all trainings, those called ``twice`` with the queue and without it."""
    from recipe.ppo.cluster import ray_cluster
    from recipe.ppo.compare import both, composed
    from recipe.ppo.main_ppo import prepare
    from recipe.ppo.planes import QueuePlane, open_plane
    from recipe.ppo.ray_trainer import RayPPOTrainer
    from recipe.ppo.reports import Reports
    from recipe.ppo.workers import start_workers

    steps = ("trainer.total_training_steps=2", "trainer.test_freq=1", "data.val_max_samples=8")
    queue_settings = (f"tq_redis.redis.url={redis_url}", f"tq_redis.redis.namespace={namespace}")
    reports: dict[str, Any] = {}
    configs: dict[str, Any] = {}
    for name, overrides in TRAININGS.items():
        experiment = () if overrides[0].startswith("+") else ("+experiment=smoke",)
        settings = [
            *experiment,
            *steps,
            "data.test_max_samples=8",
            *overrides,
            *queue_settings,
            f"task.cache_dir={output}/cache",
        ]
        configs[name] = composed(output / name, settings)
        prepare(configs[name])
    first = next(iter(configs.values()))
    with ray_cluster(first), open_plane(first.tq_redis):
        for name, config in configs.items():
            queue = QueuePlane(tq_redis.get_client(), config.tq_redis.step)
            workers = start_workers(config)
            if name.endswith("twice"):
                pair = both(name, config, workers, queue)
                reports[name] = {
                    "steps": pair.steps("queue"),
                    "gaps": pair.gaps,
                    "weight_gap": pair.weight_gap,
                    "traffic": {kind: pair.traffic(kind) for kind in ("plain", "queue")},
                }
            else:
                reporting = Reports(config)
                RayPPOTrainer(config, queue, workers, reporting).fit()
                reports[name] = {"steps": reporting.records.read()}
                if name == "ahead":
                    reports["resumed"] = {"steps": _second_step(config, queue, workers)}
            workers.end()
    (output / "reports.json").write_text(json.dumps(reports))


def _second_step(config: Any, queue: Any, workers: Any) -> list[Any]:
    """The records of a run that goes on from the checkpoint of the first step."""
    from recipe.ppo.ray_trainer import RayPPOTrainer
    from recipe.ppo.reports import Reports

    trainer = config.trainer
    trainer.resume_mode = "resume_path"
    trainer.resume_from_path = f"{trainer.default_local_dir}/global_step_1"
    config.output_dir = f"{config.output_dir}/resumed"
    reporting = Reports(config)
    RayPPOTrainer(config, queue, workers, reporting).fit()
    return reporting.records.read()


if __name__ == "__main__":
    prepare_environment()
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
