"""The processes of a run: worker groups of verl with our tasks in them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls
from verl.trainer.ppo.utils import need_critic, need_reference_policy, need_reward_model
from verl.utils.import_utils import import_external_libs

from recipe.ppo.actor_worker import ActorWorker
from recipe.ppo.agent_loop import AgentLoops
from recipe.ppo.critic_worker import CriticWorker, RewardModelWorker
from recipe.ppo.rollout import NAME as IN_PROCESS
from recipe.ppo.sample_worker import SampleWorker


class InProcessRollout:
    """Generation in the training processes."""

    task = ActorWorker.generate_sequences

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.generate_sequences = actor.generate_sequences

    def update_weights(self, step: int) -> None:
        """Copy the actor's weights, those of training step ``step``."""
        ray.get(self._actor.update_weights(global_steps=step))

    def sleep(self) -> None:
        """Nothing to do: the weights stay in memory."""

    def end(self) -> None:
        """Nothing to do: it ends with the actor."""


@dataclass(frozen=True, slots=True)
class Workers:
    """Who does the tasks.

    Attributes:
        actor: the trained model, and the reference model.
        rollout: generates, with the weights that it was given last.
        critic: None where the advantage needs none.
        reward_model: None where rewards come from a function.
        samples: one process for what needs whole groups.
        rewards: processes of the reward function.
        pools: what the processes hold of the cluster.
    """

    actor: Any
    rollout: InProcessRollout | AgentLoops
    critic: Any | None
    reward_model: Any | None
    samples: Any
    rewards: Any
    pools: Sequence[RayResourcePool]

    def end(self) -> None:
        """End the processes. The cluster is then as it was."""
        for group in (self.actor, self.samples, self.rewards):
            for process in group.workers:
                ray.kill(process)
        self.rollout.end()
        for pool in self.pools:
            for placement in pool.pgs or ():
                ray.util.remove_placement_group(placement)

    @property
    def actor_ranks(self) -> int:
        """Data-parallel ranks of the actor."""
        return max(self.actor._query_dispatch_info("actor")) + 1

    @property
    def models(self) -> list[Any]:
        """The worker groups that are trained."""
        return [group for group in (self.actor, self.critic) if group is not None]


def start_workers(config: DictConfig) -> Workers:
    """Start the processes and load the models.

    The models share the processes: they take turns.
    """
    trainer = config.trainer
    import_external_libs(config.actor_rollout_ref.model.external_lib)
    pool = RayResourcePool(
        [trainer.n_gpus_per_node] * trainer.nnodes,
        use_gpu=trainer.device != "cpu",
        max_colocate_count=1,
    )
    models = _model_groups(config, pool)
    for name in ("critic", "reward_model", "actor"):
        if name in models:
            models[name].init_model()
    actor = models["actor"]
    in_process = config.actor_rollout_ref.rollout.name == IN_PROCESS
    scorers = config.reward.num_workers
    pools = [
        pool,
        *[RayResourcePool([n], use_gpu=False, max_colocate_count=1) for n in (1, scorers)],
    ]
    samples = _sample_group(config, pools[1])
    return Workers(
        actor=actor,
        rollout=InProcessRollout(actor) if in_process else AgentLoops(config, actor, pool),
        critic=models.get("critic"),
        reward_model=models.get("reward_model"),
        samples=samples,
        rewards=samples if scorers == 1 else _sample_group(config, pools[2]),
        pools=pools,
    )


def _model_groups(config: DictConfig, pool: RayResourcePool) -> dict[str, Any]:
    role = "actor_rollout_ref" if need_reference_policy(config) else "actor_rollout"
    if uses_lora(config):
        role = "actor_rollout"  # the reference model is the actor without its adapter
    classes = {"actor": _with(ActorWorker, config, role)}
    if need_critic(config):
        classes["critic"] = _with(CriticWorker, config.critic, config.critic.data_loader_seed)
    if need_reward_model(config):
        classes["reward_model"] = _with(RewardModelWorker, _reward_model(config), 0)
    with redirect_stdout(StringIO()):  # verl prints which class it bases the group on
        colocated = create_colocated_worker_cls(classes)
    group = RayWorkerGroup(
        resource_pool=pool, ray_cls_with_init=colocated, device_name=config.trainer.device
    )
    return group.spawn(prefix_set=classes.keys())


def _sample_group(config: DictConfig, pool: RayResourcePool) -> Any:
    return RayWorkerGroup(
        resource_pool=pool,
        ray_cls_with_init=_with(SampleWorker, config, config.actor_rollout_ref.model.path),
        device_name=config.trainer.device,
    )


def uses_lora(config: DictConfig) -> bool:
    """Whether an adapter is trained, and not the whole model."""
    model = config.actor_rollout_ref.model
    return model.lora_rank > 0 or model.lora_adapter_path is not None


def _reward_model(config: DictConfig) -> DictConfig:
    """The critic's settings, for a model that is not trained."""
    settings = OmegaConf.masked_copy(config, ["critic"]).critic
    path = config.reward.reward_model.model_path
    settings.model.path = settings.model.tokenizer_path = path
    settings.fsdp.forward_only = True
    return settings


def _with(worker: type, *arguments: Any) -> RayClassWithInitArgs:
    return RayClassWithInitArgs(ray.remote(worker), *arguments)
