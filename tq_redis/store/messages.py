"""What a store and its clients say to each other.

A message is a msgpack header with the small buffers of the blocks that it names, then the large
ones, each in a frame of its own, so that none is copied into another one. Nothing is pickled. All
requests are safe to repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from tq_redis.store.shelf import Content

LONGEST_S = 24 * 3600.0
"""No request may ask a store to wait, or to keep anything for it, for longer."""

# Up to here a frame takes twice as long as a copy into the message and out of it (docs/log.md).
_OWN_FRAME = 16 << 10

Bytes = Annotated[int, msgspec.Meta(ge=0)]
Dtype = Annotated[str, msgspec.Meta(pattern=r"^[<>|][biufc]\d{1,2}$")]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_S)]


class Parcel(msgspec.Struct, frozen=True, array_like=True):
    """One block in a message: its header, and of each buffer the dtype and the bytes, or None where
    they follow in a frame."""

    header: bytes
    buffers: list[tuple[Dtype, bytes | None]]


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Keep blocks, all or none, in the room reserved for the first of them if there is any."""

    partition: str
    names: list[str]
    parcels: list[Parcel]


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Make room for blocks of which the first has this name, and wait up to ``wait_s`` seconds for
    it. Who does not come with a block for ``keep_s`` seconds loses what is left of it."""

    name: str
    nbytes: Bytes
    wait_s: Seconds
    keep_s: Seconds


class Find(msgspec.Struct, frozen=True, tag=True):
    """Send blocks."""

    names: list[str]


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Forget blocks, and the room reserved for them; all blocks where no names are given."""

    names: list[str] | None = None


class Confirm(msgspec.Struct, frozen=True, tag=True):
    """Redis names these blocks."""

    names: list[str]


class ListUnconfirmed(msgspec.Struct, frozen=True, tag=True):
    """Name the blocks held for more than ``older_than`` seconds and not confirmed."""

    older_than: float


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Say how much is kept."""


class Parse(msgspec.Struct, frozen=True, tag=True):
    """Keep what a parser makes of a block, as blocks of about ``block_bytes``, if it is done and
    there is room for it within ``within_s`` seconds.

    Attributes:
        name: of the request: made again, it is answered, but not done, again. To ``Drop`` this name
            is to give it up, and to forget what was made.
    """

    name: str
    partition: str
    parser: str
    parcel: Parcel
    block_bytes: Annotated[int, msgspec.Meta(ge=1)]
    within_s: Seconds


class Done(msgspec.Struct, frozen=True, tag=True):
    """It was done."""


class Full(msgspec.Struct, frozen=True, tag=True):
    """There is no room now.

    Attributes:
        used, capacity: bytes.
    """

    used: int
    capacity: int


class Found(msgspec.Struct, frozen=True, tag=True):
    """Blocks, None where there is none."""

    parcels: list[Parcel | None]


class Unconfirmed(msgspec.Struct, frozen=True, tag=True):
    """Names of blocks, by partition."""

    names: dict[str, list[str]]


class Usage(msgspec.Struct, frozen=True, tag=True):
    """What a store keeps.

    Attributes:
        blocks: how many.
        used: bytes they take.
        capacity: bytes they may take; None: no limit.
    """

    blocks: int
    used: int
    capacity: int | None


class ParsedBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block that is kept now.

    Attributes:
        header: its own.
        first_row: the row of the block that was sent that is its row 0.
        nbytes: of its rows.
    """

    name: str
    header: bytes
    first_row: int
    nbytes: int


class Parsed(msgspec.Struct, frozen=True, tag=True):
    """What a parser made is kept."""

    blocks: list[ParsedBlock]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The parser raised something, and nothing is kept.

    Attributes:
        reason: what it was.
        bad_input: its result, or what it was given, cannot be right.
    """

    reason: str
    bad_input: bool = False


class Late(msgspec.Struct, frozen=True, tag=True):
    """The parser was not done in time, and nothing is kept."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """That was no request of ours."""

    reason: str


Request = Hold | Reserve | Find | Drop | Confirm | ListUnconfirmed | Measure | Parse
Reply = Done | Full | Found | Unconfirmed | Usage | Parsed | Failed | Late | Refused

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def pack(contents: Iterable[Content]) -> tuple[list[Parcel], list[Any]]:
    """Blocks as parcels, and the frames that follow the header, in this order."""
    parcels: list[Parcel] = []
    frames: list[Any] = []
    for header, buffers in contents:
        sent: list[tuple[str, bytes | None]] = []
        for buffer in buffers:
            is_small = buffer.nbytes < _OWN_FRAME
            sent.append((buffer.dtype.str, buffer.tobytes() if is_small else None))
            if not is_small:
                frames.append(buffer)
        parcels.append(Parcel(header, sent))
    return parcels, frames


def unpack(parcels: Iterable[Parcel | None], frames: Sequence[Any]) -> list[Content | None]:
    """Inverse of :func:`pack`; blocks are made of the frames, without a copy.

    Raises:
        ValueError: there are not as many frames as the parcels say, or buffers have another size.
    """
    left = iter(frames)
    contents: list[Content | None] = []
    for parcel in parcels:
        if parcel is None:
            contents.append(None)
            continue
        buffers = [
            np.frombuffer(_next(left) if within is None else within, dtype)
            for dtype, within in parcel.buffers
        ]
        contents.append((parcel.header, buffers))
    if next(left, None) is not None:
        raise ValueError("More buffers came than the message names")
    return contents


def _next(frames: Iterator[Any]) -> Any:
    frame = next(frames, None)
    if frame is None:
        raise ValueError("Fewer buffers came than the message names")
    return frame
