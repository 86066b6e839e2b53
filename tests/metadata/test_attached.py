from __future__ import annotations

import pytest

from tq_redis.errors import InputError
from tq_redis.metadata import BatchMeta


def test_values_of_the_whole_batch() -> None:
    meta = BatchMeta([1], "p", extra_info={"step": 1})
    meta.set_extra_info("lr", [0.1])
    meta.update_extra_info({"step": 2, "m": 3})
    assert meta.extra_info == {"step": 2, "lr": [0.1], "m": 3}
    assert (meta.get_extra_info("step"), meta.has_extra_info("step")) == (2, True)
    assert (meta.get_extra_info("no", "else"), meta.get_extra_info("no")) == ("else", None)
    assert (meta.remove_extra_info("m"), meta.remove_extra_info("m")) == (3, None)
    assert not meta.has_extra_info("m")
    copied = meta.get_all_extra_info()
    copied["lr"].append(0.2)
    assert meta.extra_info == {"step": 2, "lr": [0.1]}
    meta.clear_extra_info()
    assert meta.extra_info == {}
    assert copied == {"step": 2, "lr": [0.1, 0.2]}


def test_the_attribute_can_be_replaced() -> None:
    """As verl does before it puts batches together."""
    meta = BatchMeta([1], "p", extra_info={"step": 1})
    meta.extra_info = {"n": 2}
    assert meta.get_all_extra_info() == {"n": 2}
    assert meta.copy().extra_info == {"n": 2}


def test_tags_are_merged_row_by_row() -> None:
    meta = BatchMeta([1, 2], "p", custom_meta=[{"a": 1}, {}])
    meta.update_custom_meta([{"b": 2}, {"a": 3}])
    meta.update_custom_meta(None)
    assert meta.custom_meta == [{"a": 1, "b": 2}, {"a": 3}]
    for wrong in ([{}], [{}, {}, {}]):
        with pytest.raises(InputError, match=f"tags for {len(wrong)} rows, the batch has 2"):
            meta.update_custom_meta(wrong)
    assert meta.custom_meta == [{"a": 1, "b": 2}, {"a": 3}]


def test_all_tags() -> None:
    meta = BatchMeta([1, 2], "p", custom_meta=[{"a": [1]}, {}])
    copied = meta.get_all_custom_meta()
    copied[0]["a"].append(2)
    assert meta.custom_meta == [{"a": [1]}, {}]
    meta.clear_custom_meta()
    assert meta.custom_meta == [{}, {}]
    assert copied == [{"a": [1, 2]}, {}]
