from __future__ import annotations

from pathlib import Path

import pytest

from tq_redis.control.addresses import parse_address
from tq_redis.errors import ConfigError


def test_one_server() -> None:
    address = parse_address("redis://me:p%40ss@[::1]:7000/3?socket_keepalive=yes")
    assert (address.kind, address.hosts, address.tls) == ("single", (("::1", 7000),), False)
    assert address.options["username"] == "me"
    assert address.options["password"] == "p@ss"
    assert address.options["db"] == 3
    assert address.options["socket_keepalive"] is True
    assert parse_address("REDIS://host").hosts == (("host", 6379),)


def test_a_socket() -> None:
    address = parse_address("unix://me:pw@/run/my%20redis.sock?db=2")
    assert address.options["path"] == "/run/my redis.sock"
    assert address.server == "unix:///run/my%20redis.sock?db=2"


def test_a_cluster() -> None:
    address = parse_address("redis+cluster://me:pw@a:1,b,[::1]:7")
    assert address.kind == "cluster"
    assert address.hosts == (("a", 1), ("b", 6379), ("::1", 7))


def test_sentinels() -> None:
    address = parse_address("rediss+sentinel://me:pw@a,b:2/my%20queue/4?sentinel_password=other")
    assert (address.kind, address.service, address.tls) == ("sentinel", "my queue", True)
    assert address.hosts == (("a", 26379), ("b", 2))
    assert address.options["db"] == 4
    assert address.sentinel_options == {"password": "other"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("redis://host", "redis://me:pw@host:6379/0?client_name=x"),
        ("redis+cluster://a,b:2", "redis+cluster://:pw@b:2,a:6379"),
        ("redis+sentinel://a,b/s", "redis+sentinel://b,a:26379/s/0"),
        ("unix:///s", "unix://:pw@/s?db=0"),
    ],
)
def test_the_same_server_written_in_another_way(one: str, other: str) -> None:
    server = parse_address(one).server
    assert server == parse_address(other).server
    assert parse_address(server).server == server
    assert "pw" not in server


@pytest.mark.parametrize(
    "other", ["rediss://host", "redis://host:1", "redis://host/1", "redis+cluster://host"]
)
def test_another_server(other: str) -> None:
    assert parse_address("redis://host").server != parse_address(other).server


def test_a_server_beside_it_is_reached_in_the_same_way(tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    authority.touch()
    known = parse_address(f"rediss://me:p%40ss@one/2?ssl_ca_certs={authority}")
    other = known.beside("rediss://two:7/0")
    assert other.hosts == (("two", 7),)
    wanted = {"username": "me", "password": "p@ss", "ssl_ca_certs": str(authority), "db": 0}
    assert {name: other.options[name] for name in wanted} == wanted
    assert other.server == "rediss://two:7/0"
    assert other.shown == "rediss://me:***@two:7/0"
    assert "ssl_ca_certs" not in known.beside("redis://two").options


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("host", "scheme://host"),
        ("http://secret", "no such scheme"),
        ("redis-cluster://a", r"Did you mean 'redis\+cluster'\?"),
        ("redis://me:secret@[::1", "host or its port"),
        ("redis://me:secret@host:port/0", "host or its port"),
        ("redis://:sec/ret@host", "host or its port"),
        ("redis://", "host or its port"),
        ("redis://host:99999", "from 1 to 65535"),
        ("redis://a,b", r"several hosts need redis\+cluster"),
        ("redis://host/first", "database .* must be a number"),
        ("redis+cluster://host/2", "database 0 only"),
        ("redis+sentinel://host", "name of the service"),
        ("redis+sentinel://host/service/x", "database .* must be a number"),
        ("unix://", "absolute path"),
        ("unix://host/path", "absolute path"),
        ("redis://host?ssl_ca_certs=x", "option ssl_ca_certs is for TLS"),
        ("rediss://host?ssl_ca_certs=/no/such/file", "ssl_ca_certs names no file"),
        ("redis://host?passwort=secret", "unknown option passwort. Did you mean 'password'"),
        ("redis://host?socket_timeout=1", "unknown option socket_timeout"),
        ("redis://host?db=secret", "option db has a wrong value"),
        ("rediss://host?ssl_cert_reqs=secret", "option has a wrong value"),
        ("redis://host?sentinel_password=secret", r"for redis\+sentinel://"),
    ],
)
def test_what_is_wrong_and_what_is_right_is_said(url: str, says: str) -> None:
    with pytest.raises(
        ConfigError, match=f"Bad Redis address: .*{says}.*Right is redis://"
    ) as told:
        parse_address(url)
    assert "secret" not in str(told.value)
    assert "ret@" not in str(told.value)
