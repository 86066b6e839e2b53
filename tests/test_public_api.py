"""The package's face: what it exports, and which way its imports point."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tq_redis

PACKAGE = Path(tq_redis.__file__).parent

# A part may import those before it, never those after it.
LAYERS = [
    ["errors", "deadline"],
    ["config", "store"],
    ["metadata", "redis_server"],
    ["control"],
    ["storage_unit"],
    ["unit_actors"],
    ["data"],
    ["samplers", "checkpoint"],
    ["client"],
    ["instance", "metrics"],
    ["session"],
    ["streaming"],
    ["kv", "bridge", "cli", "compat"],
    ["verl"],
    ["__main__"],
]


def test_all_names_are_there() -> None:
    listed = ast.parse((PACKAGE / "__init__.pyi").read_text())
    (names,) = [
        ast.literal_eval(node.value)
        for node in listed.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert set(names) == {*tq_redis.__all__, "__version__"}
    assert names == sorted(names)
    assert all(getattr(tq_redis, name) is not None for name in names)


def test_looking_at_a_queue_needs_no_torch() -> None:
    """The command line answers at once; importing torch takes seconds."""
    code = "import sys, tq_redis.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("store", ["store.ray_actor", "unit_actors"])
def test_a_store_needs_no_torch(store: str) -> None:
    """It starts at once, on every node, and stays small."""
    code = f"import sys, tq_redis.{store}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
    assert parts - known - {"__pycache__"} == {"__init__", "__init__.pyi", "py.typed"}


def test_errors_are_exported() -> None:
    from tq_redis import errors

    named = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, Exception)}
    assert named <= set(tq_redis.__all__)
