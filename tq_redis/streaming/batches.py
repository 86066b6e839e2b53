"""Batches of a stream: claimed and fetched as a whole, handed on in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from tq_redis.client.columns import to_tensordict
from tq_redis.client.sync import Client
from tq_redis.data import Column
from tq_redis.data.given import length, to_columns
from tq_redis.errors import DeadlineError, InputError
from tq_redis.metadata import BatchMeta
from tq_redis.samplers import Sampler

Batch = tuple[TensorDict, BatchMeta]

_nested: Any = torch.nested  # typed in part


def default_fetch_batch_fn(
    tq_client: Client,
    data_fields: Sequence[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: Mapping[str, Any],
    batch_index: int,
    *,
    sampler: Sampler | None = None,
    lease: float | None = None,
    timeout: float | None = None,
) -> Batch:
    """Wait for a batch, claim it and fetch its columns.

    Args:
        sampling_config: ``dp_rank`` and ``batch_index``, or nothing.
        batch_index: the number of the batch, also where no rank is named.

    The other arguments, and the errors, are those of ``get_meta`` and ``get_data``.
    """
    try:
        meta = tq_client.get_meta(
            data_fields,
            batch_size,
            partition_id,
            task_name=task_name,
            sampling_config=sampling_config,
            sampler=sampler,
            lease=lease,
            timeout=timeout,
        )
    except DeadlineError as error:
        error.add_note("If no more samples will come, say so: client.end_partition, or expect.")
        raise
    return tq_client.get_data(meta, data_fields, timeout=timeout), meta


def chunk_batch_fn(td: TensorDict, batch_meta: BatchMeta, micro_batch_size: int = 1) -> list[Batch]:
    """Cut a batch into micro-batches of ``micro_batch_size`` rows, the last of what is left.

    Dense columns become views. Rows of columns and metadata stay together.

    Raises:
        InputError: ``micro_batch_size`` is not positive, or ``td`` and ``batch_meta`` have not the
            same number of rows.
    """
    require_positive(micro_batch_size=micro_batch_size)
    rows = td.batch_size[0] if td.batch_size else None
    if rows != batch_meta.size:
        raise InputError(f"The columns have {rows} rows, the metadata {batch_meta.size} samples")
    starts = range(0, batch_meta.size, micro_batch_size)
    cut = {name: _cut(column, micro_batch_size) for name, column in to_columns(td).items()}
    metas = [batch_meta[start : start + micro_batch_size] for start in starts]
    return [
        (to_tensordict({name: parts[place] for name, parts in cut.items()}, meta.size), meta)
        for place, meta in enumerate(metas)
    ]


def require_positive(**numbers: float | None) -> None:
    for name, number in numbers.items():
        if number is not None and not number > 0:
            raise InputError(f"{name} must be positive, got {number}")


def _cut(column: Column, size: int) -> list[Column]:
    starts = range(0, length(column), size)
    if isinstance(column, list) or not column.is_nested:
        return [column[start : start + size] for start in starts]
    rows = column.unbind()
    return [
        _nested.as_nested_tensor(list(rows[start : start + size]), layout=column.layout)
        for start in starts
    ]
