"""Which fields a batch has, and in which form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from tq_redis.errors import FieldNotFoundError, nearest
from tq_redis.metadata.schema import FieldSchema, ReadyFlags, require_forms

if TYPE_CHECKING:
    import torch


class Described:
    """Access to ``field_schema``, a plain attribute too.

    Attributes:
        field_schema: the fields that the rows have, with their form.
        production_status: (B,) int8, 1 where all of the fields are produced.
    """

    __slots__ = ()

    field_schema: dict[str, FieldSchema]
    production_status: ReadyFlags

    @property
    def field_names(self) -> list[str]:
        """Sorted."""
        return sorted(self.field_schema)

    def get_dtypes(self, field_name: str) -> list[torch.dtype | None]:
        """The dtype of the field in each row; None where it is not a tensor.

        Raises:
            FieldNotFoundError: the batch has no such field. It is a KeyError too.
        """
        import torch

        name = self._form(field_name).dtype
        return [getattr(torch, name) if name else None] * len(self.production_status)

    def get_shapes(self, field_name: str) -> list[tuple[int, ...]]:
        """The shape of the field in each row, -1 where samples differ; () where it is no tensor.

        transfer_queue gives each sample's own size in the place of -1; this metadata does not
        hold it, so as not to grow with the samples.

        Raises:
            FieldNotFoundError: the batch has no such field. It is a KeyError too.
        """
        return [self._form(field_name).shape] * len(self.production_status)

    def add_fields(self, fields: Mapping[str, FieldSchema], set_all_ready: bool = True) -> Self:
        """Add fields in place; no field, no change.

        Nothing is written to the queue: ``put`` does that, and returns metadata with the fields it
        wrote. transfer_queue takes a TensorDict here; this takes what is known of its columns.

        Args:
            fields: their forms.
            set_all_ready: True: all rows have all fields now, the earlier ones too, which
                ``with_fields`` does not assume. False: which rows are ready stays as it is.

        Returns:
            This batch.

        Raises:
            InputError: a form is not a :class:`FieldSchema`.
        """
        forms = require_forms(fields)
        if forms and set_all_ready:
            self.production_status[:] = 1
        self.field_schema.update(forms)
        return self

    def _form(self, field: str) -> FieldSchema:
        if field not in self.field_schema:
            raise FieldNotFoundError(
                f"The batch has no field {field!r}. {nearest(field, self.field_schema)}",
                fields=[field],
            )
        return self.field_schema[field]
