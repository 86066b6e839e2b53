"""The verbs' arguments and replies as plain data. Pure functions, no Redis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, cast

import msgspec
import numpy as np

from tq_redis.control.keys import decode, encode
from tq_redis.control.ranges import to_ranges
from tq_redis.control.records import Rows, Run, State, Tags, Write
from tq_redis.control.replies import DescribeReply, LocateReply
from tq_redis.errors import InputError
from tq_redis.metadata.schema import FieldSchema

_STATES: dict[str, State] = {"-": "open", "l": "leased", "c": "consumed", "a": "aside"}


def arguments(values: Mapping[str, Any]) -> bytes:
    """A verb's arguments in the form that Redis gets.

    Raises:
        InputError: a text among them is not valid Unicode.
    """
    try:
        return msgspec.msgpack.encode(values)
    except UnicodeEncodeError as error:
        raise InputError(f"{error.object!r} is not valid Unicode") from error


def write_arguments(write: Write) -> dict[str, Any]:
    """The arguments of ``produce``, but for the ids of new rows.

    Raises:
        InputError: a tag is not JSON.
    """
    packed: dict[str, Any] = {
        "overwrite": write.overwrite,
        "blocks": [
            (
                block.handle,
                block.nbytes,
                block.first_row,
                block.rows,
                [encode(name) for name in block.dtypes],
                list(block.dtypes.values()),
                block.offset,
                block.number,
            )
            for block in write.blocks
        ],
        "schema": [
            text
            for name, form in write.schema.items()
            for text in (encode(name), msgspec.json.encode(form).decode())
        ],
        "tags": tag_columns(write.tags or ()),
    }
    if write.task is not None:
        packed["task"] = encode(write.task)
    if write.admission is not None:
        packed["admission"] = write.admission
    if write.ids is not None:
        return packed | {"ids": to_ranges(write.ids)}
    packed["count"] = write.count
    if write.keys is not None:
        packed["keys"] = list(write.keys)
    if write.groups is not None:
        packed["groups"] = [encode(name) for name in write.groups]
    return packed


def schema_from_json(text: str) -> FieldSchema:
    """The form of a field, as Redis keeps it."""
    return msgspec.json.decode(text, type=FieldSchema)


def tag_columns(tags: Sequence[Tags]) -> list[tuple[str, list[str]]]:
    """Tags by name: one JSON value per row, empty where a row does not have it.

    Raises:
        InputError: a value is not JSON.
    """
    names = {name for row in tags for name in row}
    return [
        (encode(name), [_to_json(name, row[name]) if name in row else "" for row in tags])
        for name in sorted(names)
    ]


def tag_rows(columns: Iterable[tuple[str, str, str]], count: int) -> list[dict[str, Any]]:
    """Tags by row.

    Args:
        columns: name, JSON list of the values, and which rows have one as 1 and 0, or "" if all do.
    """
    tags: list[dict[str, Any]] = [{} for _ in range(count)]
    for encoded, text, bits in columns:
        name, values = decode(encoded), msgspec.json.decode(text)
        rows = compress(tags, map("1".__eq__, bits)) if bits else tags
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return tags


def group_name(text: str) -> str | None:
    """The group that a row is in, as a verb names it."""
    return decode(text[1:]) if text else None


def append_runs(where: dict[str, list[Run]], fields: Sequence[str], reply: LocateReply) -> None:
    """Add a page of locations to those that ``where`` has."""
    handles = dict(reply.blocks)
    decoded: list[list[Run]] = []
    for column in reply.columns:
        if isinstance(column, int):
            decoded.append(decoded[column - 1])
        else:
            triples = zip(column[::3], column[1::3], column[2::3], strict=True)
            decoded.append([(handles[number], row, count) for number, row, count in triples])
    for name, runs in zip(fields, decoded, strict=True):
        where[name].extend(runs)


def append_rows(rows: Rows, reply: DescribeReply) -> None:
    """Add a page of descriptions to those that ``rows`` has."""
    before = len(rows.ids)
    rows.ids.extend(reply.ids)
    rows.keys.extend(key or None for key in reply.keys)
    rows.tags.extend(tag_rows(reply.tags, len(reply.ids)))
    rows.states.extend(_STATES[letter] for letter in reply.states)
    rows.groups.extend(map(group_name, reply.groups))
    for encoded, form, flags in reply.fields:
        if form:
            name = decode(encoded)
            rows.schema[name] = schema_from_json(form)
            # A field that appeared between two pages: no earlier row had it.
            known = rows.produced.setdefault(name, [False] * before)
            known.extend(flag == "1" for flag in flags)
    for known in rows.produced.values():
        # A field that is gone: the partition was cleared and made anew between two pages.
        known.extend([False] * (len(rows.ids) - len(known)))


def number_or_text(text: str) -> int | str:
    """A value of the summary."""
    return int(text) if text.removeprefix("-").isdecimal() else text


def _to_json(name: str, value: Any) -> str:
    try:
        packed = msgspec.json.encode(value, enc_hook=_plain)
    except (TypeError, ValueError) as error:
        raise InputError(f"Tag {name!r} cannot be kept as JSON: {error}") from error
    if b"null" in packed and not _is_finite(value):
        raise InputError(f"Tag {name!r} is {value!r}: JSON has no infinity and no NaN")
    return packed.decode()


def _plain(value: Any) -> Any:
    """What msgspec does not know: the scalars of numpy."""
    if isinstance(value, np.generic):
        return cast("np.generic[Any]", value).item()
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _is_finite(value: Any) -> bool:
    if isinstance(value, float | np.floating):
        return math.isfinite(cast("float", value))
    if isinstance(value, Mapping):
        return all(_is_finite(inner) for inner in cast("Mapping[Any, Any]", value).values())
    if isinstance(value, list | tuple):
        return all(_is_finite(inner) for inner in cast("Sequence[Any]", value))
    return True
