"""A server that keeps an append-only file, and that can be killed and started again."""

from __future__ import annotations

import signal
import subprocess
from typing import Any

import psutil
import redis

from tests.conftest import WaitUntil
from tests.control.state import Admin
from tq_redis.redis_server import EmbeddedServer

_KEPT = ("dir", "port", "bind", "logfile", "appendonly", "appendfsync", "save", "maxmemory-policy")


class Restartable:
    """Takes over a server that runs; :meth:`stop` ends what it started itself.

    Attributes:
        url: its address, the same after a restart.
        admin: a plain client.
    """

    def __init__(self, server: EmbeddedServer, wait_until: WaitUntil) -> None:
        self._wait_until = wait_until
        self.url = server.url
        self.admin: Admin = redis.Redis.from_url(server.url, decode_responses=True)
        info: Any = self.admin.info("server")
        self._process = psutil.Process(info["process_id"])
        values: Any = self.admin.config_get()
        options = (word for name in _KEPT for word in (f"--{name}", values[name]))
        self._command = [info["executable"], *options]
        self._again: subprocess.Popen[bytes] | None = None

    def kill(self) -> None:
        """``kill -9``; returns when it is dead."""
        self._process.send_signal(signal.SIGKILL)
        if self._again is None:  # what started it waits for other things than its end
            self._wait_until(lambda: self._process.status() == psutil.STATUS_ZOMBIE)
        else:
            self._again.wait()

    def start(self) -> None:
        """Returns at once; it has its file to read before it answers."""
        self._again = subprocess.Popen(self._command)
        self._process = psutil.Process(self._again.pid)

    def stop(self) -> None:
        self.admin.close()
        if self._again is not None:
            self._again.kill()
            self._again.wait()
