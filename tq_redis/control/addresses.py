"""Addresses of servers: read, checked, shown without passwords, compared.

::

    redis://[user:password@]host[:port][/db]                         one server
    rediss://...                                                     the same over TLS
    unix:///path[?db=0]                                              one server, by its socket
    redis+cluster://[user:password@]host[:port][,host[:port]...]     Redis Cluster
    redis+sentinel://[user:password@]host[:port][,...]/service[/db]  Sentinel; hosts are Sentinels'

``rediss+cluster`` and ``rediss+sentinel`` mean TLS. A user, a password and a path may be
percent-encoded. Options follow a ``?``, named as redis-py names them (:data:`OPTIONS`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import parse_qsl, quote, unquote

from redis.asyncio.connection import parse_url
from redis.exceptions import RedisError

from tq_redis.errors import ConfigError, nearest

Kind = Literal["single", "cluster", "sentinel"]

OPTIONS = frozenset(
    {
        "db",
        "username",
        "password",
        "sentinel_username",
        "sentinel_password",
        "client_name",
        "socket_keepalive",
        "ssl_ca_certs",
        "ssl_ca_path",
        "ssl_cert_reqs",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_password",
        "ssl_check_hostname",
        "ssl_min_version",
        "ssl_ciphers",
    }
)

_FORMS = (
    "redis://[user:password@]host[:port][/db], rediss:// (TLS), unix:///path[?db=0], "
    "redis+cluster://host[:port][,host[:port]...] or "
    "redis+sentinel://host[:port][,host[:port]...]/service[/db]"
)
_KINDS: dict[str, Kind] = {
    "redis": "single",
    "rediss": "single",
    "unix": "single",
    "redis+cluster": "cluster",
    "rediss+cluster": "cluster",
    "redis+sentinel": "sentinel",
    "rediss+sentinel": "sentinel",
}
_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://"
    r"(?:(?P<user>[^/?#]*)@)?(?P<hosts>[^/?#@]*)(?P<path>/[^?#]*)?(?:\?(?P<query>[^#]*))?"
)
_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\[\]:,\s]+)(?::(?P<port>[0-9]{1,5}))?")
_PORT = {"single": 6379, "cluster": 6379, "sentinel": 26379}
_FOR_SENTINELS = frozenset({"sentinel_username", "sentinel_password"})
_FILES = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"})
_SECRETS = re.compile(r"(?<=[?&])((?:sentinel_|ssl_)?password=)[^&#]*")


@dataclass(frozen=True, slots=True)
class Address:
    """One address, checked.

    Attributes:
        url: as it was given, password included.
        kind: what stands there.
        hosts: host and port of the server, of cluster nodes, or of Sentinels; none for a socket.
        service: what Sentinels call the server.
        options: what redis-py's connections take: db, user, password, TLS, path of a socket.
        sentinel_options: user and password for the Sentinels themselves.
    """

    url: str
    kind: Kind
    hosts: tuple[tuple[str, int], ...]
    service: str
    tls: bool
    options: dict[str, Any]
    sentinel_options: dict[str, Any]

    @property
    def shown(self) -> str:
        """As messages show it."""
        return hide_password(self.url)

    @property
    def server(self) -> str:
        """Which server it is, and no more: without user, password and options. Equal for all
        ways of writing that differ in the order of hosts or leave out a default."""
        database = self.options.get("db", 0)
        if "path" in self.options:
            return f"unix://{quote(self.options['path'])}?db={database}"
        scheme = ("rediss" if self.tls else "redis") + (
            "" if self.kind == "single" else f"+{self.kind}"
        )
        hosts = ",".join(f"{_bracketed(host)}:{port}" for host, port in sorted(self.hosts))
        path = {"single": f"/{database}", "cluster": ""}.get(
            self.kind, f"/{quote(self.service, safe='')}/{database}"
        )
        return f"{scheme}://{hosts}{path}"

    def beside(self, server: str) -> Address:
        """Another server, reached with this one's user, password and options.

        Args:
            server: its :attr:`server`.
        """
        other = parse_address(server)
        kept = {
            name: value
            for name, value in self.options.items()
            if name not in ("host", "port", "path", "db", "connection_class")
            and (other.tls or not name.startswith("ssl_"))
        }
        url = server if "@" not in self.url else re.sub("://", f"://{self._user}@", server, count=1)
        return Address(
            url,
            other.kind,
            other.hosts,
            other.service,
            other.tls,
            other.options | kept,
            self.sentinel_options,
        )

    @property
    def _user(self) -> str:
        found = _URL.fullmatch(self.url)
        return (found and found["user"]) or ""


def parse_address(url: str) -> Address:
    """Read an address.

    Raises:
        ConfigError: it is none; the message says what is right, and shows nothing of it, since
            what cannot be parsed cannot be freed of its password.
    """
    found = _URL.fullmatch(url)
    if found is None:
        raise _bad("it is not of the form scheme://host")
    scheme = found["scheme"].lower()
    if scheme not in _KINDS:
        raise _bad(f"no such scheme. {nearest(scheme, _KINDS)}")
    kind = _KINDS[scheme]
    _check_options(found["query"] or "", kind, scheme)
    path = found["path"] or ""
    if scheme == "unix":
        if found["hosts"] or path in ("", "/"):
            raise _bad("a socket is named by an absolute path, as in unix:///run/redis.sock")
        hosts, service, rest = (), "", path
    else:
        hosts = _hosts(found["hosts"], kind)
        service, rest = _service_and_database(path, kind)
    user = f"{found['user']}@" if found["user"] else ""
    plain = "rediss" if scheme.startswith("rediss") else scheme.partition("+")[0]
    host = f"{_bracketed(hosts[0][0])}:{hosts[0][1]}" if hosts else ""
    options = _options(f"{plain}://{user}{host}{rest}?{found['query'] or ''}")
    if kind == "cluster" and options.get("db"):
        raise _bad("Redis Cluster has database 0 only")
    sentinel = {
        name: options.pop(f"sentinel_{name}")
        for name in ("username", "password")
        if f"sentinel_{name}" in options
    }
    return Address(url, kind, hosts, service, plain == "rediss", options, sentinel)


def hide_password(url: str) -> str:
    """The address without its passwords, for messages and logs."""
    scheme, mark, rest = url.partition("://")
    end = re.search(r"[/?#]|$", rest)
    authority = rest[: end.start()] if end else rest
    user, at, hosts = authority.rpartition("@")
    name, colon, _ = user.partition(":")
    shown = f"{name}:***{at}{hosts}" if colon else authority
    return _SECRETS.sub(r"\1***", f"{scheme}{mark}{shown}{rest[len(authority) :]}")


def _bad(why: str) -> ConfigError:
    return ConfigError(f"Bad Redis address: {why.removesuffix('.')}. Right is {_FORMS}.")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _hosts(text: str, kind: Kind) -> tuple[tuple[str, int], ...]:
    words = text.split(",")
    if kind == "single" and len(words) > 1:
        raise _bad(
            "several hosts need redis+cluster:// or redis+sentinel://; several servers that share "
            "the work are several addresses"
        )
    hosts: list[tuple[str, int]] = []
    for word in words:
        found = _HOST.fullmatch(word)
        if found is None:
            raise _bad("a host or its port (a number up to 65535) is missing or wrong")
        port = int(found["port"] or _PORT[kind])
        if not 0 < port < 65536:
            raise _bad("a port must be a number from 1 to 65535")
        hosts.append((found["host"].strip("[]"), port))
    return tuple(hosts)


def _service_and_database(path: str, kind: Kind) -> tuple[str, str]:
    """The Sentinel service, and what is left: ``/<db>`` or nothing."""
    words = path.strip("/").split("/") if path.strip("/") else []
    service = ""
    if kind == "sentinel":
        if not words:
            raise _bad("the name of the service that the Sentinels watch is missing")
        service = unquote(words.pop(0))
    if len(words) > 1 or (words and not re.fullmatch("[0-9]{1,9}", words[0])):
        raise _bad("the database after the last / must be a number")
    return service, f"/{words[0]}" if words else ""


def _check_options(query: str, kind: Kind, scheme: str) -> None:
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in OPTIONS:
            raise _bad(f"unknown option {name}. {nearest(name, OPTIONS)}")
        if name.startswith("ssl_") and not scheme.startswith("rediss"):
            raise _bad(f"option {name} is for TLS, which the scheme rediss (not {scheme}) means")
        if name.startswith("sentinel_") and kind != "sentinel":
            raise _bad(f"option {name} is for redis+sentinel://")
        if name in _FILES and not Path(value).is_file():
            raise _bad(f"option {name} names no file")


def _options(url: str) -> dict[str, Any]:
    try:
        parsed = cast(Callable[[str], dict[str, Any]], parse_url)(url)
        options = dict(parsed)
        kind = options.get("connection_class")
        # Wrong values of options show when a connection is made; it connects later.
        if kind is not None:
            kind(
                **{
                    name: value
                    for name, value in options.items()
                    if name in OPTIONS - _FOR_SENTINELS
                }
            )
    except (ValueError, TypeError, RedisError) as error:
        option = re.search(r"Invalid value for '(\w+)'", str(error))
        what = f"option {option[1]}" if option else "an option"
        raise _bad(f"{what} has a wrong value") from None
    return options
