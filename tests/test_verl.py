"""The command that runs verl's trainer, up to the point where verl takes over."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tq_redis import verl
from tq_redis.compat.drop_in import ray_runtime_env

# It prints how redis-cli shows the samples.
ANNOUNCE = "++transfer_queue.announce=true"
ARGUMENTS = ["--config-name", "mine", "+a.b=[1, 2]", "trainer.device=cpu"]
VARIABLES = ("TQ_REDIS_URL", "TQ_REDIS_NAMESPACE")

Run = Callable[..., Result]


@pytest.fixture
def seen() -> list[dict[str, Any]]:
    """What verl's main function saw, each time that it ran."""
    return []


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, seen: list[dict[str, Any]]) -> Run:
    """``run(argument, ...)``: the command in this process, where verl only looks."""
    trainer: Any = ModuleType("verl.trainer.main_ppo")

    def look() -> None:
        import transfer_queue  # pyright: ignore[reportMissingImports]

        seen.append(
            {
                "arguments": sys.argv[1:],
                "queue": transfer_queue.init.__module__,
                **{name: os.environ.get(name) for name in VARIABLES},
            }
        )

    trainer.main = look
    monkeypatch.setitem(sys.modules, "verl.trainer.main_ppo", trainer)
    # Restored afterwards: the command changes them for the rest of its process.
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in (*VARIABLES, "RAY_RUNTIME_ENV_HOOK", "PYTHONPATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return lambda *arguments: CliRunner().invoke(verl.main, arguments)


def test_verl_gets_its_arguments_and_our_queue(run: Run, seen: list[Any]) -> None:
    result = run("--", *ARGUMENTS)

    assert result.exit_code == 0, result.output
    assert seen == [
        {
            "arguments": [*ARGUMENTS, ANNOUNCE],
            "queue": "tq_redis.compat.transfer_queue.session",
            "TQ_REDIS_URL": None,
            "TQ_REDIS_NAMESPACE": None,
        }
    ]


def test_the_address_reaches_the_workers_by_the_environment_and_not_by_verls_settings(
    run: Run, seen: list[Any], redis_url: str, namespace: str
) -> None:
    result = run("--redis-url", redis_url, "--namespace", namespace, "--", *ARGUMENTS)

    assert result.exit_code == 0, result.output
    assert seen[0]["arguments"] == [*ARGUMENTS, ANNOUNCE]
    assert seen[0]["TQ_REDIS_URL"] == redis_url
    assert seen[0]["TQ_REDIS_NAMESPACE"] == namespace
    # A Ray cluster that runs already has another environment than this process.
    assert ray_runtime_env({"env_vars": {"A": "b"}})["env_vars"] == {
        "A": "b",
        "TQ_REDIS_URL": redis_url,
        "TQ_REDIS_NAMESPACE": namespace,
    }


def test_a_run_that_resumes_says_so_in_verls_settings(run: Run, seen: list[Any]) -> None:
    run("--state", "resume", "--", *ARGUMENTS)

    manager = "tq_redis.compat.verl_resume.ResumingAgentLoopManager"
    assert seen[0]["arguments"] == [
        *ARGUMENTS,
        ANNOUNCE,
        "++transfer_queue.resume=true",
        f"++actor_rollout_ref.rollout.agent.agent_loop_manager_class={manager}",
    ]


def test_a_run_that_resumes_does_not_replace_agent_loops_of_the_users_own(
    run: Run, seen: list[Any]
) -> None:
    own = "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=mine.Loops"

    result = run("--state", "resume", "--", *ARGUMENTS, own)

    assert result.exit_code == 2
    assert "ResumingAgentLoopManager" in result.output
    assert seen == []
    assert run("--", *ARGUMENTS, own).exit_code == 0


def test_a_wrong_address_is_said_before_verl_starts(run: Run, seen: list[Any]) -> None:
    result = run("--redis-url", "redis://127.0.0.1:1/0", "--", *ARGUMENTS)

    assert result.exit_code == 1
    assert "redis://127.0.0.1:1/0" in result.output
    assert seen == []


def test_without_verl_it_says_what_to_install(
    run: Run, seen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    result = run("--", *ARGUMENTS)

    assert result.exit_code == 1
    assert "verl is not installed" in result.output
    assert "pip install verl==0.9.1" in result.output
    assert seen == []
