"""Everything that the control plane can do, once."""

from __future__ import annotations

from typing import get_args

import msgspec

from tests.control.build import handle, soon, write
from tests.servers.topologies import Admin
from tq_redis.control.owner import Ownership
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Claimed, NotEnough, Wanted
from tq_redis.control.scripts import Verb, load_script
from tq_redis.deadline import Deadline

VERBS: tuple[Verb, ...] = get_args(Verb)


async def use_everything(plane: ControlPlane, partition: str) -> list[int]:
    """Run every verb and every plain command on a partition; it is gone afterwards.

    Returns:
        The ids of the samples that were in it.
    """
    ownership = Ownership(plane.connection, plane.keys)
    await ownership.take(soon())
    await plane.expect(partition, 8, soon())
    await plane.limit(partition, "t", 8, "wait", soon())
    assert (await plane.admit(partition, "put", 8, 60, soon())).full is None
    put = write(8, ["x", "a:b {c}"], keys=list("abcdefgh"), groups=list("gggghhhh"))
    ids = (await plane.produce(partition, put.within("put"), soon())).ids
    await plane.limit(partition, "t", None, "wait", soon())
    await plane.set_tags(partition, ids[:2], [{"t": 1}, {"t": 2}], soon())
    assert partition in await plane.partitions(soon())

    whole = await plane.claim(partition, Wanted("grouped", ["x"], 4, group_size=4), "me", soon())
    assert isinstance(whole, Claimed)
    assert whole.ids == ids[:4]
    leased = await plane.claim(partition, Wanted("t", ["x"], 3, lease_s=60), "me", soon())
    assert isinstance(leased, Claimed)
    claim = leased.claims[0]
    assert claim is not None
    assert await plane.renew(partition, claim, 60, soon()) is not None
    assert await plane.ack(partition, claim, leased.ids[:1], soon()) == []
    await plane.release(partition, claim, leased.ids[1:], soon())
    ready, _ = await plane.ready(partition, Wanted("t", ["x"], 1), "me", soon())
    assert ready is not None
    assert ready.ids == ids[1:]
    chosen = await plane.claim_chosen(partition, Wanted("t", ["x"], 1), "me", ids[7:], soon())
    assert isinstance(chosen, Claimed)
    await plane._undo(partition, "t", "no such request")
    assert await plane.reset_consumption(partition, "t", soon()) > 0
    short = await plane.claim(partition, Wanted("t", ["x"], 9), "me", soon())
    assert isinstance(short, NotEnough)
    await plane.wait(partition, short.event, Deadline(0.02))
    large = await plane.claim(partition, Wanted("t", ["x"], 600, draw="0:0"), "me", soon())
    assert isinstance(large, NotEnough)

    await save_and_load(plane, partition)
    found = await plane.locate(partition, ids, ["x", "a:b {c}"], soon())
    assert found["x"] == [(handle(put), 0, 8)]
    rows = await plane.describe(partition, soon(), keys=["a", "h"], task="t")
    assert rows.ids == [ids[0], ids[7]]
    assert (await plane.summary(partition, soon()))["samples"] == 8
    assert await plane.fields(partition, soon()) == ["a:b {c}", "x"]
    assert await plane.named_blocks(partition, soon()) == {handle(put)}

    lost = await plane.mark_lost(partition, ids[:2], ["x"], [handle(put)], soon())
    assert lost.cells == {"x": ids[:2]}
    version = (await plane.changes(partition, None, soon())).version
    await plane.clear_samples(partition, ids[:1], soon())
    assert (await plane.changes(partition, version, soon())).samples == {"a": 0}
    await plane.forget_freed(partition, ["none"], soon())
    await plane.keep_alive(soon())
    await clear(plane, partition)
    assert partition not in await plane.partitions(soon())
    await ownership.give_up(soon())
    return ids


async def save_and_load(plane: ControlPlane, partition: str) -> None:
    """Put a partition in its own place, as a checkpoint does it."""
    await plane.freeze(partition, "save", "all", 60, soon(), first=True)
    pages = [page async for page in plane.snapshot(partition, soon())]
    await plane.freeze(partition, "save", "none", 0, soon())
    for number, (suffix, kind, packed) in enumerate(pages, 1):
        items: list[str] = msgspec.msgpack.decode(packed)
        assert await plane.stage(partition, "load", suffix, kind, items, 60, soon(), number=number)
    suffixes = list(dict.fromkeys(suffix for suffix, _, _ in pages))
    assert await plane.activate(partition, "load", suffixes, len(pages), soon()) is not None


async def clear(plane: ControlPlane, *partitions: str) -> None:
    """Clear partitions and their trash, as a client does it."""
    for partition in partitions:
        for generation in await plane.clear_partition(partition, soon()):
            await plane.trash(partition, generation, soon())
            await plane.empty_trash(partition, generation, soon())


def verbs_not_run(*servers: Admin) -> list[str]:
    """Verbs that no server knows: after ``SCRIPT FLUSH``, those that nobody has run since."""
    known: list[list[bool]] = [
        server.script_exists(*(load_script(verb).sha for verb in VERBS)) for server in servers
    ]
    return [verb for verb, *where in zip(VERBS, *known, strict=True) if not any(where)]
