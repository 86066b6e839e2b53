"""Which fields a batch has, and in which form."""

from __future__ import annotations

from typing import Any, Self

from tensordict.base import TensorDictBase

from tq_redis.compat.transfer_queue.metadata.schema import (
    PER_ROW,
    Form,
    Schema,
    extract_field_schema,
)
from tq_redis.errors import FieldNotFoundError, InputError, nearest
from tq_redis.metadata.schema import ReadyFlags


class Described:
    """Access to ``field_schema``, a plain attribute too.

    Attributes:
        field_schema: field -> form.
        production_status: (B,) int8, 1 where all of the fields are produced.
    """

    __slots__ = ()

    field_schema: Schema
    production_status: ReadyFlags

    @property
    def field_names(self) -> list[str]:
        """Sorted."""
        return sorted(self.field_schema)

    def get_dtypes(self, field_name: str) -> list[Any]:
        """The dtype of the field in each row.

        Raises:
            FieldNotFoundError: the batch has no such field. It is a KeyError too.
        """
        return [self._form(field_name).get("dtype")] * len(self.production_status)

    def get_shapes(self, field_name: str) -> list[Any]:
        """The shape of the field in each row.

        Raises:
            FieldNotFoundError: the batch has no such field. It is a KeyError too.
        """
        form = self._form(field_name)
        return list(form.get(PER_ROW) or [form.get("shape")] * len(self.production_status))

    def add_fields(self, tensor_dict: TensorDictBase, set_all_ready: bool = True) -> Self:
        """Add the fields of a TensorDict in place; without rows, no change.

        Nothing is written to the queue: ``put`` does that.

        Args:
            set_all_ready: True: all rows have all fields now.

        Returns:
            This batch.

        Raises:
            InputError: it has another number of rows.
        """
        rows = tensor_dict.batch_size[0]
        if not rows:
            return self
        if rows != len(self.production_status):
            raise InputError(f"Got {rows} rows for a batch of {len(self.production_status)}")
        self.field_schema |= extract_field_schema(tensor_dict)
        if set_all_ready:
            self.production_status[:] = 1
        return self

    def _form(self, field: str) -> Form:
        if field not in self.field_schema:
            raise FieldNotFoundError(
                f"The batch has no field {field!r}. {nearest(field, self.field_schema)}",
                fields=[field],
            )
        return self.field_schema[field]
