"""The package's face: what it exports, and which way its imports point."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import tq_redis

PACKAGE = Path(tq_redis.__file__).parent

# A part may import those before it, never those after it.
LAYERS = [
    ["errors", "deadline"],
    ["config"],
    ["metadata", "redis_server"],
    ["control", "data"],
    ["samplers", "checkpoint"],
    ["client"],
    ["instance"],
    ["session"],
    ["kv", "bridge", "cli"],
    ["__main__"],
]


def test_all_is_what_can_be_seen() -> None:
    visible = {
        name
        for name, value in vars(tq_redis).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert set(tq_redis.__all__) - {"__version__"} == visible
    assert sorted(tq_redis.__all__, key=str.lower) == sorted(set(tq_redis.__all__), key=str.lower)


def test_imports_point_one_way() -> None:
    level = {name: depth for depth, names in enumerate(LAYERS) for name in names}
    wrong: list[str] = []
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tq_redis."):
                other = (node.module or "").split(".")[1]
                if other != part and level[other] >= level[part]:
                    wrong.append(f"{path.relative_to(PACKAGE)} imports {node.module}")
    assert wrong == []


def test_every_part_has_its_layer() -> None:
    parts = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}
    known = {name for names in LAYERS for name in names}
    assert parts - known - {"__pycache__"} == {"__init__", "py.typed"}


def test_errors_are_exported() -> None:
    from tq_redis import errors

    named = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, Exception)}
    assert named <= set(tq_redis.__all__)
