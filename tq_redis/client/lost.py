"""Bytes that are gone: which cells of a batch they were, and what its reader is told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tq_redis.control.records import Lost, Run
from tq_redis.errors import DataLostError, shorten
from tq_redis.metadata import BatchMeta


@dataclass(slots=True)
class LostPart:
    """What one partition lost. Fields and handles in the order in which they were met."""

    rows: set[int] = field(default_factory=set[int])
    fields: dict[str, None] = field(default_factory=dict[str, None])
    handles: dict[str, None] = field(default_factory=dict[str, None])


class Loss:
    """A loss in the user's words: rows and fields instead of blocks.

    Args:
        error: names the blocks.
        metadata: the batch that was read.
        where: the runs of its fields, which may lie in these blocks.

    Attributes:
        parts: by partition; empty if no cell lies in the blocks.
    """

    def __init__(
        self, error: DataLostError, metadata: BatchMeta, where: Mapping[str, Sequence[Run]]
    ) -> None:
        self._error = error
        self.parts: dict[str, LostPart] = {}
        lost = set(error.handles)
        for name, runs in where.items():
            position = 0
            for handle, _, count in runs:
                if handle in lost:
                    for row in range(position, position + count):
                        part = self.parts.setdefault(metadata.partition_ids[row], LostPart())
                        part.rows.add(metadata.global_indexes[row])
                        part.fields[name] = None
                        part.handles[handle] = None
                position += count

    def described(self, reset: Mapping[str, Lost]) -> DataLostError:
        """What the reader is told, with what was done about it in each partition."""
        rows = sorted(_all(part.rows for part in self.parts.values()))
        fields = dict.fromkeys(name for part in self.parts.values() for name in part.fields)
        text = f"The bytes of fields {list(fields)} are gone for rows {shorten(rows)}"
        text += f" of partition {', '.join(map(repr, self.parts))}: {self._error.message}"
        for partition, lost in reset.items():
            sentences = _what_now(self.parts[partition].rows, lost)
            text += f". In partition {partition!r} " + "; ".join(sentences)
        return DataLostError(
            text,
            handles=self._error.handles,
            partition=next(iter(self.parts), None),
            fields=fields,
            rows=rows,
        )


def _what_now(rows: set[int], lost: Lost) -> list[str]:
    sentences: list[str] = []
    reset = _all(lost.cells.values())
    if reset:
        sentences.append("they are not produced any more")
    for task, again in lost.tasks.items():
        sentences.append(f"task {task!r} can claim rows {shorten(again)} again")
    if lost.left:
        sentences.append(
            f"no task can write all of rows {shorten(lost.left)} again (they were put without one, "
            f"or are set aside for it): put them again, or clear them"
        )
    if rows - reset:
        sentences.append(
            f"rows {shorten(sorted(rows - reset))} were reset or written again meanwhile"
        )
    return sentences


def _all(parts: Iterable[Iterable[int]]) -> set[int]:
    return {row for part in parts for row in part}
