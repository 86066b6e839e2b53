"""The parsers of a storage unit: functions that are named by where they are imported from, made to
work on blocks. They bring torch into the unit; one without parsers does not import this."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import numpy as np

from tq_redis.data.codec import StoredBlock, decode, encode
from tq_redis.data.given import ParserFunction, parsed
from tq_redis.errors import ConfigError
from tq_redis.store.parsers import BlockParser, Made
from tq_redis.store.shelf import Content


def load_parsers(paths: Mapping[str, str]) -> dict[str, BlockParser]:
    """Import functions.

    Args:
        paths: name -> ``package.module:function``.

    Raises:
        ConfigError: there is no such function, or its module fails.
    """
    return {name: partial(_parse, _function(name, path)) for name, path in paths.items()}


def _function(name: str, path: str) -> ParserFunction:
    try:
        function: Any = pkgutil.resolve_name(path)
    except Exception as error:
        raise ConfigError(
            f"Parser {name!r} cannot be imported from {path!r} ({type(error).__name__}: {error}). "
            f"Give it as package.module:function, and put the package where this process finds it "
            f"(PYTHONPATH)."
        ) from error
    if not callable(function):
        raise ConfigError(
            f"Parser {name!r}: {path!r} is no function, but of type {type(function).__name__}."
        )
    return cast(ParserFunction, function)


def _parse(function: ParserFunction, content: Content, block_bytes: int) -> list[Made]:
    """Nothing is pickled here, whatever the settings say: that would be code of a client."""
    block = StoredBlock(*content)
    wanted = {field: [("", 0, block.rows)] for field in block.origins}
    columns = decode(wanted, {"": block}, copy=True, allow_pickle=False)
    made = parsed(function, columns)
    blocks = encode(made, block_bytes=block_bytes, allow_pickle=False)
    return [
        Made(block.first_row, (block.header, [np.array(buffer) for buffer in block.buffers]))
        for block in blocks
    ]
