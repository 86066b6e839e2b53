from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import get_args

import pytest

import tq_redis.control
from tests.control.build import claimed, soon, write
from tests.control.state import Admin
from tq_redis.control.plane import ControlPlane
from tq_redis.control.scripts import LIBRARY, Verb, load_script

LUA = Path(tq_redis.control.__file__).parent / "lua"
VERBS: tuple[Verb, ...] = get_args(Verb)
SOURCES = {path.relative_to(LUA).as_posix(): path.read_text() for path in LUA.rglob("*.lua")}
# Commands whose work grows with the whole partition, or that stop the server.
FORBIDDEN = {"KEYS", "HVALS", "LRANGE", "FLUSHDB", "FLUSHALL", "SORT"}


def code(source: str) -> str:
    """Without comments."""
    return re.sub(r"--.*", "", source)


def test_every_file_is_a_verb_or_part_of_the_library() -> None:
    expected = {f"{verb}.lua" for verb in VERBS} | {f"lib/{name}.lua" for name in LIBRARY}
    assert SOURCES.keys() == expected


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_test_file(verb: Verb) -> None:
    assert (Path(__file__).parent / "lua" / f"test_{verb}.py").is_file()


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_opens_with_its_contract(verb: Verb) -> None:
    header = re.match(r"(--[^\n]*\n)+", SOURCES[f"{verb}.lua"])
    assert header
    assert re.fullmatch(
        r"-- [A-Z].*?\.\n(-- [^\n]*\n)*-- ARGV     \S.*?\n-- Returns  code ok.*",
        header[0],
        re.DOTALL,
    )


@pytest.mark.parametrize("verb", VERBS)
def test_the_header_names_the_arguments_that_are_used(verb: Verb) -> None:
    source = SOURCES[f"{verb}.lua"]
    header = source[: source.index("\nlocal ")] if "\nlocal " in source else source
    used = set(re.findall(r"\bargs\.(\w+)", code(source)))
    assert {name for name in used if not re.search(rf"\b{name}\b", header)} == set()


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_writes_keeps_its_reply_for_a_replay(verb: Verb) -> None:
    source = code(SOURCES[f"{verb}.lua"])
    reads_only = verb in ("locate", "describe", "snapshot", "list_changes")
    repeatable = verb in (
        "swap_owner",
        "freeze",
        "stage",
        "renew",
        "cancel",
        "list_ready",
        "recall",
    )
    assert ("replay()" in source and "finish(" in source) == (not reads_only and not repeatable)


@pytest.mark.parametrize("name", SOURCES)
def test_keys_are_made_by_key_alone(name: str) -> None:
    source = code(SOURCES[name])
    assert "tq:" not in source
    assert len(re.findall(r"\bKEYS\b", source)) == (name == "lib/prelude.lua")
    assert len(re.findall(r"\bP \.\.", source)) == (name == "lib/prelude.lua")
    made = set(re.findall(r"local (\w+)(?:, \w+)*(?:, \w+)? = key\(", source))
    made |= set(re.findall(r"local \w+, (\w+)(?:, \w+)? = key\([^)]*\), key\(", source))
    # `name` and `kept[name]` stand for keys that partition_keys() has made.
    allowed = made | {"P", "key", "name", "kept"}
    for command, argument in re.findall(r"redis\.call\('(\w+)'(?:, (\w+))?", source):
        assert command not in FORBIDDEN
        assert command == "TIME" or argument in allowed, (command, argument)


@pytest.mark.parametrize("verb", VERBS)
def test_the_digest_is_that_of_the_whole_source(verb: Verb) -> None:
    script = load_script(verb)
    assert script.sha == hashlib.sha1(script.source.encode()).hexdigest()
    assert script.source.index("local P = KEYS[1]") < script.source.index(
        SOURCES[f"{verb}.lua"][:200]
    )


@pytest.mark.parametrize("verb", VERBS)
def test_the_server_compiles_it(admin: Admin, verb: Verb) -> None:
    assert admin.script_load(load_script(verb).source) == load_script(verb).sha


@pytest.mark.asyncio
async def test_scripts_that_the_server_forgot_are_sent_again(
    plane: ControlPlane, admin: Admin
) -> None:
    """After SCRIPT FLUSH, as after a restart or a failover; nothing is done twice."""
    put = write(8, ["x"], keys=list("abcdefgh"))
    admin.script_flush()
    ids = (await plane.produce("p", put, soon())).ids
    admin.script_flush()
    assert (await claimed(plane, 3)).ids == ids[:3]
    admin.script_flush()
    rows = await plane.describe("p", soon(), task="t")
    assert rows.states == ["consumed"] * 3 + ["open"] * 5
    admin.script_flush()
    await plane.set_tags("p", ids[:1], [{"t": 1}], soon())
    admin.script_flush()
    await plane.clear_samples("p", ids[:1], soon())
    summary = await plane.summary("p", soon())
    assert [summary[n] for n in ("samples", "produced:x", "consumed:t")] == [7, 7, 2]
