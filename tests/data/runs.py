"""From what a put wrote to what a get asks for."""

from __future__ import annotations

from collections.abc import Iterable

from tq_redis.data.base import Run, WrittenBlock


def all_rows(blocks: Iterable[WrittenBlock]) -> dict[str, list[Run]]:
    """The runs that give each field as it was put."""
    wanted: dict[str, list[Run]] = {}
    for block in sorted(blocks, key=lambda block: block.first_row):
        for field in block.fields:
            wanted.setdefault(field, []).append((block.handle, 0, block.rows))
    return wanted


def handles(blocks: Iterable[WrittenBlock]) -> list[str]:
    return [block.handle for block in blocks]
