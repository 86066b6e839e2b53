from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from tests.control.build import claimed, soon, write
from tests.control.state import Admin, Partition
from tq_redis.config import RedisConfig
from tq_redis.control.keys import GLOSSARY, Key, Keys, decode, encode, index_name
from tq_redis.control.owner import Ownership
from tq_redis.control.plane import ControlPlane
from tq_redis.control.records import Claimed, Wanted
from tq_redis.control.replies import ClaimReply
from tq_redis.control.shards import Shards
from tq_redis.control.units import UnitList
from tq_redis.errors import InputError
from tq_redis.metadata import Claim
from tq_redis.store.server import Address

ROOT = Path(__file__).resolve().parent.parent.parent

NASTY = [
    "train_17", "a b", "a:b", "{", "}", "{}", "}{", "a}b{c", "{a}:field:x", "a\nb\x00", "*?[a-z]\\",
    "%", "%7B", "汉字", "🙂é", "p|q", ":field:x", "\u200b",
]  # fmt: skip


@given(st.text())
def test_decode_is_the_inverse_of_encode(name: str) -> None:
    assert decode(encode(name)) == name


@given(st.text())
def test_no_name_changes_the_meaning_of_a_key(name: str) -> None:
    assert not set(encode(name)) & set("{}: |\r\n\x00")


@pytest.mark.parametrize("name", ["train_17", "old_log_prob", "a/b", "user@host", "x=1,y=2", "~-."])
def test_ordinary_names_stay_readable(name: str) -> None:
    assert encode(name) == name


@given(st.text(min_size=1), st.text(min_size=1))
def test_partitions_have_keys_of_their_own(a: str, b: str) -> None:
    keys = Keys("ns")
    assert (keys.summary(a) == keys.summary(b)) == (a == b)
    assert not keys.summary(a).startswith(f"{keys.summary(b)}:")


@given(st.text(min_size=1))
def test_the_keys_of_a_partition_are_in_one_slot(name: str) -> None:
    keys = Keys("ns")
    made = [
        keys.summary(name), keys.events(name), keys.schema(name), keys.blocks(name),
        keys.freed(name), keys.trashes(name), keys.trash(name, "7"), keys.trash_freed(name, "7"),
    ]  # fmt: skip
    assert {key_slot(key.encode()) for key in made} == {key_slot(encode(name).encode())}


@given(st.lists(st.text(min_size=1), unique=True), st.text(min_size=1))
def test_an_index_is_named_by_task_and_fields(fields: list[str], task: str) -> None:
    assert index_name(task, 8, fields) == index_name(task, 8, fields[::-1])
    assert index_name(task, 8, fields) != index_name(task, 0, fields)
    assert index_name(task, 8, [*fields, "more" * 99]) != index_name(task, 8, fields)


@pytest.mark.parametrize("make", [encode, Keys("ns").summary])
def test_names_that_are_not_unicode_are_refused(make: object) -> None:
    with pytest.raises(InputError, match="not valid Unicode"):
        make("a\ud800")  # type: ignore[operator]


def test_an_empty_partition_name_is_refused() -> None:
    with pytest.raises(InputError, match="empty"):
        Keys("ns").summary("")


@pytest.mark.asyncio
@pytest.mark.parametrize("name", NASTY)
async def test_any_name_works_for_everything(plane: ControlPlane, admin: Admin, name: str) -> None:
    """Partition, field, task, user key, group, tag, consumer and draw of the same odd name."""
    await plane.produce("other", write(1, ["x"]), soon())
    put = write(2, [name], keys=[name, "b"], groups=[name, name], tags=[{name: name}, {}])
    ids = (await plane.produce(name, put, soon())).ids
    wanted = Wanted(name, [name], 2, group_size=2, lease_s=60, draw=name)
    found = await plane.claim(name, wanted, name, soon())
    assert isinstance(found, Claimed)
    assert found.ids == ids
    assert await plane.claim(name, wanted, name, soon()) == found
    rows = await plane.describe(name, soon(), task=name, keys=[name])
    assert (rows.ids, rows.keys, rows.tags) == ([ids[0]], [name], [{name: name}])
    assert (rows.produced, rows.states) == ({name: [True]}, ["leased"])
    assert list(await plane.locate(name, ids, [name], soon())) == [name]
    assert isinstance(claim := found.claims[0], Claim)
    assert await plane.ack(name, claim, ids, soon()) == []
    summary = await plane.summary(name, soon())
    assert (summary[f"produced:{name}"], summary[f"consumed:{name}"]) == (2, 2)
    assert await plane.partitions(soon()) == sorted({name, "other"})
    assert await plane.fields(name, soon()) == [name]
    Partition(admin, plane.keys.summary(name)).check()  # the slots, too
    await plane.clear_samples(name, ids[:1], soon())
    await plane.clear_partition(name, soon())
    assert await plane.partitions(soon()) == ["other"]


# The glossary


def kinds_of(key: str, namespace: str) -> list[Key]:
    """What a key is, as the glossary has it."""
    holes = {"<ns>": re.escape(namespace), "{P}": r"\{[^{}:]+\}", "<i>": r"[^:]+:\d+:[^:]*"}
    holes["<key>"] = ".*"

    def expression(pattern: str) -> str:
        parts = re.split(r"(<\w+>|\{P\})", pattern)
        return "".join(
            holes.get(part, "[^:]+") if place % 2 else re.escape(part)
            for place, part in enumerate(parts)
        )

    return [kind for kind in GLOSSARY if re.fullmatch(expression(kind.pattern), key)]


async def begin_a_draw(plane: ControlPlane) -> None:
    """The first piece of a draw that is too large for one script."""
    arguments = plane._claim_arguments(Wanted("t", ["x"], 2, lease_s=60, draw="1:0"), "me")
    making = {"by": "me", "first": True, "last": False, "hold": 60_000}
    piece = {"count": 1, "need": 2, "making": making}
    await plane._run_again("p", "claim", "t", arguments | piece, ClaimReply, soon())


async def keep_busy(plane: ControlPlane) -> None:
    """Leave every kind of key that a partition can have."""
    for _ in range(2):
        await plane.clear_partition("p", soon())
        groups = list("gghhiijjkk")
        put = write(10, ["x"], keys=list("abcdefghij"), groups=groups, tags=[{"n": 1}] * 10)
        ids = (await plane.produce("p", put, soon())).ids
        await claimed(plane, 2, group_size=2)
        await claimed(plane, 2, group_size=2, lease_s=60)
        await claimed(plane, 2, group_size=2, lease_s=60, draw="0:0")
        await plane.produce("p", write(10, ["x"], ids=ids), soon())
    await plane.limit("p", "t", 8, "evict", soon())
    await plane.admit("p", "put", 1, 60, soon())
    await begin_a_draw(plane)
    await plane.claim("p", Wanted("t", ["x"], 99, waiter=("w", 60)), "me", soon())
    await plane.freeze("p", "save", "all", 60, soon(), first=True)
    await plane.freeze("p", "save", "none", 60, soon())
    await plane.stage(
        "p", "load", "samples", "zset", ["1", "1"], 60, soon(), number=1, handles=["h"]
    )


@pytest.mark.asyncio
async def test_every_key_is_in_the_glossary_and_of_its_type(
    plane: ControlPlane, admin: Admin, redis_url: str
) -> None:
    namespace = plane.keys.namespace
    owner = Ownership(plane.connection, plane.keys)
    await owner.take(soon())
    servers = Shards(RedisConfig(url=redis_url))
    await servers.publish(plane.keys, 60, soon())
    await plane.connection.command("SET", plane.keys.settings, "{}", "EX", 60, deadline=soon())
    units = UnitList(plane.connection, plane.keys)
    await units.enter("unit", Address("tcp://127.0.0.1:1", b"secret"), 1, soon())
    await keep_busy(plane)
    seen: set[Key] = set()
    for key in admin.scan_iter(f"tq:{namespace}:*", count=1000):
        kinds = kinds_of(key, namespace)
        types = [kind.type for kind in kinds]
        assert types in ([admin.type(key)], ["any"]), f"{key} is one of {kinds}"
        seen.update(kinds)
    await plane.unstage("p", "load", ["samples"], soon())
    await units.strike("unit", soon())
    await plane.connection.command("DEL", plane.keys.settings, deadline=soon())
    await servers.withdraw(plane.keys, soon())
    await servers.close()
    await owner.give_up(soon())
    assert [kind.pattern for kind in GLOSSARY if kind not in seen] == []


def test_no_two_entries_are_the_same() -> None:
    patterns = [kind.pattern for kind in GLOSSARY]
    assert len(set(patterns)) == len(patterns)


def test_keys_that_are_none_of_ours_are_in_no_entry() -> None:
    for key in ("tq:ns", "tq:ns:other", "tq:ns:{p}:other", "tq:ns:{p}:field:x:y", "tq:no:{p}"):
        assert kinds_of(key, "ns") == []


# The page


def test_the_page_is_up_to_date() -> None:
    command = [sys.executable, "tools/gen_data_model.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stale_page_is_noticed_and_renewed(tmp_path: Path) -> None:
    for name in ("tools/gen_data_model.py", "tq_redis/control/keys.py", "docs/data-model.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    command = [sys.executable, str(tmp_path / "tools/gen_data_model.py")]

    def check() -> int:
        return subprocess.run(
            [*command, "--check"], stdout=subprocess.DEVNULL, check=False
        ).returncode

    source = tmp_path / "tq_redis/control/keys.py"
    source.write_text(source.read_text().replace("names of partitions", "names of a|l partitions"))
    assert check() == 1
    subprocess.run(command, check=True)
    assert check() == 0
    page = (tmp_path / "docs/data-model.md").read_text()
    assert page == (ROOT / "docs/data-model.md").read_text().replace(
        "names of partitions", r"names of a\|l partitions"
    )


def test_the_keys_of_the_session_on_the_page_exist() -> None:
    page = (ROOT / "docs/data-model.md").read_text()
    shown = re.findall(r"^    > (\w+) '(tq:demo:[^']+)'", page, re.MULTILINE)
    readers = {"H": "hash", "Z": "zset", "S": "set", "X": "stream", "G": "string"}
    assert len(shown) > 5
    for command, key in shown:
        assert [kind.type for kind in kinds_of(key, "demo")] == [readers[command[0]]], key
