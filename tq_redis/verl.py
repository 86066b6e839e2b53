"""Runs verl's own trainer on tq_redis.

``python -m tq_redis.verl [--redis-url URL] [--namespace NAME] [--state resume] -- ARGUMENTS``

ARGUMENTS are those of ``python -m verl.trainer.main_ppo``, which runs unchanged; it finds
:mod:`tq_redis.compat.transfer_queue` where it imports ``transfer_queue``. With ``--state resume``
its settings also name the agent loops of :mod:`tq_redis.compat.verl_resume`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from tq_redis.compat import install
from tq_redis.config import NAMESPACE_VARIABLE, URL_VARIABLE
from tq_redis.errors import TQError

_PROGRAM = "python -m tq_redis.verl"
_MANAGER = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
_RESUMING = "tq_redis.compat.verl_resume.ResumingAgentLoopManager"


@click.command()
@click.option("--redis-url", help="Redis address [default: $TQ_REDIS_URL, else an own server].")
@click.option("--namespace", help="Of the run [default: $TQ_REDIS_NAMESPACE, else 'default'].")
@click.option(
    "--state",
    type=click.Choice(["fresh", "resume"]),
    default="fresh",
    show_default=True,
    help="What becomes of the samples of a run that died in this namespace: all are dropped, or "
    "finished trajectories of the interrupted step are kept and not generated again.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(
    redis_url: str | None, namespace: str | None, state: str, arguments: tuple[str, ...]
) -> None:
    """Train with verl's own trainer, its samples in tq_redis.

    ARGUMENTS behind -- are those of verl.trainer.main_ppo.
    """
    if importlib.util.find_spec("verl") is None:
        raise click.ClickException(
            "verl is not installed in this environment. tq_redis is tested with 0.9.1: "
            "pip install verl==0.9.1, or pip install 'tq_redis[recipe]'."
        )
    # verl prints its configuration, so an address, which may have a password, is not put there.
    for variable, value in ((URL_VARIABLE, redis_url), (NAMESPACE_VARIABLE, namespace)):
        if value is not None:
            os.environ[variable] = value
    _check_server()
    install()
    more = _resuming(arguments) if state == "resume" else ()
    sys.argv = [_PROGRAM, *arguments, "++transfer_queue.announce=true", *more]
    _verl_main()()


def _resuming(arguments: Sequence[str]) -> list[str]:
    """What verl is told, so that it resumes."""
    if any(argument.lstrip("+").startswith(f"{_MANAGER}=") for argument in arguments):
        raise click.UsageError(
            f"--state resume needs agent loops of its own in {_MANAGER}. Derive yours from "
            f"{_RESUMING}, leave --state out, and give verl ++transfer_queue.resume=true."
        )
    return ["++transfer_queue.resume=true", f"++{_MANAGER}={_RESUMING}"]


def _check_server() -> None:
    """Refuse a wrong address now, not in a Ray worker a minute later."""
    from tq_redis.session import check_server

    try:
        check_server()
    except TQError as error:
        raise click.ClickException(str(error)) from error


def _verl_main() -> Any:
    from verl.trainer.main_ppo import main as verl_main

    return verl_main


if __name__ == "__main__":
    main(prog_name=_PROGRAM)
