from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from tests.control.build import soon, write
from tests.control.state import Admin, Partition
from tq_redis.control import keys as keys_module
from tq_redis.control.keys import Keys, decode, encode, index_name
from tq_redis.control.plane import ControlPlane
from tq_redis.errors import InputError

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
    """Partition, field, task, user key, group and tag of the same odd name."""
    await plane.produce("other", write(1, ["x"]), soon())
    put = write(2, [name], keys=[name, "b"], groups=[name, name], tags=[{name: name}, {}])
    ids = (await plane.produce(name, put, soon())).ids
    found = await plane.claim(name, name, [name], 2, name, soon(), group_size=2)
    assert getattr(found, "ids", None) == ids
    rows = await plane.describe(name, soon(), task=name, keys=[name])
    assert (rows.ids, rows.keys, rows.tags) == ([ids[0]], [name], [{name: name}])
    assert (rows.produced, rows.consumed) == ({name: [True]}, [True])
    assert list(await plane.locate(name, ids, [name], soon())) == [name]
    summary = await plane.summary(name, soon())
    assert (summary[f"produced:{name}"], summary[f"consumed:{name}"]) == (2, 2)
    assert await plane.partitions(soon()) == sorted({name, "other"})
    assert await plane.fields(name, soon()) == [name]
    Partition(admin, plane.keys.summary(name)).check()  # the slots, too
    await plane.clear_samples(name, ids[:1], soon())
    await plane.clear_partition(name, soon())
    assert await plane.partitions(soon()) == ["other"]


@pytest.mark.asyncio
async def test_every_key_is_in_the_glossary(plane: ControlPlane, admin: Admin) -> None:
    async def fill() -> None:
        put = write(4, ["x"], keys=list("abcd"), groups=list("gghh"), tags=[{"n": 1}] * 4)
        ids = (await plane.produce("p", put, soon())).ids
        await plane.claim("p", "t", ["x"], 2, "me", soon(), group_size=2)
        await plane.produce("p", write(4, ["x"], ids=ids), soon())

    await fill()
    (generation,) = await plane.clear_partition("p", soon())
    await fill()
    glossary = keys_module.__doc__ or ""
    documented = {line.split("``")[1] for line in glossary.splitlines() if "``tq:" in line}
    found: set[str] = set()
    for key in admin.scan_iter(f"tq:{plane.keys.namespace}:*", count=1000):
        name = re.sub(r":req:.*", ":req:<request>", key.replace(plane.keys.namespace, "<ns>"))
        for made, placeholder in {
            "{p}": "{P}",
            ":t:2:x": ":<i>",
            ":field:x": ":field:<f>",
            ":task:t": ":task:<t>",
            ":tag:n": ":tag:<name>",
            f":trash:{generation}": ":trash:<g>",
        }.items():
            name = name.replace(made, placeholder)
        found.add(name)
    assert found == documented - {"tq:<ns>:owner"}
