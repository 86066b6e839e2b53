"""Train with the same seeds on tq_redis and on transfer_queue, and compare every number.

``python -m recipe.v1.compare [--write docs/equivalence.md] [name=value ...]``
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.peer import VERSION, find_or_make
from recipe.ppo.environment import prepare_environment
from recipe.v1.difference import Run, read_run, replaced, report
from recipe.v1.main import METRICS, ROOT, TASK, TQ_REDIS, VERL, command, environment

_FRESH = ("trainer.resume_mode=disable", "trainer.save_freq=-1")


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--task", type=click.Path(path_type=Path), default=TASK)
@click.option("--output", type=click.Path(path_type=Path), default=TASK.parent / "compare")
@click.option("--write", type=click.Path(path_type=Path), help="Put the result into this page.")
@click.option("--with-itself", is_flag=True, help="Both runs on tq_redis.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def main(
    task: Path, output: Path, write: Path | None, with_itself: bool, overrides: tuple[str, ...]
) -> None:
    """Run both, one after the other, and print what differs; status 1 if anything does."""
    prepare_environment()
    from recipe.v1.prepare import prepare

    prepare(task)
    ours = _run("tq_redis", TQ_REDIS, task, output / "tq_redis", overrides)
    if with_itself:
        other = _run("tq_redis again", TQ_REDIS, task, output / "again", overrides)
    else:
        packages = [_peer_packages(output)]
        name = f"transfer_queue {VERSION}"
        other = _run(name, VERL, task, output / "transfer_queue", overrides, packages)
    text, equal = report(ours, other)
    print(text)
    if write is not None:
        write.write_text(replaced(write.read_text(encoding="utf-8"), text), encoding="utf-8")
    sys.exit(0 if equal else 1)


def _run(
    name: str,
    launcher: Sequence[str],
    task: Path,
    output: Path,
    overrides: Sequence[str],
    packages: Sequence[Path] = (),
) -> Run:
    print(f"{name}: {output}", file=sys.stderr, flush=True)
    output.mkdir(parents=True, exist_ok=True)
    with (output / "log").open("wb") as log:
        subprocess.run(
            command(launcher, task, output, [*_FRESH, *overrides]),
            cwd=ROOT,
            env=environment(output, packages),
            stdout=log,
            stderr=subprocess.STDOUT,
            check=True,
        )
    return read_run(name, output / METRICS)


def _peer_packages(output: Path) -> Path:
    """A folder with transfer_queue and nothing else to import: its wheel also brings packages
    called ``recipe`` and ``tests``."""
    python = find_or_make()
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True)
    link = output / "packages" / "transfer_queue"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(Path(found.stdout.strip()) / "transfer_queue")
    return link.parent


if __name__ == "__main__":
    main()
