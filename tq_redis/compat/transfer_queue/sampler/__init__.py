"""Which of the samples that are ready a ``get_meta`` takes."""

from __future__ import annotations

from typing import Any

from tq_redis.compat.transfer_queue.errors import SamplerNotFoundError
from tq_redis.compat.transfer_queue.sampler.base import BaseSampler
from tq_redis.compat.transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler
from tq_redis.compat.transfer_queue.sampler.rank_aware_sampler import RankAwareSampler
from tq_redis.compat.transfer_queue.sampler.seqlen_balanced_sampler import SeqlenBalancedSampler
from tq_redis.compat.transfer_queue.sampler.sequential_sampler import SequentialSampler
from tq_redis.errors import nearest

__all__ = [
    "BaseSampler",
    "GRPOGroupNSampler",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
]

_BUILT_IN: dict[str, type[BaseSampler]] = {
    kind.__name__: kind
    for kind in (SequentialSampler, GRPOGroupNSampler, RankAwareSampler, SeqlenBalancedSampler)
}


def sampler_from(setting: Any) -> BaseSampler:
    """The sampler that ``controller.sampler`` means: a name, a class or an object.

    Raises:
        SamplerNotFoundError: it is none of these.
    """
    if isinstance(setting, BaseSampler):
        return setting
    kind = _BUILT_IN.get(setting) if isinstance(setting, str) else setting
    if isinstance(kind, type) and issubclass(kind, BaseSampler):
        return kind()
    raise SamplerNotFoundError(
        f"Could not find sampler {setting}. {nearest(str(setting), _BUILT_IN)} One of your own is "
        f"given as a class or an object."
    )


def is_built_in(sampler: BaseSampler) -> bool:
    """Whether its rule is known everywhere; one of the user's own is not."""
    return type(sampler) in _BUILT_IN.values()


def spec_of(sampler: BaseSampler) -> dict[str, Any]:
    """A built-in sampler as JSON; empty for one of the user's own."""
    if not is_built_in(sampler):
        return {}
    arguments = {name: value for name, value in vars(sampler).items() if not name.startswith("_")}
    return {"name": type(sampler).__name__, "arguments": arguments}


def from_spec(spec: dict[str, Any]) -> BaseSampler:
    """The built-in sampler of a :func:`spec_of`."""
    return _BUILT_IN[spec["name"]](**spec["arguments"])
