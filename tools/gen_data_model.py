"""Write the table of keys in ``docs/data-model.md`` from ``GLOSSARY`` in ``control/keys.py``.

    python tools/gen_data_model.py           write it
    python tools/gen_data_model.py --check   exit 1 if it is not up to date

The rest of the page is written by hand. The list is read as text, so that nothing of tq_redis need
be installed.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "tq_redis/control/keys.py"
PAGE = ROOT / "docs/data-model.md"
BEGIN = "<!-- made by tools/gen_data_model.py from tq_redis/control/keys.py; do not edit -->\n"
END = "<!-- end -->\n"

# What a person types to see all of a key.
COMMANDS = {
    "string": "GET",
    "hash": "HGETALL",
    "set": "SMEMBERS",
    "zset": "ZRANGE ... 0 -1 WITHSCORES",
    "stream": "XRANGE ... - +",
    "any": "TYPE",
}
NAMES = {"zset": "sorted set"}


def glossary() -> list[tuple[str, str, str]]:
    """Pattern, type and content of each kind of key, as keys.py lists them."""
    for node in ast.parse(SOURCE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "GLOSSARY":
            assert isinstance(node.value, ast.Tuple)
            return [_entry(key) for key in node.value.elts]
    raise SystemExit(f"{SOURCE} has no GLOSSARY")


def table() -> str:
    """The keys as Markdown."""
    lines = ["| key | type | read with | holds |", "|---|---|---|---|"]
    for pattern, kind, holds in glossary():
        cells = (f"`{pattern}`", NAMES.get(kind, kind), f"`{COMMANDS[kind]}`", holds)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page with an up-to-date table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{PAGE} lacks the comments between which the table stands")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    text = page()
    if not parser.parse_args().check:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        print("docs/data-model.md is not up to date: run python tools/gen_data_model.py")
        return 1
    return 0


def _entry(node: ast.expr) -> tuple[str, str, str]:
    assert isinstance(node, ast.Call)
    pattern, kind, holds = (ast.literal_eval(argument) for argument in node.args)
    return pattern, kind, holds


if __name__ == "__main__":
    raise SystemExit(main())
