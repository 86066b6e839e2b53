"""GRPO: the driver holds references to samples, the workers and the queue hold the samples."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from omegaconf import DictConfig
from tqdm import tqdm
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils import hf_tokenizer

from recipe.ppo.actor_worker import ActorWorker
from recipe.ppo.checkpoints import Checkpoints
from recipe.ppo.prompts import Columns, TrainingPrompts, read_prompts, repeat
from recipe.ppo.records import Metrics, Records
from recipe.ppo.sample_worker import SampleWorker
from recipe.ppo.step import Step
from tq_redis import Client

_DATALOADER = "data.pt"


class RayPPOTrainer:
    """Runs the steps of GRPO and nothing else: no tensor passes through this process.

    Args:
        config: the whole configuration, resolved; ``actor_rollout_ref.model.path`` is set.
        client: of the queue.
        records: where the metrics go.
    """

    def __init__(self, config: DictConfig, client: Client, records: Records) -> None:
        self.config = config
        self.client = client
        self.records = records
        self.step = 0
        self.total_steps: int = config.trainer.total_training_steps
        self.uses_reference: bool = need_reference_policy(config)
        self.checkpoints = Checkpoints(
            Path(config.trainer.default_local_dir), config.trainer.max_actor_ckpt_to_keep
        )
        tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
        cache = Path(config.task.cache_dir)
        data = config.data
        self.prompts = TrainingPrompts(data, tokenizer, cache)
        self.held_out: dict[str, Columns] = {
            "tuning": read_prompts(data.val_files, data, tokenizer, cache, data.val_max_samples),
            "test": read_prompts(data.test_files, data, tokenizer, cache, data.test_max_samples),
        }

    def start_workers(self) -> None:
        """Start the worker processes and build the model in them."""
        config = self.config
        role = "actor_rollout_ref" if self.uses_reference else "actor_rollout"
        on_device = config.trainer.device != "cpu"
        self.actor: Any = _worker_group(
            RayClassWithInitArgs(ray.remote(ActorWorker), config.actor_rollout_ref, role),
            [config.trainer.n_gpus_per_node] * config.trainer.nnodes,
            on_device,
            config.trainer.device,
        )
        self.samples: Any = _worker_group(
            RayClassWithInitArgs(
                ray.remote(SampleWorker), config, config.actor_rollout_ref.model.path
            ),
            [1],
            False,
            config.trainer.device,
        )
        self.actor.init_model()

    def fit(self) -> None:
        """Train from the last checkpoint to the last step, evaluating as configured."""
        self._resume()
        with tqdm(total=self.total_steps, initial=self.step, desc="GRPO", disable=None) as bar:
            if self.step == 0:
                self._record({**self._evaluate("tuning"), **self._evaluate("test")}, bar)
            for prompts in self.prompts:
                if self.step >= self.total_steps:
                    break
                self.step += 1
                start = time.perf_counter()
                metrics = self._train(prompts)
                metrics["timing_s/step"] = time.perf_counter() - start
                bar.update()
                self._after(metrics, bar)

    def _train(self, prompts: Columns) -> Metrics:
        uids = [f"{self.step}-{index}" for index in range(len(prompts["raw_prompt"]))]
        columns = repeat(prompts, uids, self.config.actor_rollout_ref.rollout.n)
        with self._step("train") as step:
            step.put(columns, group_ids=columns["uid"])
            step.run("generate", ActorWorker.generate_sequences, self.actor)
            step.run("reward", SampleWorker.compute_reward, self.samples)
            step.run("old_log_prob", ActorWorker.compute_log_prob, self.actor)
            if self.uses_reference:
                step.run("ref_log_prob", ActorWorker.compute_ref_log_prob, self.actor)
            if self.config.algorithm.use_kl_in_reward:
                step.run("advantage", SampleWorker.compute_advantage_with_kl, self.samples)
            else:
                step.run("advantage", SampleWorker.compute_advantage, self.samples)
            if self.config.actor_rollout_ref.actor.use_kl_loss:
                step.run("update_actor", ActorWorker.update_actor_with_kl, self.actor)
            else:
                step.run("update_actor", ActorWorker.update_actor, self.actor)
        start = time.perf_counter()
        self._update_rollout()
        step.metrics["timing_s/update_rollout"] = time.perf_counter() - start
        return step.metrics

    def _evaluate(self, split: str) -> Metrics:
        """Greedy accuracy on a held-out set, as ``<split>/acc``, unless sampling is configured."""
        prompts = self.held_out[split]
        uids = [str(index) for index in range(len(prompts["raw_prompt"]))]
        start = time.perf_counter()
        with self._step(split) as step:
            step.put(repeat(prompts, uids, 1), group_ids=uids)
            step.run("generate", ActorWorker.generate_sequences, self.actor, validate=True)
            step.run("reward", SampleWorker.compute_reward, self.samples)
        return {
            f"{split}/acc": step.metrics["acc/mean"],
            f"{split}/reward": step.metrics["reward/mean"],
            f"timing_s/{split}": time.perf_counter() - start,
        }

    def _step(self, kind: str) -> Step:
        return Step(self.client, f"{kind}_{self.step}")

    def _after(self, metrics: Metrics, bar: Any) -> None:
        """Evaluate, record and save, where this step is one that does."""
        trainer = self.config.trainer
        last = self.step == self.total_steps
        if last or (trainer.test_freq > 0 and self.step % trainer.test_freq == 0):
            metrics |= self._evaluate("tuning")
        if last:
            metrics |= self._evaluate("test")
        metrics["driver/rss_mb"] = psutil.Process().memory_info().rss / 2**20
        # Before the checkpoint: a run that continues from it finds this record.
        self._record(metrics, bar)
        if last or (trainer.save_freq > 0 and self.step % trainer.save_freq == 0):
            self._save()

    def _record(self, metrics: Metrics, bar: Any) -> None:
        self.records.write(self.step, metrics)
        bar.write(_line(self.step, self.total_steps, metrics), file=sys.stdout)
        sys.stdout.flush()  # a pipe would keep the line back

    def _update_rollout(self) -> None:
        ray.get(self.actor.update_weights(global_steps=self.step))

    def _save(self) -> None:
        folder = self.checkpoints.start(self.step)
        self.actor.save_checkpoint(str(folder / "actor"), global_step=self.step)
        torch.save(self.prompts.state_dict(), folder / _DATALOADER)
        self.checkpoints.finish(self.step)

    def _resume(self) -> None:
        """Load the last checkpoint, if there is one, and give the rollout its weights."""
        self.step = self.checkpoints.latest or 0
        if self.step:
            folder = self.checkpoints.folder(self.step)
            self.actor.load_checkpoint(str(folder / "actor"))
            self.prompts.load_state_dict(torch.load(folder / _DATALOADER, weights_only=False))
            tqdm.write(f"resumed after step {self.step} from {folder}")
        self.records.rewind(self.step if self.step else -1)
        self._update_rollout()


def _worker_group(
    worker: RayClassWithInitArgs, processes: list[int], on_device: bool, device: str
) -> RayWorkerGroup:
    pool = RayResourcePool(processes, use_gpu=on_device, max_colocate_count=1)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=worker, device_name=device)


def _line(step: int, total: int, metrics: Metrics) -> str:
    """The metrics of a step that a person follows, on one line."""
    shown = {
        "reward": "reward/mean",
        "exact": "acc/mean",
        "entropy": "actor/entropy",
        "grad": "actor/grad_norm",
        "tuning": "tuning/acc",
        "test": "test/acc",
        "s": "timing_s/step",
    }
    parts = [f"{name} {metrics[key]:.3f}" for name, key in shown.items() if key in metrics]
    return f"step {step}/{total}  " + "  ".join(parts)
