"""What only our side can tell: the cost of the control state inside Redis."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any, get_args

import redis

from benchmarks.control_work import ROWS_PER_PUT, rows_of
from benchmarks.queues import Queue

_WATCHED_US = 500


def server(queue: Queue) -> Any:
    """A plain connection to the server of our queue."""
    return redis.Redis.from_url(queue.client.config.redis.url)


def describe_server(queue: Queue) -> dict[str, Any]:
    """What the server calls itself."""
    with server(queue) as admin:
        info = admin.info("server")
    version = info.get("valkey_version", info["redis_version"])
    return {"server": f"{info.get('server_name', 'redis')} {version}"}


def bytes_per_cell(queue: Queue, rows: int, fields: int) -> dict[str, list[float]]:
    """Growth of Redis's ``used_memory`` by a partition of ``rows`` rows, per row and field.

    The ready index of one task and the consumption of all rows are part of it.
    """
    partition = "memory"
    names = [f"f{number}" for number in range(fields)]
    with server(queue) as admin:
        before = _used(admin)
        for _ in range(0, rows, ROWS_PER_PUT):
            queue.put(rows_of(ROWS_PER_PUT, fields), partition)
        produced = _used(admin) - before
        queue.claim(partition, names, 1, "consume")
        while queue.claim(partition, names, ROWS_PER_PUT, "consume").size:
            pass
        consumed = _used(admin) - before
    queue.clear_partition(partition)
    cells = fields * ROWS_PER_PUT * -(-rows // ROWS_PER_PUT)
    return {"produced": [produced / cells], "consumed": [consumed / cells]}


def watch_scripts(queue: Queue) -> None:
    """Begin to record every command that takes half a millisecond or more."""
    with server(queue) as admin:
        admin.config_set("slowlog-max-len", 100_000)
        admin.config_set("slowlog-log-slower-than", _WATCHED_US)
        admin.slowlog_reset()


def slow_scripts(queue: Queue) -> dict[str, list[float]]:
    """Milliseconds of the scripts that ran since :func:`watch_scripts`, by verb, the longest first.

    Those under half a millisecond are not in it. By the clock: on a busy machine Redis waits for a
    CPU in the middle of a script. ``EVAL`` is the first run of a verb, which sends its source.
    """
    from tq_redis.control.scripts import Verb, load_script

    names = {load_script(verb).sha: verb for verb in get_args(Verb)}
    found: dict[str, list[float]] = defaultdict(list)
    with server(queue) as admin:
        for entry in admin.slowlog_get(100_000):
            words = entry["command"].decode(errors="replace").split(" ", 2)
            # Commands inside scripts are recorded too, by some servers.
            if words[0] in ("EVAL", "EVALSHA"):
                found[names.get(words[1], words[0])].append(entry["duration"] / 1000)
        admin.config_set("slowlog-log-slower-than", 10_000)
    return {name: sorted(times, reverse=True) for name, times in found.items()}


def _used(admin: Any) -> int:
    """Bytes in use, once what was cleared before is freed: Redis does that in the background."""
    while admin.info("memory")["lazyfree_pending_objects"]:
        time.sleep(0.01)
    return admin.info("memory")["used_memory"]
