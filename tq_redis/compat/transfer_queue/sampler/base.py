"""The base of all samplers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

Choice = tuple[list[int], list[int]]


class BaseSampler(ABC):
    """Chooses among samples that are ready. Subclass it for a rule of your own, and give an object
    or the class to ``init`` as ``controller.sampler``.

    One object serves all processes: it lives in a Ray actor of the queue, and may remember what it
    chose. A built-in sampler is only a description; what it chooses is decided and remembered in
    Redis.
    """

    def __init__(self) -> None:
        # partition -> task -> dp_rank -> batch_index -> what was chosen
        self._states: dict[Any, Any] = {}

    @abstractmethod
    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> Choice:
        """Choose.

        Args:
            ready_indexes: samples that are ready and that the task has not had, ascending.
            batch_size: as given to ``get_meta``.
            kwargs: ``sampling_config``, and ``partition``, whose ``get_custom_meta(indexes)`` gives
                index -> tags of these samples.

        Returns:
            The samples of the batch, and those that the task is not to get again. Two empty lists:
            not enough is ready.
        """

    def __call__(self, *args: Any, **kwargs: Any) -> Choice:
        return self.sample(*args, **kwargs)

    def has_cached_result(
        self,
        partition_id: str,
        task_name: str,
        sampling_config: Mapping[str, Any] | None = None,
    ) -> bool:
        """Whether the batch that ``sampling_config`` names was chosen before."""
        config = sampling_config or {}
        found = self._states.get(partition_id, {}).get(task_name, {}).get(config.get("dp_rank"), {})
        return config.get("dp_rank") is not None and config.get("batch_index") in found

    def clear_cache(self, partition_id: str) -> None:
        """Forget what was chosen in a partition."""
        self._states.pop(partition_id, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """What :meth:`load_checkpoint` restores."""
        return {"_states": self._states}

    def load_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that :meth:`save_checkpoint` gave."""
        self._states = state["_states"]

    def _remembered(self, partition: str, task: str, rank: Any) -> dict[Any, Any]:
        return self._states.setdefault(partition, {}).setdefault(task, {}).setdefault(rank, {})


def consecutive_groups(ready: Sequence[int], size: int, count: int) -> list[list[int]]:
    """The first ``count`` groups of ``size`` samples whose ids follow each other; all that there
    are if there are fewer."""
    groups: list[list[int]] = []
    run: list[int] = []
    for sample in sorted(ready):
        if len(groups) == count:
            break
        if run and sample != run[-1] + 1:
            run = []
        run.append(sample)
        if len(run) == size:
            groups.append(run)
            run = []
    return groups
