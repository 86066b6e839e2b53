"""Every key that tq_redis keeps in Redis. No other module builds one.

All keys of a partition carry the hash tag ``{partition}``, so that a Redis Cluster keeps them in
one slot and a script may touch them together. The Lua verbs receive the summary key and derive
the rest by appending suffixes. ``<i>`` names a ready index, one for each way in which a
task has asked for samples: ``<task>:<group size>:<field>|<field>|...``.

Their kinds are listed in ``GLOSSARY``, from which docs/data-model.md is made.

Every key of a partition expires ``idle_ttl_s`` (or up to a sixteenth more) after the partition was
last written to or claimed from, all in the same instant, ``expires_at``. ``next_sample`` and
``partitions`` outlive every partition.

Names of partitions, fields, tasks, tags and groups are percent-encoded wherever they stand in a
key, so that ``{``, ``}``, ``:`` and spaces cannot change its meaning. Ordinary names stay readable.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, NamedTuple
from urllib.parse import quote, unquote

from tq_redis.errors import InputError

Type = Literal["string", "hash", "set", "zset", "stream", "any"]


class Key(NamedTuple):
    """A kind of key.

    Attributes:
        pattern: the key, with ``<ns>`` for the namespace, ``{P}`` for a partition (in real braces),
            ``<f>`` for a field, ``<t>`` for a task, ``<i>`` for a ready index, ``<name>`` for a
            tag, ``<g>`` for a generation of a partition, ``<request>`` for a call and ``<token>``
            for a load of a checkpoint.
        type: as Redis's TYPE says it; ``any``: that of another key.
        holds: what is in it; Markdown.
    """

    pattern: str
    type: Type
    holds: str


GLOSSARY = (
    Key("tq:<ns>:next_sample", "string", "the last sample id given out; ids are never reused"),
    Key("tq:<ns>:owner", "string", "JSON (host, pid, ...): who runs the namespace; seconds"),
    Key(
        "tq:<ns>:counted_by",
        "string",
        "the server, and which life of it, that gives out sample ids: another one leaves out those "
        "that it may have lost",
    ),
    Key(
        "tq:<ns>:shards",
        "string",
        "JSON: the servers that share the namespace, without passwords, and which of them this is",
    ),
    Key("tq:<ns>:partitions", "set", "names of partitions"),
    Key(
        "tq:<ns>:settings",
        "string",
        "JSON: the settings of the instance, without addresses, for processes outside its Ray job",
    ),
    Key("tq:<ns>:units", "set", "storage units"),
    Key(
        "tq:<ns>:unit:<id>",
        "string",
        "JSON (address, capacity, parsers): where a storage unit is reached, what it offers; it "
        "renews the key's lifetime while it runs",
    ),
    Key(
        "tq:<ns>:{P}",
        "hash",
        "the summary that a person reads first: `samples`, `bytes`, `produced:<field>`, "
        "`consumed:<task>`, `claimed:<task>` (held with a lease), `set_aside:<task>`, "
        "`evicted:<task>` (so far, by its limit), `limits` (JSON: by task, how many samples it may "
        "leave unconsumed, and what happens when there are as many), `made` "
        "(samples, cleared ones too), `expected`, `ended`, `claims` (so far), `lost` (cells, so "
        "far, whose store died), `changes` (of keys and tags, so far), `changes_from` (older ones "
        "are forgotten), `generation`, `created_at`, `expires_at`",
    ),
    Key("tq:<ns>:{P}:samples", "zset", "sample ids of the partition"),
    Key(
        "tq:<ns>:{P}:field:<f>",
        "hash",
        "sample id -> locator `<block number>@<id of row 0>`: the sample's row in the block is "
        "its id less that number; presence is the production status",
    ),
    Key("tq:<ns>:{P}:schema", "hash", "field -> JSON of its latest form"),
    Key(
        "tq:<ns>:{P}:blocks",
        "hash",
        "block number -> JSON (handle, bytes, dtypes; task: who wrote it, where that is known)",
    ),
    Key("tq:<ns>:{P}:live", "hash", "block number -> cells still in use; `next`"),
    Key("tq:<ns>:{P}:freed", "zset", "handles whose bytes are to be freed, by second"),
    Key(
        "tq:<ns>:{P}:task:<t>",
        "hash",
        "sample id -> `<state>:<claim number>:<consumer>`; the state is consumed, leased or aside",
    ),
    Key(
        "tq:<ns>:{P}:claims:<t>",
        "hash",
        "claim number -> JSON (ids, rows still held, lease in ms, consumer, ...) of claims "
        "with a lease",
    ),
    Key("tq:<ns>:{P}:leases:<t>", "zset", "claim numbers by the time their lease runs out, in ms"),
    Key(
        "tq:<ns>:{P}:deliveries:<t>",
        "hash",
        "sample id -> how often it was given out with a lease and not acknowledged",
    ),
    Key(
        "tq:<ns>:{P}:waiters",
        "hash",
        "a name -> JSON (task, consumer, how many samples, fields, since and until when in ms): "
        "consumers that wait for samples now",
    ),
    Key(
        "tq:<ns>:{P}:draws:<t>",
        "hash",
        "`<dp_rank>:<batch_index>` -> JSON (claims, whether it waits for its rank, ...): what "
        "every rank that asks for that batch gets",
    ),
    Key("tq:<ns>:{P}:drawn:<t>", "hash", "claim number -> JSON ids, for the claims of draws"),
    Key(
        "tq:<ns>:{P}:making:<t>",
        "hash",
        "a name -> JSON (by, claims per draw): large draws that are being made in pieces",
    ),
    Key(
        "tq:<ns>:{P}:indexes",
        "hash",
        "`<i>` -> JSON: task, fields, group size, how far the index is built",
    ),
    Key(
        "tq:<ns>:{P}:ready:<i>",
        "zset",
        "ids that the task may claim; in claims of groups `<group>:<id>`",
    ),
    Key(
        "tq:<ns>:{P}:ready:<i>:count",
        "hash",
        "group -> how many of its samples are ready; `:whole`",
    ),
    Key(
        "tq:<ns>:{P}:ready:<i>:groups",
        "zset",
        "groups that have enough for a claim, by first ready id",
    ),
    Key("tq:<ns>:{P}:group", "hash", "sample id -> group"),
    Key("tq:<ns>:{P}:keys", "hash", "user key -> sample id"),
    Key("tq:<ns>:{P}:key_of", "hash", "sample id -> user key"),
    Key(
        "tq:<ns>:{P}:changes",
        "zset",
        "user keys, also of cleared samples, by the number of their last change; the last 16,384",
    ),
    Key("tq:<ns>:{P}:tag:<name>", "hash", "sample id -> JSON value of that tag"),
    Key("tq:<ns>:{P}:tagnames", "set", "names of tags in use"),
    Key(
        "tq:<ns>:{P}:events",
        "stream",
        "what happened: put, claim, ack, clear, ...; capped; waiters block here",
    ),
    Key(
        "tq:<ns>:{P}:admitted",
        "hash",
        "a put -> `<rows>:<until, in ms>`: room that is kept for it, within all limits, until it "
        "has made its rows",
    ),
    Key(
        "tq:<ns>:{P}:evicted",
        "zset",
        "`<task>:<sample id>`, by id, of samples that made room because of a limit; the last 4,096",
    ),
    Key("tq:<ns>:{P}:req:<request>", "string", "reply of a recent call, for its replay; minutes"),
    Key("tq:<ns>:{P}:trash", "set", "generations of the partition with blocks to free"),
    Key("tq:<ns>:{P}:trash:<g>", "hash", "`blocks` of a cleared partition, until they are freed"),
    Key("tq:<ns>:{P}:trash:<g>:freed", "zset", "`freed` of a cleared partition"),
    Key(
        "tq:<ns>:{P}:frozen",
        "hash",
        "how a save holds the partition still: `level` (`all`: no verb writes; `keep`: none frees "
        "bytes; `none`), `by` (which save), `since` and `ends` in ms, `paused`: ms for which the "
        "clock of leases stood still before",
    ),
    Key("tq:<ns>:{P}:thaws", "stream", "its last change of level; who had to wait blocks here"),
    Key(
        "tq:<ns>:{P}:load:<token>:<key>",
        "any",
        "a key `tq:<ns>:{P}:<key>` of a checkpoint that is being loaded, until all are there; "
        "minutes",
    ),
    Key(
        "tq:<ns>:{P}:load:<token>",
        "string",
        "how many pages of such keys were written: a failover may lose the last ones; minutes",
    ),
    Key("tq:<ns>:{P}:loading", "set", "handles of the blocks that such keys name; minutes"),
)

_SAFE = "/@+=,!*()'"


@lru_cache(maxsize=4096)
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
    def shards(self) -> str:
        return f"{self._root}:shards"

    @property
    def next_sample(self) -> str:
        return f"{self._root}:next_sample"

    @property
    def counted_by(self) -> str:
        return f"{self._root}:counted_by"

    @property
    def partitions(self) -> str:
        return f"{self._root}:partitions"

    @property
    def settings(self) -> str:
        return f"{self._root}:settings"

    @property
    def units(self) -> str:
        return f"{self._root}:units"

    def unit(self, name: str) -> str:
        """The entry of a storage unit."""
        return f"{self._root}:unit:{name}"

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

    def waiters(self, partition: str) -> str:
        return f"{self.summary(partition)}:waiters"

    def evicted(self, partition: str) -> str:
        return f"{self.summary(partition)}:evicted"

    def indexes(self, partition: str) -> str:
        return f"{self.summary(partition)}:indexes"

    def ready(self, partition: str, index: str) -> str:
        """The index called ``index`` in :meth:`indexes`."""
        return f"{self.summary(partition)}:ready:{index}"

    def frozen(self, partition: str) -> str:
        return f"{self.summary(partition)}:frozen"

    def thaws(self, partition: str) -> str:
        return f"{self.summary(partition)}:thaws"

    def staged(self, partition: str, token: str, suffix: str) -> str:
        """A key of a partition that is being loaded; ``suffix`` as in its name in use."""
        return f"{self.summary(partition)}:load:{token}:{suffix}"

    def staged_pages(self, partition: str, token: str) -> str:
        """How many pages of :meth:`staged` keys were written."""
        return f"{self.summary(partition)}:load:{token}"

    def loading(self, partition: str) -> str:
        return f"{self.summary(partition)}:loading"

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
