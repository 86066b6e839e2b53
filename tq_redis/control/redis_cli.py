"""How a person reaches a server with redis-cli."""

from __future__ import annotations

import shlex

from tq_redis.control.connection import RedisConnection
from tq_redis.deadline import Deadline


async def cli_words(shard: RedisConnection, deadline: Deadline) -> str:
    """The arguments of redis-cli that lead to a shard, but for a password. Sentinels are asked
    which server is the master now; ``-c`` follows a cluster to the key.

    Raises:
        ServerUnavailableError
    """
    address = shard.address
    database = address.options.get("db", 0)
    user = address.options.get("username", "")
    if "path" in address.options:
        words = ["-s", str(address.options["path"]), "-n", str(database)]
        return shlex.join([*words, "--user", user] if user else words)
    where = await shard.primary(deadline) if address.kind == "sentinel" else address.hosts[0]
    host = f"[{where[0]}]" if ":" in where[0] else where[0]
    scheme = "rediss" if address.tls else "redis"
    words = ["-u", f"{scheme}://{f'{user}@' if user else ''}{host}:{where[1]}/{database}"]
    if "ssl_ca_certs" in address.options:
        words += ["--cacert", str(address.options["ssl_ca_certs"])]
    if address.kind == "cluster":
        words.append("-c")
    return shlex.join(words)
