"""Train with verl's V1 trainer.

``python -m recipe.v1.main [--output FOLDER] [--state resume] [name=value ...]``

The names are those of ``config/spell_backward.yaml`` and of verl's own configuration. The same
command continues from the last checkpoint in the folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from recipe.ppo.environment import DEFAULTS, prepare_environment

ROOT = Path(__file__).parents[2]
TASK = ROOT / "outputs" / "v1" / "task"
METRICS = "metrics.jsonl"

# The module that is run, and what stands before verl's own arguments.
TQ_REDIS = ("tq_redis.verl", "--")
VERL = ("verl.trainer.main_ppo",)


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--output", type=click.Path(path_type=Path), default=TASK.parent / "run")
@click.option("--task", type=click.Path(path_type=Path), default=TASK)
@click.option(
    "--state",
    type=click.Choice(["fresh", "resume"]),
    default="fresh",
    show_default=True,
    help="What becomes of the samples of a run that died: see python -m tq_redis.verl --help.",
)
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def main(output: Path, task: Path, state: str, overrides: tuple[str, ...]) -> None:
    """Make what is missing in the folder --task, and become the training process."""
    prepare_environment()
    from recipe.v1.prepare import prepare

    prepare(task)
    module, *before = TQ_REDIS
    arguments = command([module, "--state", state, *before], task, output, overrides)
    os.execve(arguments[0], arguments, environment(output))


def command(
    launcher: Sequence[str], task: Path, output: Path, overrides: Sequence[str]
) -> list[str]:
    """The command that trains.

    Args:
        launcher: ``TQ_REDIS`` or ``VERL``.
        task: what :func:`recipe.v1.prepare.prepare` made.
        output: gets the metrics and checkpoints.
        overrides: verl's arguments.
    """
    recipes = ROOT / "recipe"
    settings = [
        *("--config-dir", str(recipes / "v1" / "config"), "--config-name", "spell_backward"),
        f"hydra.searchpath=[file://{recipes / 'ppo' / 'config'}]",
        f"task_dir={task.resolve()}",
        f"output_dir={output.resolve()}",
    ]
    return [sys.executable, "-m", *launcher, *settings, *overrides]


def environment(output: Path, packages: Sequence[Path] = ()) -> dict[str, str]:
    """Variables of a training process, which Ray's workers inherit.

    Args:
        output: gets the metrics.
        packages: folders to import from, behind this repository.
    """
    output.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT), *map(str, packages), os.environ.get("PYTHONPATH", "")]
    return {
        **DEFAULTS,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "VERL_FILE_LOGGER_PATH": str(output.resolve() / METRICS),
    }


if __name__ == "__main__":
    main()
