"""The command ``tq-redis``: how a queue stands, its metrics, and its storage units."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tq_redis.config import load_config
from tq_redis.control.blocks import Kept
from tq_redis.control.plane import ControlPlane
from tq_redis.control.shards import Shards
from tq_redis.control.standing import Standing, Waiter, standing_of
from tq_redis.control.units import UnitList
from tq_redis.deadline import Deadline
from tq_redis.errors import ConfigError, TQError
from tq_redis.metrics import MetricsServer
from tq_redis.storage_unit import StorageUnit
from tq_redis.store.parsers import BlockParser
from tq_redis.store.units import Unit

_LISTED = 20


@click.group()
@click.version_option(package_name="tq_redis")
def main() -> None:
    """Look at a tq_redis queue, and run what belongs to it."""


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
    or set aside; and who waits for how many, since when. Per store: the bytes that it keeps.
    """
    redis = {name: value for name, value in {"url": url, "namespace": namespace}.items() if value}
    try:
        asyncio.run(_show(redis, partition, missing, Deadline(timeout)))
    except TQError as error:
        raise click.ClickException(str(error)) from error


@main.command("storage-unit")
@click.option("--url", help="Redis address [default: $TQ_REDIS_URL].")
@click.option("--namespace", help="Of the run [default: $TQ_REDIS_NAMESPACE, else 'default'].")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address of this machine to listen at; clients on others need one that they reach.",
)
@click.option("--port", default=0, show_default=True, help="0: one that is free.")
@click.option("--advertise", help="Name of this machine for clients, where --host is not it.")
@click.option("--capacity", default=4.0, show_default=True, help="GiB that it may keep.")
@click.option("--curve", is_flag=True, help="Encrypt what travels, with a key made now.")
@click.option(
    "--parser",
    "parsers",
    multiple=True,
    metavar="NAME=PACKAGE.MODULE:FUNCTION",
    help="Offer to run this for puts that name it as data_parser; may be given several times.",
)
def storage_unit(
    url: str | None,
    namespace: str | None,
    host: str,
    port: int,
    advertise: str | None,
    capacity: float,
    curve: bool,
    parsers: tuple[str, ...],
) -> None:
    """Keep columns that are routed to zmq in this process's memory, until it is ended.

    Start it before or after the training, as often as there is memory for: clients find every unit
    in Redis.
    """
    redis = {name: value for name, value in {"url": url, "namespace": namespace}.items() if value}
    try:
        config = load_config({"redis": redis})
        unit = StorageUnit(
            config,
            host=host,
            port=port,
            advertise=advertise,
            capacity=int(capacity * (1 << 30)),
            curve=curve,
            parsers=_loaded(parsers),
        )
        click.echo(
            f"Storage unit {unit.id} of namespace {config.redis.namespace} at "
            f"{unit.server.address.endpoint}, {capacity:g} GiB. Ctrl-C or SIGTERM ends it."
        )
        asyncio.run(_serve(unit))
    except TQError as error:
        raise click.ClickException(str(error)) from error


@main.command()
@click.option("--url", help="Redis address [default: $TQ_REDIS_URL].")
@click.option("--namespace", help="Of the run [default: $TQ_REDIS_NAMESPACE, else 'default'].")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", default=0, show_default=True, help="0: one that is free.")
def metrics(url: str | None, namespace: str | None, host: str, port: int) -> None:
    """Serve what status shows to Prometheus, until this is ended.

    Redis is read when Prometheus asks.
    """
    redis = {name: value for name, value in {"url": url, "namespace": namespace}.items() if value}
    try:
        config = load_config({"redis": redis})
        server = MetricsServer(config, host, port)
    except TQError as error:
        raise click.ClickException(str(error)) from error
    click.echo(
        f"Metrics of namespace {config.redis.namespace} at http://{server.endpoint}/metrics. "
        f"Ctrl-C or SIGTERM ends it."
    )
    try:
        asyncio.run(_stopped())
    finally:
        server.close()


def _loaded(words: Sequence[str]) -> Mapping[str, BlockParser]:
    if not words:
        return {}
    from tq_redis.data.unit_parsers import load_parsers  # with torch, which others need not have

    paths: dict[str, str] = {}
    for word in words:
        name, _, path = word.partition("=")
        if not name or not path or name in paths:
            raise ConfigError(
                f"--parser takes name=package.module:function, each name once, got {word!r}"
            )
        paths[name] = path
    return load_parsers(paths)


async def _serve(unit: StorageUnit) -> None:
    await unit.run(_stop_signal())


async def _stopped() -> None:
    await _stop_signal().wait()


def _stop_signal() -> asyncio.Event:
    """Set when somebody ends this process."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


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
        units = await UnitList(servers, control.keys).units(deadline)
        _print_stores(console, [await control.kept(name, deadline) for name in names], units)
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
    _print_limits(console, standing)
    console.print()


def _print_limits(console: Console, standing: Standing) -> None:
    table = Table(box=None, padding=(0, 2), highlight=True)
    for title in ("task", "unconsumed", "limit", "when full", "evicted"):
        table.add_column(title, overflow="fold")
    for task, state in standing.tasks.items():
        if state.limit or state.evicted:
            limit = (str(state.limit.samples), state.limit.when_full) if state.limit else ("-", "-")
            table.add_row(escape(task), str(state.unconsumed), *limit, str(state.evicted))
    if table.row_count:
        console.print(table)


def _print_stores(
    console: Console, partitions: Sequence[Mapping[str, Kept]], units: Mapping[str, Unit]
) -> None:
    """The stores of these partitions, and the units that are there, whether they keep any or not.
    How much a store in Ray may keep, Redis does not know."""
    may_keep = {f"zmq/{name}": f"{unit.capacity / 1e6:.1f}" for name, unit in units.items()}
    table = Table("store", box=None, padding=(0, 2), highlight=True)
    for title in ("blocks", "MB", "may keep MB"):
        table.add_column(title, overflow="fold")
    for store in sorted({*may_keep, *(store for kept in partitions for store in kept)}):
        mine = [kept[store] for kept in partitions if store in kept]
        nbytes = sum(kept.nbytes for kept in mine)
        blocks = sum(kept.blocks for kept in mine)
        table.add_row(escape(store), str(blocks), f"{nbytes / 1e6:.1f}", may_keep.get(store, "-"))
    if table.row_count:
        console.print(table)


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
