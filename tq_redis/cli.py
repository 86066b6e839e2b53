"""The command ``tq-redis``: how a queue stands, in a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tq_redis.config import load_config
from tq_redis.control.plane import ControlPlane
from tq_redis.control.shards import Shards
from tq_redis.control.standing import Standing, Waiter, standing_of
from tq_redis.deadline import Deadline
from tq_redis.errors import ConfigError, TQError

_LISTED = 20


@click.group()
@click.version_option(package_name="tq_redis")
def main() -> None:
    """Look at a tq_redis queue."""


@main.command()
@click.argument("partition", required=False)
@click.option("--url", help="Redis address [default: $TQ_REDIS_URL].")
@click.option("--namespace", help="Of the run [default: $TQ_REDIS_NAMESPACE, else 'default'].")
@click.option("--missing", is_flag=True, help="List the samples that lack a field.")
@click.option("--timeout", default=10.0, show_default=True, help="Seconds to wait for Redis.")
def status(
    partition: str | None, url: str | None, namespace: str | None, missing: bool, timeout: float
) -> None:
    """Show how far each task of PARTITION is, or of all partitions.

    Per task: samples that can be claimed now, that consumers hold with a lease, that are consumed
    or set aside; and who waits for how many, since when.
    """
    redis = {name: value for name, value in {"url": url, "namespace": namespace}.items() if value}
    try:
        asyncio.run(_show(redis, partition, missing, Deadline(timeout)))
    except TQError as error:
        raise click.ClickException(str(error)) from error


async def _show(
    redis: Mapping[str, Any], partition: str | None, missing: bool, deadline: Deadline
) -> None:
    config = load_config({"redis": redis})
    if config.redis.url is None:
        raise ConfigError("Which Redis? Give --url or set TQ_REDIS_URL.")
    servers = Shards(config.redis)
    control = ControlPlane(servers, config.redis.namespace, config.idle_ttl_s)
    console = Console()
    try:
        await servers.learn(control.keys, deadline)
        names = [partition] if partition else await control.partitions(deadline)
        if not names:
            console.print(f"Namespace {escape(config.redis.namespace)} has no partition.")
        for name in names:
            _print_standing(console, name, await standing_of(control, name, deadline))
            if missing:
                await _print_missing(console, control, name, deadline)
    finally:
        await control.close()


def _print_standing(console: Console, name: str, standing: Standing) -> None:
    promised = "" if standing.expected is None else f" of {standing.expected} expected"
    end = ", ended" if standing.ended else ""
    console.print(
        f"[bold]{escape(name)}[/]: {standing.samples} samples "
        f"({standing.made} made{promised}{end}), {standing.nbytes / 1e6:.1f} MB"
    )
    if standing.produced:
        fields = Table("field", "produced", "missing", box=None, padding=(0, 2), highlight=True)
        for field, count in sorted(standing.produced.items()):
            fields.add_row(escape(field), str(count), str(standing.samples - count))
        console.print(fields)
    if standing.tasks:
        tasks = Table(box=None, padding=(0, 2), highlight=True)
        for title in ("task", "reads", "ready", "leased", "consumed", "set aside", "waiting"):
            tasks.add_column(title, overflow="fold")
        for task, state in standing.tasks.items():
            counts = [str(n) for n in (state.claimed, state.consumed, state.set_aside)]
            waiting = _waiting(state.waiters)
            for fields_read, ready in (state.ready or {"": 0}).items():
                tasks.add_row(
                    escape(task), escape(fields_read) or "-", str(ready), *counts, escape(waiting)
                )
        console.print(tasks)
    console.print()


def _waiting(waiters: list[Waiter]) -> str:
    if not waiters:
        return "-"
    oldest = waiters[0]
    text = f"{oldest.consumer} for {oldest.count}, {oldest.waited_s:.0f} s"
    return text if len(waiters) == 1 else f"{text} (and {len(waiters) - 1} more)"


async def _print_missing(
    console: Console, control: ControlPlane, partition: str, deadline: Deadline
) -> None:
    rows = await control.describe(partition, deadline)
    lacking = [
        (sample, [name for name, flags in rows.produced.items() if not flags[place]])
        for place, sample in enumerate(rows.ids)
    ]
    lacking = [(sample, fields) for sample, fields in lacking if fields]
    table = Table("sample", "lacks", box=None, padding=(0, 2), highlight=True)
    for sample, fields in lacking[:_LISTED]:
        table.add_row(str(sample), escape(", ".join(sorted(fields))))
    console.print(table if lacking else "No sample lacks a field.")
    if len(lacking) > _LISTED:
        console.print(f"  ... and {len(lacking) - _LISTED} more")
    console.print()
