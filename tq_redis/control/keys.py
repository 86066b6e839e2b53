"""Every key that tq_redis keeps in Redis. No other module builds one.

All keys of a partition carry the hash tag ``{partition}``, so that a Redis Cluster keeps them in
one slot and a script may touch them together. The Lua verbs receive the summary key and derive
the rest by appending the suffixes below.

===================================== ========== =====================================================
key                                   type       holds
===================================== ========== =====================================================
``tq:<ns>:next_sample``               string     the last sample id given out; ids are never reused
``tq:<ns>:owner``                     string     JSON (host, pid): who runs the namespace; seconds
``tq:<ns>:partitions``                set        names of partitions
``tq:<ns>:{P}``                       hash       the summary a person reads first: ``samples``,
                                                 ``bytes``, ``produced:<field>``, ``consumed:<task>``,
                                                 ``generation``, ``created_at``
``tq:<ns>:{P}:samples``               sorted set sample ids of the partition
``tq:<ns>:{P}:field:<f>``             hash       sample id -> locator ``<block number>:<row>``;
                                                 presence is the production status
``tq:<ns>:{P}:schema``                hash       field -> JSON of its latest form
``tq:<ns>:{P}:blocks``                hash       block number -> JSON (handle, bytes, dtypes)
``tq:<ns>:{P}:live``                  hash       block number -> cells still in use; ``next``
``tq:<ns>:{P}:freed``                 set        handles whose bytes are to be freed
``tq:<ns>:{P}:tasks``                 hash       task -> JSON: the fields it reads, group size, how
                                                 far its index is built
``tq:<ns>:{P}:task:<t>``              hash       sample id -> consumer that took it
``tq:<ns>:{P}:ready:<t>``             sorted set ids that the task may claim (derived index)
``tq:<ns>:{P}:ready:<t>:count``       hash       group -> how many of its samples are ready
``tq:<ns>:{P}:ready:<t>:groups``      sorted set groups that are ready as a whole
``tq:<ns>:{P}:group``                 hash       sample id -> group
``tq:<ns>:{P}:members``               hash       group -> its sample ids, comma separated
``tq:<ns>:{P}:keys``                  hash       user key -> sample id
``tq:<ns>:{P}:key_of``                hash       sample id -> user key
``tq:<ns>:{P}:tag:<name>``            hash       sample id -> JSON value of that tag
``tq:<ns>:{P}:tagnames``              set        names of tags in use
``tq:<ns>:{P}:events``                stream     put, claim and clear events, capped; waiters block on it
``tq:<ns>:{P}:req:<request>``         string     reply of a recent call, for its replay; minutes
``tq:<ns>:{P}:trash``                 set        generations of the partition with blocks to free
``tq:<ns>:{P}:trash:<generation>``    hash       blocks of a cleared partition, until they are freed
===================================== ========== =====================================================

Every key of a partition expires ``idle_ttl_s`` after the partition was last written to or claimed
from, all in the same instant; ``next_sample`` and ``partitions`` likewise after the last put.

Names of partitions, fields, tasks and tags are percent-encoded wherever they stand in Redis, so
that ``{``, ``}``, ``:`` and spaces cannot change a key's meaning. Ordinary names stay readable.
"""

from __future__ import annotations

from urllib.parse import quote, unquote

_SAFE = "/@+=,!*()'"


def encode(name: str) -> str:
    """A name as it stands in Redis."""
    return quote(name, safe=_SAFE)


def decode(name: str) -> str:
    """The name that :func:`encode` was given."""
    return unquote(name)


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
        return f"{self._root}:{{{encode(partition)}}}"

    def events(self, partition: str) -> str:
        return f"{self.summary(partition)}:events"

    def tasks(self, partition: str) -> str:
        return f"{self.summary(partition)}:tasks"

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
