"""PPO and its kin: the driver says what is done next, and holds no column of any sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
from omegaconf import DictConfig
from tqdm import tqdm
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils import hf_processor, hf_tokenizer

from recipe.ppo.actor_worker import ActorWorker
from recipe.ppo.checkpoints import Checkpoints
from recipe.ppo.critic_worker import CriticWorker, RewardModelWorker
from recipe.ppo.planes import Plane
from recipe.ppo.prompts import Columns, Prompts
from recipe.ppo.records import Metrics
from recipe.ppo.reports import Reports, timing_metrics
from recipe.ppo.sample_worker import SampleWorker
from recipe.ppo.step import Step
from recipe.ppo.workers import Workers

_DATALOADER = "data.pt"
_SAMPLES = "samples.json"
_QUEUE = "queue"


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What the steps of a configuration consist of.

    Attributes:
        baselines: a greedy answer to each prompt is the baseline of the others (REMAX).
        balance: parts with as many tokens as others for the ranks of the actor.
        reward_beside: the reward is computed beside log-probabilities and values.
        bypass: the rollout's log-probabilities are taken for the actor's.
        correction: the difference of the two is corrected for.
        reference: log-probabilities of a reference model are needed.
        kl_in_reward: their distance is a part of the reward.
        critic_warmup: the actor is updated from this step on.
        ahead: the next step is generated while this one is trained.
    """

    baselines: bool
    balance: bool
    reward_beside: bool
    bypass: bool
    correction: bool
    reference: bool
    kl_in_reward: bool
    critic_warmup: int
    ahead: bool

    @classmethod
    def of(cls, config: DictConfig) -> Algorithm:
        """That of the whole configuration."""
        algorithm = config.algorithm
        correction = algorithm.get("rollout_correction")
        bypass = bool(correction and correction.get("bypass_mode"))
        corrects = bool(
            correction and (correction.get("rollout_is") or correction.get("rollout_rs"))
        )
        return cls(
            baselines=algorithm.adv_estimator == AdvantageEstimator.REMAX,
            balance=config.trainer.balance_batch,
            reward_beside=config.reward.launch_reward_fn_async,
            bypass=bypass,
            correction=corrects and not bypass,
            reference=need_reference_policy(config),
            kl_in_reward=algorithm.use_kl_in_reward,
            critic_warmup=config.trainer.critic_warmup,
            ahead=config.tq_redis.step.staleness > 0,
        )


@dataclass(frozen=True, slots=True)
class Rollout:
    """The samples of a step, while they are generated.

    Attributes:
        step: the samples.
        wait: until they are there; may be called again.
        place: in the data set, of the first of their prompts.
    """

    step: Step
    wait: Callable[[], None]
    place: Mapping[str, Any]


class RayPPOTrainer:
    """Runs the steps.

    Args:
        config: the whole configuration, resolved.
        plane: how columns travel between tasks.
        workers: who does the tasks.
        reports: where metrics go.
    """

    def __init__(
        self, config: DictConfig, plane: Plane, workers: Workers, reports: Reports
    ) -> None:
        self.config = config
        self.plane = plane
        self.workers = workers
        self.reports = reports
        self.algorithm = Algorithm.of(config)
        self.step = 0
        self.checkpoints = Checkpoints(
            Path(config.trainer.default_local_dir), config.trainer.max_actor_ckpt_to_keep
        )
        self._ahead: Rollout | None = None
        data, prompts = config.data, _prompts(config, workers)
        self.prompts = prompts.training()
        self.held_out = {
            "val": prompts.held_out(data.val_files, data.val_max_samples),
            "test": prompts.held_out(data.test_files, data.test_max_samples),
        }
        epochs = config.trainer.total_epochs
        self.total_steps: int = config.trainer.total_training_steps or len(self.prompts) * epochs

    def fit(self) -> None:
        """Train from the last checkpoint to the last step, evaluating as configured."""
        trainer = self.config.trainer
        self._resume()
        with tqdm(total=self.total_steps, initial=self.step, desc="steps", disable=None) as bar:
            if self.step == 0 and trainer.val_before_train:
                self.reports.write(0, {**self._validate("val"), **self._validate("test")}, bar)
            if trainer.val_only:
                return
            batches = iter(self.prompts)
            try:
                while self.step < self.total_steps:
                    self.step += 1
                    with self._profiled():
                        metrics = self._train(batches)
                    bar.update()
                    self._after(metrics, bar)
            finally:
                if self._ahead is not None:
                    self._ahead.step.close()

    def _train(self, batches: Iterator[Columns]) -> Metrics:
        start = time.perf_counter()
        do, who = self.algorithm, self.workers
        rollout, self._ahead = self._ahead, None
        if rollout is None:
            rollout = self._generate(self.step, batches)
        with rollout.step as step:
            rollout.wait()
            if do.ahead and self.step < self.total_steps:
                self._ahead = self._generate(self.step + 1, batches)
            else:
                who.rollout.sleep()
                self._save_rollouts()
            if do.balance:
                step.balance(who.actor_ranks)
            self._rate(step)
            self._update(step)
            step.run("metrics", SampleWorker.compute_metrics, who.samples)
            self._show(step)
            if self._ahead is not None:
                self._ahead.wait()  # the servers get no weights while they generate
        with step.timed("update_weights"):
            who.rollout.update_weights(self.step)
        step.seconds["step"] = time.perf_counter() - start
        return {**step.metrics, **timing_metrics(step, who.actor.world_size)}

    def _rate(self, step: Step) -> None:
        """How much better or worse than expected each answer is."""
        do, who = self.algorithm, self.workers
        reward = self._score(step)
        if not do.reward_beside:
            reward()
        if do.bypass:
            step.run("old_log_prob", SampleWorker.take_rollout_log_probs, who.samples)
        else:
            step.run("old_log_prob", ActorWorker.compute_log_prob, who.actor)
        if do.reference:
            step.run("ref", ActorWorker.compute_ref_log_prob, who.actor)
        if who.critic is not None:
            step.run("values", CriticWorker.compute_values, who.critic)
        reward()
        if do.kl_in_reward:
            step.run("kl", SampleWorker.penalize_kl, who.samples)
        if do.correction:
            step.run("rollout_corr", SampleWorker.correct_rollout, who.samples)
        step.run("adv", SampleWorker.compute_advantage, who.samples)

    def _update(self, step: Step) -> None:
        """Train the models on the step's samples."""
        if self.workers.critic is not None:
            step.run("update_critic", CriticWorker.update_critic, self.workers.critic)
        if self.step >= self.algorithm.critic_warmup:
            step.run("update_actor", ActorWorker.update_actor, self.workers.actor)

    def _generate(self, number: int, batches: Iterator[Columns]) -> Rollout:
        """Begin to answer the prompts of a step."""
        who = self.workers
        place = self.prompts.state_dict() if self.algorithm.ahead else {}
        prompts = next(batches)
        uids = [f"{number}-{row}" for row in range(len(prompts["raw_prompt"]))]
        with ExitStack() as failed:
            step = failed.enter_context(self.plane.step(f"train_{number}", training=True))
            step.put(prompts, uids, repeat=self.config.actor_rollout_ref.rollout.n)
            answered = step.start("gen", who.rollout.task, who.rollout, global_steps=number)
            failed.pop_all()

        @cache
        def wait() -> None:
            answered()
            if self.algorithm.baselines:
                self._baselines(step, prompts, uids, number)

        return Rollout(step, wait, place)

    def _baselines(self, step: Step, prompts: Columns, uids: list[str], number: int) -> None:
        """REMAX: the reward of each prompt's greedy answer."""
        who = self.workers
        with self.plane.step(f"greedy_{number}") as greedy:
            greedy.put(prompts, uids)
            greedy.run("gen", who.rollout.task, who.rollout, global_steps=number, greedy=True)
            self._score(greedy)()
            step.run("baselines", SampleWorker.compute_baselines, who.samples, greedy)

    def _score(self, step: Step) -> Callable[[], Any]:
        """Begin to compute rewards; gives what waits for them."""
        who = self.workers
        if who.reward_model is not None:
            step.run("rm_score", RewardModelWorker.compute_rm_score, who.reward_model)
        return step.start("reward", SampleWorker.compute_reward, who.rewards)

    def _validate(self, split: str) -> Metrics:
        """verl's validation metrics of a held-out set; ``val`` in their names is the set's name."""
        who, trainer = self.workers, self.config.trainer
        if not self.held_out[split]:
            return {}
        start = time.perf_counter()
        with self.plane.step(f"{split}_{self.step}") as step:
            for batch, prompts in enumerate(self.held_out[split]):
                uids = [f"{batch}-{row}" for row in range(len(prompts["raw_prompt"]))]
                step.put(prompts, uids, repeat=self.config.actor_rollout_ref.rollout.val_kwargs.n)
                step.run(
                    "gen", who.rollout.task, who.rollout, global_steps=self.step, validate=True
                )
                if who.reward_model is not None:
                    who.rollout.sleep()
                self._score(step)()
                if who.reward_model is not None:
                    who.rollout.update_weights(self.step)
            logged = trainer.log_val_generations
            found = step.run("metrics", SampleWorker.validate, who.samples, log=logged)
            if trainer.validation_data_dir:
                self._dump(step, f"{trainer.validation_data_dir}/{split}")
        if logged:
            self.reports.write_generations(self.step, found["generations"])
        metrics = {f"{split}{name.removeprefix('val')}": v for name, v in step.metrics.items()}
        return {**metrics, f"timing_s/{split}": time.perf_counter() - start}

    def _show(self, step: Step) -> None:
        """Let those see the samples of a step that asked for it."""
        if self.config.trainer.rollout_data_dir:
            self._dump(step, self.config.trainer.rollout_data_dir)
        for watcher in self.prompts.watchers:
            step.run("curriculum", watcher.see, watcher)

    def _dump(self, step: Step, folder: str) -> None:
        step.run(
            "dump",
            SampleWorker.write_generations,
            self.workers.samples,
            folder=folder,
            global_steps=self.step,
        )

    def _after(self, metrics: Metrics, bar: Any) -> None:
        """Evaluate, record and save, where this step is one that does."""
        trainer = self.config.trainer
        last = self.step == self.total_steps
        if trainer.test_freq > 0 and (last or self.step % trainer.test_freq == 0):
            metrics |= self._validate("val")
        if last:
            metrics |= self._validate("test")
        metrics["driver/rss_mb"] = psutil.Process().memory_info().rss / 2**20
        # Before the checkpoint: a run that continues from it finds this record.
        self.reports.write(self.step, metrics, bar)
        if trainer.save_freq > 0 and (last or self.step % trainer.save_freq == 0):
            self.save()

    @contextmanager
    def _profiled(self) -> Generator[None]:
        """Let the models' processes record the step, where ``global_profiler.steps`` names it."""
        profiler, groups = self.config.global_profiler, self.workers.models
        if self.step not in (profiler.steps or ()):
            yield
            return
        for group in groups:
            group.start_profile(profile_step=self.step)
        yield
        last = self.step in (max(profiler.steps), self.total_steps)
        for group in groups:
            group.stop_profile(run_command=last)

    def save(self) -> None:
        """Write the checkpoint of the last step."""
        folder = self.checkpoints.start(self.step)
        self.workers.actor.save_checkpoint(str(folder / "actor"), global_step=self.step)
        if self.workers.critic is not None:
            self.workers.critic.save_checkpoint(str(folder / "critic"), global_step=self.step)
        self.workers.samples.save(str(folder / _SAMPLES))
        place = self._ahead.place if self._ahead else self.prompts.state_dict()
        torch.save(place, folder / _DATALOADER)
        self.plane.save(folder / _QUEUE)
        self.checkpoints.finish(self.step)

    def _save_rollouts(self) -> None:
        """Add what was generated to the checkpoint whose weights generated it."""
        if self.config.tq_redis.step.save_rollouts and self.checkpoints.latest == self.step - 1:
            self.plane.save(self.checkpoints.folder(self.step - 1) / _QUEUE)

    def _resume(self) -> None:
        """Load the checkpoint to start from, if there is one, and give the rollout its weights."""
        folder = self._checkpoint()
        if folder is not None:
            self.step = Checkpoints.step_of(folder)
            self.workers.actor.load_checkpoint(str(folder / "actor"))
            if self.workers.critic is not None:
                self.workers.critic.load_checkpoint(str(folder / "critic"))
            self.workers.samples.load(str(folder / _SAMPLES))
            self.prompts.load_state_dict(torch.load(folder / _DATALOADER, weights_only=False))
            tqdm.write(f"resumed after step {self.step} from {folder}")
        if self.plane.resume(f"train_{self.step + 1}", folder and folder / _QUEUE):
            tqdm.write(f"step {self.step + 1} goes on with the samples that are there")
        self.reports.rewind(self.step if folder else -1)
        self.workers.rollout.update_weights(self.step)

    def _checkpoint(self) -> Path | None:
        trainer = self.config.trainer
        if trainer.resume_mode == "disable":
            return None
        if trainer.resume_mode == "resume_path":
            return Path(trainer.resume_from_path).resolve()
        latest = self.checkpoints.latest
        return None if latest is None else self.checkpoints.folder(latest)


def _prompts(config: DictConfig, workers: Workers) -> Prompts:
    """The dataset, with the columns that generation and reward read."""
    path = config.actor_rollout_ref.model.path
    trust = config.data.get("trust_remote_code", False)
    readers: tuple[Any, ...] = (workers.rollout.task, SampleWorker.compute_reward)
    return Prompts(
        config.data,
        hf_tokenizer(path, trust_remote_code=trust),
        hf_processor(path, trust_remote_code=trust, use_fast=True),
        {name for task in readers for name in (*task.reads, *task.may_read)},
        Path(config.output_dir) / "cache",
    )
