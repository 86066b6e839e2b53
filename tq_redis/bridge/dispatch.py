"""Metadata over the ranks of a verl worker group: chunk, pad, concat, by DataProto's rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tq_redis.errors import InputError
from tq_redis.metadata import BatchMeta, KVBatchMeta


def meta_dispatch(mesh_name: str, *, pad: bool = False) -> dict[str, Callable[..., Any]]:
    """A dispatch mode for verl's ``register``: metadata, or verl's own batches, over a mesh.

    Args:
        mesh_name: a mesh that the workers registered, for example ``actor``.
        pad: fill a batch that the ranks cannot share evenly up with repeated rows, which are
            never written back; a call that does not block returns those of verl's own batches.
            Else such a batch is refused, as DataProto does. verl's own ``auto_padding`` entry in
            ``extra_info`` does the same for one batch.

    Batches are split over the data-parallel ranks, ranks of one group get the same rows, and only
    those that the mesh collects from write back. Other arguments go to every rank as they are.
    """
    return {
        "dispatch_fn": partial(_dispatch, mesh_name, pad),
        "collect_fn": partial(_collect, mesh_name),
    }


def call_actors(batch: Any, methods: Sequence[Any]) -> MetaFuture:
    """Share a batch evenly between actors that are no worker group; does not wait for them.

    Args:
        batch: metadata, or a batch of verl's; rows are repeated where the actors cannot share it
            evenly, and neither written nor returned.
        methods: one of each actor, for example ``[actor.generate for actor in actors]``.

    Returns:
        What they will return, joined.

    Raises:
        InputError: ``batch`` is none.
    """
    split = _split(batch, len(methods), pad=True)
    if split is None:
        raise InputError(f"Cannot share a {type(batch).__name__} between actors")
    pairs = zip(methods, split.parts, strict=True)
    return MetaFuture([method.remote(part) for method, part in pairs], split.padding)


@dataclass(frozen=True, slots=True)
class MetaFuture:
    """What a non-blocking call will return: metadata, or a batch of verl's.

    Attributes:
        refs: one Ray reference per collected rank.
        padding: rows at the end that are cut off.
    """

    refs: Sequence[Any]
    padding: int = 0

    def get(self, timeout: float | None = None) -> Any:
        """Wait for all ranks, at most ``timeout`` seconds, and concatenate.

        Raises:
            ray.exceptions.GetTimeoutError: the ranks did not answer in time.
        """
        import ray

        output = concat_outputs(ray.get(list(self.refs), timeout=timeout))
        return output[: len(output) - self.padding] if self.padding else output


def concat_metas(metas: Sequence[BatchMeta]) -> BatchMeta:
    """Batches of several ranks as one. ``extra_info["metrics"]`` of all ranks are kept: a list of
    values per metric, as ``DataProto.concat`` makes it.

    Raises:
        InputError: fields differ, or ``extra_info`` has two values for another name.
    """
    from verl.utils import py_functional

    untyped: Any = py_functional
    metrics: list[Mapping[str, Any]] = []
    plain: list[BatchMeta] = []
    for meta in metas:
        copied = meta.copy()
        mine = copied.extra_info.pop("metrics", None)
        metrics += mine if isinstance(mine, list) else [] if mine is None else [mine]
        plain.append(copied)
    joined = BatchMeta.concat(plain)
    if metrics:
        joined.extra_info["metrics"] = untyped.list_of_dict_to_dict_of_list(metrics)
    return joined


def concat_outputs(outputs: Sequence[Any]) -> Any:
    """What the collected ranks returned, as one: metadata, verl's batches, or the plain list."""
    from verl import protocol

    untyped: Any = protocol
    if all(isinstance(output, BatchMeta) for output in outputs):
        return concat_metas(outputs)
    if all(isinstance(output, KVBatchMeta) for output in outputs):
        return KVBatchMeta.concat(outputs)
    batches = untyped.BatchData(outputs)
    return batches.concat() if batches.is_concatable() else list(outputs)


def _dispatch(
    mesh: str, pad: bool, group: Any, *args: Any, **kwargs: Any
) -> tuple[tuple[list[Any], ...], dict[str, list[Any]]]:
    dp_ranks = _mesh_info(group, mesh, "dispatch")
    collects = _mesh_info(group, mesh, "collect")

    padding: list[int] = []

    def spread(value: Any) -> list[Any]:
        split = _split(value, max(dp_ranks) + 1, pad)
        if split is None:
            return [value] * len(dp_ranks)
        padding.append(split.padding)
        return [
            _for_rank(split.parts[dp_rank], collect)
            for dp_rank, collect in zip(dp_ranks, collects, strict=True)
        ]

    spread_args = tuple(spread(arg) for arg in args)
    spread_kwargs = {name: spread(arg) for name, arg in kwargs.items()}
    if any(padding):
        # verl cuts so many rows off what the ranks return.
        spread_kwargs[_padding_key()] = max(padding)  # pyright: ignore[reportArgumentType]
    return spread_args, spread_kwargs


def _collect(mesh: str, group: Any, outputs: Sequence[Any]) -> Any:
    import ray

    collects = _mesh_info(group, mesh, "collect")
    wanted = [output for output, collect in zip(outputs, collects, strict=True) if collect]
    if any(isinstance(output, ray.ObjectRef) for output in wanted):
        return MetaFuture(wanted)
    return concat_outputs(wanted)


@dataclass(frozen=True, slots=True)
class _Split:
    """A batch in equal parts.

    Attributes:
        parts: one per data-parallel rank.
        padding: rows that were added to verl's own batch. Metadata knows its own.
    """

    parts: Sequence[Any]
    padding: int


def _split(value: Any, chunks: int, pad: bool) -> _Split | None:
    """None for what is no batch."""
    from verl import protocol

    untyped: Any = protocol
    if isinstance(value, MetaFuture):
        value = value.get()
    if isinstance(value, untyped.DataProto) and pad:
        padded, added = untyped.pad_dataproto_to_divisor(value, chunks)
        return _Split(padded.chunk(chunks=chunks), added)
    if not isinstance(value, BatchMeta | KVBatchMeta):
        batch = untyped.BatchData(value)
        return _Split(batch.chunk(chunks=chunks), 0) if batch.is_chunkable() else None
    if value.size % chunks:
        settings = untyped.DataProtoConfig
        asked = value.extra_info.get(settings.auto_padding_key, False)
        may_pad = pad or settings.auto_padding or asked
        if not may_pad or isinstance(value, KVBatchMeta):
            raise InputError(
                f"{value.size} samples cannot be shared evenly by {chunks} ranks. Take a multiple "
                f"of {chunks}, or use a BatchMeta with meta_dispatch(..., pad=True)."
            )
        value = value.padded(chunks)
    return _Split(value.chunk(chunks), 0)


def _for_rank(part: Any, collect: bool) -> Any:
    if collect or not isinstance(part, BatchMeta):
        return part
    copied = part.copy()
    copied.read_only = True
    return copied


def _padding_key() -> str:
    from verl import protocol

    untyped: Any = protocol
    return untyped._padding_size_key


def _mesh_info(group: Any, mesh: str, kind: str) -> list[Any]:
    """verl's answer per rank, kept in the worker group as verl itself does: the data-parallel
    rank (``dispatch``) or whether its output is collected (``collect``)."""
    known = getattr(group, f"_{kind}_info")
    if mesh not in known:
        known[mesh] = getattr(group, f"_query_{kind}_info")(mesh)
    return known[mesh]
