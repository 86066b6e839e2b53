"""Every key that tq_redis keeps in Redis. No other module builds one.

All keys of a partition carry the hash tag ``{partition}``, so that a Redis Cluster keeps them in
one slot and a script may touch them together. The Lua verbs receive the summary key and derive
the rest by appending the suffixes below. ``<i>`` names a ready index, one for each way in which a
task has asked for samples: ``<task>:<group size>:<field>|<field>|...``.

================================= ========== ======================================================
key                               type       holds
================================= ========== ======================================================
``tq:<ns>:next_sample``           string     the last sample id given out; ids are never reused
``tq:<ns>:owner``                 string     JSON (host, pid, ...): who runs the namespace; seconds
``tq:<ns>:partitions``            set        names of partitions
``tq:<ns>:{P}``                   hash       the summary that a person reads first: ``samples``,
                                             ``bytes``, ``produced:<field>``, ``consumed:<task>``,
                                             ``generation``, ``created_at``, ``expires_at``
``tq:<ns>:{P}:samples``           sorted set sample ids of the partition
``tq:<ns>:{P}:field:<f>``         hash       sample id -> locator ``<block number>:<row>``;
                                             presence is the production status
``tq:<ns>:{P}:schema``            hash       field -> JSON of its latest form
``tq:<ns>:{P}:blocks``            hash       block number -> JSON (handle, bytes, dtypes)
``tq:<ns>:{P}:live``              hash       block number -> cells still in use; ``next``
``tq:<ns>:{P}:freed``             sorted set handles whose bytes are to be freed, by second
``tq:<ns>:{P}:task:<t>``          hash       sample id -> consumer that took it
``tq:<ns>:{P}:indexes``           hash       ``<i>`` -> JSON: task, fields, group size, how far the
                                             index is built
``tq:<ns>:{P}:ready:<i>``         sorted set ids that the task may claim; in claims of groups
                                             ``<group>:<id>``
``tq:<ns>:{P}:ready:<i>:count``   hash       group -> how many of its samples are ready; ``:whole``
``tq:<ns>:{P}:ready:<i>:groups``  sorted set groups that have enough for a claim, by first ready id
``tq:<ns>:{P}:group``             hash       sample id -> group
``tq:<ns>:{P}:keys``              hash       user key -> sample id
``tq:<ns>:{P}:key_of``            hash       sample id -> user key
``tq:<ns>:{P}:tag:<name>``        hash       sample id -> JSON value of that tag
``tq:<ns>:{P}:tagnames``          set        names of tags in use
``tq:<ns>:{P}:events``            stream     put, claim and clear events, capped; waiters block here
``tq:<ns>:{P}:req:<request>``     string     reply of a recent call, for its replay; minutes
``tq:<ns>:{P}:trash``             set        generations of the partition with blocks to free
``tq:<ns>:{P}:trash:<g>``         hash       ``blocks`` of a cleared partition, until they are freed
``tq:<ns>:{P}:trash:<g>:freed``   sorted set ``freed`` of a cleared partition
================================= ========== ======================================================

Every key of a partition expires ``idle_ttl_s`` (or up to a sixteenth more) after the partition was
last written to or claimed from, all in the same instant, ``expires_at``. ``next_sample`` and
``partitions`` outlive every partition.

Names of partitions, fields, tasks, tags and groups are percent-encoded wherever they stand in a
key, so that ``{``, ``}``, ``:`` and spaces cannot change its meaning. Ordinary names stay readable.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote, unquote

from tq_redis.errors import InputError

_SAFE = "/@+=,!*()'"


def encode(name: str) -> str:
    """A name as it stands in Redis.

    Raises:
        InputError: it is not valid Unicode.
    """
    try:
        return quote(name, safe=_SAFE)
    except UnicodeEncodeError as error:
        raise InputError(f"The name {name!r} is not valid Unicode") from error


def decode(name: str) -> str:
    """The name that :func:`encode` was given."""
    return unquote(name)


def index_name(task: str, group_size: int, fields: Iterable[str]) -> str:
    """The ready index of a task that asks for these fields, in whatever order."""
    return f"{encode(task)}:{group_size}:{'|'.join(sorted(map(encode, fields)))}"


class Keys:
    """The keys of one namespace.

    Args:
        namespace: one per training run.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._root = f"tq:{namespace}"

    @property
    def owner(self) -> str:
        return f"{self._root}:owner"

    @property
    def next_sample(self) -> str:
        return f"{self._root}:next_sample"

    @property
    def partitions(self) -> str:
        return f"{self._root}:partitions"

    def summary(self, partition: str) -> str:
        """The key that the verbs work on.

        Raises:
            InputError: the name is empty, which a Redis Cluster takes for no hash tag.
        """
        if not partition:
            raise InputError("The name of a partition must not be empty")
        return f"{self._root}:{{{encode(partition)}}}"

    def events(self, partition: str) -> str:
        return f"{self.summary(partition)}:events"

    def schema(self, partition: str) -> str:
        return f"{self.summary(partition)}:schema"

    def blocks(self, partition: str) -> str:
        return f"{self.summary(partition)}:blocks"

    def freed(self, partition: str) -> str:
        return f"{self.summary(partition)}:freed"

    def trashes(self, partition: str) -> str:
        return f"{self.summary(partition)}:trash"

    def trash(self, partition: str, generation: str) -> str:
        return f"{self.summary(partition)}:trash:{generation}"

    def trash_freed(self, partition: str, generation: str) -> str:
        return f"{self.summary(partition)}:trash:{generation}:freed"
