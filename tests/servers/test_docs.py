"""docs/servers.md says what is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tq_redis.config import load_config
from tq_redis.control.addresses import OPTIONS, parse_address
from tq_redis.control.rights import rules

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "servers.md").read_text(encoding="utf-8")
EXAMPLES: list[str] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def test_there_is_an_example_of_each_kind() -> None:
    kinds = {parse_address(url).kind for text in EXAMPLES for url in urls(text)}
    assert kinds == {"single", "cluster", "sentinel"}
    assert {len(urls(text)) for text in EXAMPLES} == {1, 2}


def urls(text: str) -> tuple[str, ...]:
    settings: Any = OmegaConf.create(text)
    return load_config(settings).redis.urls


@pytest.mark.parametrize("address", re.findall(r"`((?:redis|unix)[a-z+]*://[^`<]*[^`:/<])`", PAGE))
def test_addresses_can_be_read(address: str) -> None:
    parse_address(address)


def test_the_rights_are_those_that_are_checked() -> None:
    (block,) = re.findall(r"```\n( *ACL SETUSER.*?)```", PAGE, re.DOTALL)
    words = block.replace("\\\n", " ").split()
    assert words == ["ACL", "SETUSER", "tq", "on", ">password", *rules("<namespace>")]
    cluster = [rule for rule in rules("x", cluster=True) if rule not in rules("x")]
    assert f"add `{' '.join(cluster)}`" in PAGE


def test_all_options_are_named() -> None:
    assert {name for name in OPTIONS if f"`{name}`" in PAGE} == OPTIONS
