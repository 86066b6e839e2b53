"""Where the metrics of a run go."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.utils.tracking import Tracking, ValidationGenerationsLogger

from recipe.ppo.records import Metrics, Records
from recipe.ppo.step import Step

_Tracking: Any = Tracking
_GenerationsLogger: Any = ValidationGenerationsLogger

METRICS = "metrics.jsonl"

# The metrics that a person follows, by the end of their names.
_SHOWN = {
    "reward": "critic/rewards/mean",
    "exact": "reward/acc/mean",
    "entropy": "actor/entropy",
    "grad": "actor/grad_norm",
    "val": "val-core",
    "test": "test-core",
    "s": "timing_s/step",
}


class Reports:
    """``metrics.jsonl`` in the output folder, a line on the terminal, and verl's ``Tracking``.

    Args:
        config: the whole configuration; ``trainer.logger`` names the backends of Tracking.
    """

    def __init__(self, config: DictConfig) -> None:
        trainer = config.trainer
        self.records = Records(Path(config.output_dir) / METRICS)
        self._backends = list(trainer.logger)
        self._tracking = _Tracking(
            trainer.project_name,
            trainer.experiment_name,
            self._backends,
            OmegaConf.to_container(config, resolve=True),
        )
        self._generations = _GenerationsLogger(trainer.project_name, trainer.experiment_name)

    def rewind(self, step: int) -> None:
        """Forget the records after ``step``: those steps will run again."""
        self.records.rewind(step)

    def write(self, step: int, metrics: Metrics, bar: Any) -> None:
        """Report a step. ``bar`` is tqdm's, which lets a line through."""
        self.records.write(step, metrics)
        self._tracking.log(metrics, step)
        bar.write(_line(step, bar.total, metrics), file=sys.stdout)
        sys.stdout.flush()  # a pipe would keep the line back

    def write_generations(self, step: int, samples: Sequence[tuple[str, str, float]]) -> None:
        """Report some answers as text: prompt, answer, score."""
        self._generations.log(self._backends, samples, step)


def timing_metrics(step: Step, processes: int) -> Metrics:
    """``timing_s``, ``timing_per_token_ms`` and ``perf`` as verl's trainer names them.

    Args:
        step: done, with ``seconds["step"]`` and the means of prompt and response lengths.
        processes: of the actor.
    """
    answers = step.metrics["response_length/mean"] * step.size
    tokens = step.metrics["prompt_length/mean"] * step.size + answers
    of_task = {"gen": answers}
    of_task |= dict.fromkeys(("ref", "values", "adv", "update_critic", "update_actor"), tokens)
    whole = step.seconds["step"]
    return {
        **{f"timing_s/{task}": seconds for task, seconds in step.seconds.items()},
        **{
            f"timing_per_token_ms/{task}": 1000 * step.seconds[task] / count if count else 0.0
            for task, count in of_task.items()
            if task in step.seconds
        },
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": whole,
        "perf/throughput": tokens / (whole * processes),
    }


def _line(step: int, total: int, metrics: Metrics) -> str:
    parts: list[str] = []
    for shown, wanted in _SHOWN.items():
        found = [value for name, value in metrics.items() if name.startswith(wanted)]
        if found:
            parts.append(f"{shown} {found[0]:.3f}")
    return f"step {step}/{total}  " + "  ".join(parts)
