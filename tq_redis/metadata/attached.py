"""What travels with a batch besides its samples: values for the whole, and tags of each row."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from tq_redis.errors import InputError
from tq_redis.metadata.merge import copied_tags


class Attached:
    """Access to ``extra_info`` and ``custom_meta``, which are plain attributes too.

    Attributes:
        extra_info: what belongs to the batch as a whole; may be read, changed and replaced.
        custom_meta: the tags of each row.
    """

    __slots__ = ()

    extra_info: dict[str, Any]
    custom_meta: list[dict[str, Any]]

    # The whole batch

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        """The value itself, not a copy; ``default`` where there is none."""
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        self.extra_info[key] = value

    def has_extra_info(self, key: str) -> bool:
        return key in self.extra_info

    def update_extra_info(self, info: Mapping[str, Any]) -> None:
        """Add these values; they win over those under the same names."""
        self.extra_info.update(info)

    def remove_extra_info(self, key: str) -> Any:
        """Take the value out and return it; None where there is none."""
        return self.extra_info.pop(key, None)

    def clear_extra_info(self) -> None:
        self.extra_info.clear()

    def get_all_extra_info(self) -> dict[str, Any]:
        """A deep copy."""
        return copy.deepcopy(self.extra_info)

    # Each row

    def get_all_custom_meta(self) -> list[dict[str, Any]]:
        """A deep copy of the tags, one entry per row."""
        return copied_tags(self.custom_meta)

    def update_custom_meta(self, custom_meta: Sequence[Mapping[str, Any]] | None) -> None:
        """Merge tags into each row's; None changes nothing.

        Raises:
            InputError: there is not one entry per row.
        """
        if custom_meta is None:
            return
        if len(custom_meta) != len(self.custom_meta):
            raise InputError(
                f"Got tags for {len(custom_meta)} rows, the batch has {len(self.custom_meta)}"
            )
        for mine, new in zip(self.custom_meta, custom_meta, strict=True):
            mine.update(new)

    def clear_custom_meta(self) -> None:
        """Forget all tags here. In the queue they stay until ``set_custom_meta`` is called."""
        for tags in self.custom_meta:
            tags.clear()
