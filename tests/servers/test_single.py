"""One server: by its socket, over TLS, as a user with the least rights."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tq_redis as tq
from tests.control.build import soon, write
from tests.servers import topologies
from tests.servers.conftest import OpenPlane, settings, unexpected_keys
from tests.servers.scenario import use_everything, verbs_not_run
from tests.servers.topologies import Admin, Certificates, Server
from tq_redis.control.rights import commands, rules
from tq_redis.deadline import Deadline
from tq_redis.errors import AuthenticationError, ConfigError, ServerError

pytestmark = pytest.mark.asyncio


@pytest.fixture
def server(binary: str | None, socket_directory: Path) -> Iterator[Server]:
    options = {"unixsocket": str(socket_directory / "redis.sock"), "unixsocketperm": "700"}
    with topologies.servers(binary, 1, options) as (started,):
        yield started


@pytest.fixture
def tls_port(server: Server, certificates: Certificates) -> Iterator[int]:
    with topologies.tls_terminator(server.port, certificates) as port:
        yield port


def allow(admin: Admin, *rights: str) -> None:
    admin.execute_command("ACL", "SETUSER", "tq", "reset", "on", ">p@ss", *rights)


# Socket


async def test_a_unix_socket(
    server: Server, socket_directory: Path, namespace: str, open_plane: OpenPlane
) -> None:
    server.admin.config_set("requirepass", "p@ss")
    plane = open_plane(f"unix://:p%40ss@{socket_directory}/redis.sock?db=2")
    await plane.connection.check_server(soon(), namespace=namespace)
    await use_everything(plane, "p")
    server.admin.execute_command("AUTH", "p@ss")
    server.admin.select(2)
    assert server.admin.exists(plane.keys.next_sample)


async def test_redis_cli_reaches_a_socket(
    server: Server, socket_directory: Path, namespace: str, closed_client: None
) -> None:
    url = f"unix://{socket_directory}/redis.sock?db=3"
    await asyncio.to_thread(tq.init, settings(url, namespace))
    client = tq.get_client()
    await client.async_put({"x": torch.zeros(3)}, partition_id="p")
    command = await asyncio.to_thread(tq.progress_command, "p")
    shown = await asyncio.to_thread(subprocess.check_output, command, shell=True, text=True)
    assert shown.split()[:2] == ["samples", "3"]


# TLS


async def test_tls_and_a_user_with_the_least_rights(
    server: Server,
    tls_port: int,
    certificates: Certificates,
    namespace: str,
    open_plane: OpenPlane,
    closed_client: None,
) -> None:
    """The whole verb set as exactly the user that docs/servers.md describes; then a client."""
    allow(server.admin, *rules(namespace))
    server.admin.execute_command("ACL", "SETUSER", "default", "resetpass")
    url = f"rediss://tq:p%40ss@127.0.0.1:{tls_port}/1?ssl_ca_certs={certificates.authority}"
    plane = open_plane(url)
    await plane.connection.check_server(soon(), namespace=namespace)
    server.admin.script_flush()
    server.admin.acl_log_reset()
    await use_everything(plane, "p")
    await use_everything(plane, "{a}: b")
    assert verbs_not_run(server.admin) == []
    assert server.admin.acl_log() == [], "something was tried that the user may not"

    await asyncio.to_thread(tq.init, settings(url, namespace))
    client = tq.get_client()
    put = await client.async_put({"x": torch.arange(3.0)}, partition_id="p")
    assert torch.equal((await client.async_get_columns(put))["x"], torch.arange(3.0))
    command = await asyncio.to_thread(tq.progress_command, "p")
    assert "p@ss" not in command
    assert f"rediss://tq@127.0.0.1:{tls_port}/1 --cacert {certificates.authority}" in command
    await asyncio.to_thread(tq.close)
    server.admin.select(1)
    assert unexpected_keys(server.admin) == []
    assert server.admin.acl_log() == []


async def test_a_certificate_that_is_not_trusted_is_told_at_once(
    tls_port: int, open_plane: OpenPlane
) -> None:
    plane = open_plane(f"rediss://:secret@127.0.0.1:{tls_port}")
    with pytest.raises(ServerError, match="not trusted.*ssl_ca_certs") as caught:
        await plane.connection.check_server(Deadline(30))
    assert "secret" not in str(caught.value)


async def test_plain_text_to_a_tls_port_is_told(tls_port: int, open_plane: OpenPlane) -> None:
    plane = open_plane(f"redis://127.0.0.1:{tls_port}")
    with pytest.raises(ServerError, match="within 0.5 s"):
        await plane.connection.check_server(Deadline(0.5))


# Rights


async def test_one_right_less_is_told_before_anything_is_written(
    server: Server, namespace: str, open_plane: OpenPlane
) -> None:
    plane = open_plane(f"redis://tq:p%40ss@127.0.0.1:{server.port}")
    for word in (*commands(), "MULTI", "DISCARD"):
        allow(server.admin, *rules(namespace), f"-{word.lower()}")
        with pytest.raises(AuthenticationError, match=rf"(?i)\b{word}\b") as caught:
            await plane.connection.check_server(soon(), namespace=namespace)
        assert "p@ss" not in str(caught.value)
    allow(server.admin, *rules(namespace))
    await plane.connection.check_server(soon(), namespace=namespace)
    assert server.admin.dbsize() == 0


async def test_other_keys_are_told_before_anything_is_written(
    server: Server, namespace: str, closed_client: None
) -> None:
    allow(server.admin, *rules("other"))
    url = f"redis://tq:p%40ss@127.0.0.1:{server.port}"
    with pytest.raises(AuthenticationError, match=f"tq:{namespace}:\\*"):
        await asyncio.to_thread(tq.init, settings(url, namespace))
    assert server.admin.dbsize() == 0


async def test_a_check_of_rights_leaves_the_connection_as_it_was(
    server: Server, namespace: str, open_plane: OpenPlane
) -> None:
    plane = open_plane(f"redis://127.0.0.1:{server.port}")
    for _ in range(3):
        await plane.connection.check_server(soon(), namespace=namespace)
        await plane.produce("p", write(1, ["x"]), soon())
    assert (await plane.summary("p", soon()))["samples"] == 3


# What stands at an address


async def test_an_address_of_the_wrong_kind_is_told(server: Server, open_plane: OpenPlane) -> None:
    plane = open_plane(f"redis+cluster://127.0.0.1:{server.port}")
    with pytest.raises(ServerError, match="no cluster.*redis://"):
        await plane.connection.check_server(Deadline(30))


async def test_a_node_of_a_cluster_is_told(
    cluster: topologies.Cluster, open_plane: OpenPlane
) -> None:
    for node in cluster.primaries:
        plane = open_plane(f"redis://127.0.0.1:{node.port}")
        with pytest.raises(ConfigError, match=r"redis\+cluster://"):
            await plane.connection.check_server(Deadline(30))
