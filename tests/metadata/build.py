"""Batches of any kind, for properties that hold for all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tq_redis.metadata import BatchMeta, Claim, FieldSchema, KVBatchMeta

FORMS = st.builds(
    FieldSchema,
    st.sampled_from(["dense", "jagged"]),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from([(), (8,), (-1,)]),
)
SCHEMAS = st.dictionaries(st.sampled_from(["ids", "mask", "reward", "größe"]), FORMS, max_size=4)
INFOS = st.dictionaries(st.sampled_from(["step", "m"]), st.integers() | st.lists(st.integers()))
TAGS: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    st.sampled_from(["v", "w"]), st.integers() | st.lists(st.integers(), max_size=2), max_size=2
)
TASKS = st.sampled_from([None, "update", "更新"])
CLAIMS = st.none() | st.builds(Claim, st.sampled_from(["update", "更新"]), st.integers(1, 3))


@st.composite
def batches(draw: st.DrawFn, min_size: int = 0, max_size: int = 20) -> BatchMeta:
    """Any batch without padding."""
    size = draw(st.integers(min_size, max_size))

    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=size, max_size=size))

    return BatchMeta(
        column(st.integers(1, 2**40)),
        column(st.sampled_from(["p", "q"])),
        draw(SCHEMAS),
        np.array(column(st.sampled_from([0, 1])), np.int8),
        draw(INFOS),
        column(TAGS),
        read_only=draw(st.booleans()),
        claims=draw(CLAIMS | st.lists(CLAIMS, min_size=size, max_size=size)),
        task=draw(TASKS),
    )


@st.composite
def kv_batches(draw: st.DrawFn) -> KVBatchMeta:
    """Any batch of user keys."""
    keys = draw(st.lists(st.text(min_size=1, max_size=5), max_size=20, unique=True))
    tags = draw(st.lists(TAGS, min_size=len(keys), max_size=len(keys)))
    fields = draw(st.none() | st.lists(st.sampled_from("abc"), unique=True))
    return KVBatchMeta(keys, tags, "p", fields, draw(INFOS))
