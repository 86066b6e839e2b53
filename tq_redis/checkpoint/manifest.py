"""The manifest: what a checkpoint consists of. Written last, so that it is there for whole ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tq_redis.checkpoint.files import FileRecord, check_file, disk_errors
from tq_redis.errors import CheckpointError, InputError

FORMAT = "tq_redis checkpoint"
VERSION = 2
NAME = "manifest.json"


class PartitionRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One partition.

    Attributes:
        name: as users write it.
        samples: how many it has.
        blocks: how many.
        state: who has what.
        data: the blocks.
    """

    name: str
    samples: int
    blocks: int
    state: FileRecord
    data: FileRecord


class _Kind(msgspec.Struct, frozen=True):
    """What every version has."""

    format: str
    version: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint.

    Attributes:
        tq_redis: version that saved it.
        created_at: seconds since 1970.
        next_sample: no sample id beyond this one had been given out.
        partitions: by name.
        metadata: the user's.
        checksum: SHA-256 of the manifest without it.
    """

    tq_redis: str
    created_at: float
    next_sample: int
    partitions: list[PartitionRecord]
    metadata: dict[str, Any]
    format: str = FORMAT
    version: int = VERSION
    checksum: str = ""


def as_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """The user's metadata, as JSON gives it back.

    Raises:
        InputError: JSON cannot carry it.
    """
    given = dict(metadata or {})
    try:
        again = msgspec.json.decode(msgspec.json.encode(given))
    except (TypeError, ValueError) as error:
        raise InputError(f"metadata of a checkpoint must be JSON: {error}") from error
    if again != given:
        raise InputError(
            f"metadata of a checkpoint must be JSON: {given!r} comes back as {again!r}"
        )
    return again


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it into the folder."""
    whole = msgspec.structs.replace(manifest, checksum=_checksum(manifest))
    text = msgspec.json.format(msgspec.json.encode(whole), indent=1)
    with disk_errors(folder, "write"):
        (folder / NAME).write_bytes(text)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, whose files are all there and as they were written.

    Raises:
        CheckpointError: names the file and what is wrong with it.
    """
    path = folder / NAME
    with disk_errors(folder, "read"):
        text = path.read_bytes()
    try:
        kind = msgspec.json.decode(text, type=_Kind)
        if kind.format != FORMAT or kind.version != VERSION:
            raise CheckpointError(
                f"{path} is {kind.format!r}, version {kind.version}; this tq_redis reads "
                f"{FORMAT!r}, version {VERSION}",
                path=str(path),
            )
        manifest = msgspec.json.decode(text, type=Manifest)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path} is no manifest: {error}", path=str(path)) from error
    if manifest.checksum != _checksum(manifest):
        raise CheckpointError(f"{path} was changed: its checksum is wrong", path=str(path))
    for partition in manifest.partitions:
        check_file(folder, partition.state)
        check_file(folder, partition.data)
    return manifest


def _checksum(manifest: Manifest) -> str:
    bare = msgspec.structs.replace(manifest, checksum="")
    return hashlib.sha256(msgspec.json.encode(bare)).hexdigest()
