"""Finished trajectories of a run of verl that died, given to the run that goes on.

verl (0.9.1, synchronous) goes on from its own checkpoint and feeds the prompts of the step that was
interrupted once more, under new random uids. It trains on whatever group of the partition is marked
finished, whoever made it. So nothing of the dead run may stay marked, and its trajectories wait,
invisible to verl, for their prompts to come again: then they get the names that verl looks for, and
their sessions are not generated.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tensordict import NonTensorStack

from tq_redis import session as strict
from tq_redis.compat.transfer_queue.kv import kv_batch_get, kv_batch_put, kv_clear, kv_list
from tq_redis.errors import DataLostError, NotFoundError, NotInitializedError, NotReadyError

_log = logging.getLogger(__name__)

_stack: Any = NonTensorStack  # typed in part

PARTITION = "train"

# What names a prompt of verl's data set from run to run.
IDENTITY = ("raw_prompt", "index")

# How verl names trajectories: prompt, session, output.
_KEY = re.compile(r"([^_]+)_(\d+)_(\d+)")

_Place = tuple[str, int]


class KeptTrajectories:
    """What a run that died has left of one step.

    Made before the new run puts anything: it drops all partitions but the one for training, and in
    that one all but finished trajectories.
    """

    def __init__(self) -> None:
        _drop_other_partitions()
        tags: Mapping[str, Mapping[str, Any]] = kv_list(PARTITION).get(PARTITION, {})
        whole = not _was_lost()
        self._tags = {key: tag for key, tag in tags.items() if whole and _is_finished(key, tag)}
        self._waiting: dict[_Place, list[list[str]]] | None = None
        _clear([key for key in tags if key not in self._tags])

    @property
    def size(self) -> int:
        """Trajectories that still wait for their prompts."""
        return len(self._tags)

    def give(
        self,
        step: int,
        uids: Sequence[str],
        identities: Sequence[str | None],
        sessions: Sequence[int],
    ) -> list[list[int]]:
        """Put the trajectories of these prompts under their new uids. Those of other steps are
        dropped: other weights made them.

        Args:
            step: that the prompts are trained in.
            uids: of the prompts, as verl names them now.
            identities: of the prompts, from :func:`identity`.
            sessions: how many each prompt has.

        Returns:
            For each prompt the sessions that need not be generated.
        """
        self._drop_other_steps(step)
        if not self._tags:
            return [[] for _ in uids]
        if self._waiting is None:
            self._waiting = self._by_place()
        given = [
            [number for number in range(count) if name and self._give_one(name, number, uid)]
            for uid, name, count in zip(uids, identities, sessions, strict=True)
        ]
        count = sum(map(len, given))
        # A warning, since verl shows nothing less of other packages.
        _log.warning("Step %d goes on with %d finished sessions of the run before", step, count)
        return given

    def _drop_other_steps(self, step: int) -> None:
        others = [key for key, tag in self._tags.items() if tag.get("global_steps") != step]
        if others:
            _log.warning("Dropping %d trajectories that are not of step %d", len(others), step)
            self._forget(others)

    def _by_place(self) -> dict[_Place, list[list[str]]]:
        """(prompt, session) -> its trajectories, for each time that the step has the prompt; those
        that cannot be read are dropped."""
        found: dict[_Place, list[list[str]]] = {}
        for (_, number), keys in _sessions(self._tags).items():
            columns = _read(keys, IDENTITY)
            name = None
            if columns is not None and set(IDENTITY) <= set(columns.keys()):
                name = identity(*(next(iter(columns[field])) for field in IDENTITY))
            if name is None:
                self._forget(keys)
            else:
                found.setdefault((name, number), []).append(keys)
        return found

    def _give_one(self, name: str, session: int, uid: str) -> bool:
        """Whether the prompt now has this session's trajectories."""
        assert self._waiting is not None
        waiting = self._waiting.get((name, session))
        if not waiting:
            return False
        keys = waiting.pop()
        columns = _read(keys)
        if columns is not None:
            columns["uid"] = _stack(*[uid] * len(keys))
            renamed = [f"{uid}_{key.split('_', 1)[1]}" for key in keys]
            kv_batch_put(renamed, PARTITION, columns, [self._tags[key] for key in keys])
        self._forget(keys)
        return columns is not None

    def _forget(self, keys: Sequence[str]) -> None:
        _clear(keys)
        for key in keys:
            del self._tags[key]


def identity(raw_prompt: Any, index: Any) -> str | None:
    """What a prompt is called in every run; None if it is not plain (images in it, say), so that
    nothing tells whether two are the same."""
    try:
        return json.dumps([raw_prompt, index], sort_keys=True, default=_plain)
    except TypeError:
        return None


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy and torch as JSON has them."""
    if not hasattr(value, "tolist"):
        raise TypeError
    return value.tolist()


def _is_finished(key: str, tag: Mapping[str, Any]) -> bool:
    finished = tag.get("status") == "success" and not tag.get("is_padding", False)
    return finished and _KEY.fullmatch(key) is not None


def _sessions(keys: Iterable[str]) -> dict[_Place, list[str]]:
    """(uid, session) -> keys."""
    found: dict[_Place, list[str]] = {}
    for key in keys:
        uid, number, _ = key.split("_")
        found.setdefault((uid, int(number)), []).append(key)
    return found


def _read(keys: Sequence[str], fields: Sequence[str] | None = None) -> Any:
    """A TensorDict; None if bytes are gone, or in a Ray cluster that is not this one."""
    try:
        return kv_batch_get(keys, PARTITION, fields)
    except (DataLostError, NotFoundError, NotReadyError, NotInitializedError) as error:
        _log.warning("Trajectories %s of the run before are lost: %s", keys, error)
        return None


def _clear(keys: Sequence[str]) -> None:
    if keys:
        kv_clear(keys, PARTITION)


def _was_lost() -> bool:
    """Whether somebody met lost bytes in the partition: nothing tells any more whose they were."""
    try:
        return bool(strict.get_client().get_summary(PARTITION).get("lost", 0))
    except NotFoundError:
        return False


def _drop_other_partitions() -> None:
    client = strict.get_client()
    for name in client.get_partition_list():
        if name != PARTITION:
            client.clear_partition(name)
