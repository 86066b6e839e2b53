"""KVBatchMeta: a batch named by user keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from tq_redis import metadata as strict
from tq_redis.compat.transfer_queue.errors import KeyLookupError
from tq_redis.errors import InputError, KeyNotFoundError, shorten


@dataclass(repr=False, eq=False)
class KVBatchMeta(strict.KVBatchMeta):
    """Samples of one partition by their user keys."""

    def select_keys(  # pyright: ignore[reportIncompatibleMethodOverride]  (their name)
        self, keys_to_select: Sequence[str]
    ) -> Self:
        """These samples, in this order.

        Raises:
            InputError: a key stands twice.
            KeyLookupError: a key is not in the batch. It is a RuntimeError too.
        """
        if len(set(keys_to_select)) != len(keys_to_select):
            raise InputError(f"Keys must be distinct, got {shorten(keys_to_select)}")
        try:
            return super().select_keys(keys_to_select)
        except KeyNotFoundError as error:
            raise KeyLookupError(error.message, partition=self.partition_id) from error

    def reorder(  # pyright: ignore[reportIncompatibleMethodOverride]  (their name)
        self, indexes: Sequence[int]
    ) -> None:
        """Put the samples into this order, in place.

        Raises:
            InputError: ``indexes`` is not a permutation of the rows.
        """
        super().reorder(indexes)

    @classmethod
    def concat(  # pyright: ignore[reportIncompatibleMethodOverride]  (their name)
        cls, data: Sequence[Self]
    ) -> Self:
        """More samples of the same partition; empty batches are passed over. A batch whose fields
        are not known goes with any behind it.

        Raises:
            InputError: partitions or fields differ, a key stands twice, or ``extra_info`` has two
                values for one name.
        """
        parts = [part for part in data if part]
        if not parts:
            return cls()
        fields = parts[0].fields
        known = [replace(part, fields=fields) if part.fields is None else part for part in parts]
        return super().concat(known)

    def __str__(self) -> str:
        return (
            f"KVBatchMeta(size={self.size}, field_names={self.fields}, "
            f"extra_info={self.extra_info})"
        )
