"""Several servers share the partitions of a namespace."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tq_redis as tq
from tests.control.build import soon, write
from tests.servers import topologies
from tests.servers.conftest import OpenPlane, settings, unexpected_keys
from tests.servers.scenario import clear, use_everything
from tests.servers.topologies import Server
from tq_redis.config import RedisConfig
from tq_redis.control.keys import Keys
from tq_redis.control.plane import ControlPlane
from tq_redis.control.shards import Shards
from tq_redis.deadline import Deadline
from tq_redis.errors import ConfigError, ServerUnavailableError

pytestmark = pytest.mark.asyncio

NAMES = [f"train_{number}" for number in range(24)]


@pytest.fixture(scope="module")
def three(binary: str | None) -> Iterator[list[Server]]:
    """Of one password. What a test leaves there must have a lifetime."""
    with topologies.servers(binary, 3, {}) as started:
        for server in started:
            server.admin.config_set("requirepass", "pw")  # this connection stays in
        yield started
        assert [key for server in started for key in unexpected_keys(server.admin)] == []


def urls(servers: list[Server], user: str = ":pw@") -> list[str]:
    return [f"redis://{user}127.0.0.1:{server.port}/0" for server in servers]


def place(shards: Shards, name: str) -> str:
    return shards.shard_of(Keys("n").summary(name)).address.server


# Which shard


def hosts(count: int) -> list[str]:
    return [f"redis://host{number}:6379/0" for number in range(count)]


async def test_a_partition_has_one_place_whatever_the_order_of_the_list() -> None:
    places = {name: place(Shards(RedisConfig(url=tuple(hosts(5)))), name) for name in NAMES}
    turned = tuple(url.replace("//", "//u:p@") for url in reversed(hosts(5)))
    assert {name: place(Shards(RedisConfig(url=turned)), name) for name in NAMES} == places


async def test_this_very_place_for_good() -> None:
    """In every process: another rule would look for partitions where they are not."""
    shards = Shards(RedisConfig(url=tuple(hosts(3))))
    found = [place(shards, f"train_{n}").removeprefix("redis://host")[0] for n in range(8)]
    assert "".join(found) == "01101020"


async def test_partitions_are_spread_evenly() -> None:
    shards = Shards(RedisConfig(url=tuple(hosts(4))))
    spread = Counter(place(shards, f"p{number}") for number in range(4000))
    assert min(spread.values()) > 900


@given(st.integers(2, 6), st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
async def test_a_new_shard_moves_partitions_only_to_itself(count: int, name: str) -> None:
    before = place(Shards(RedisConfig(url=tuple(hosts(count)))), name)
    after = place(Shards(RedisConfig(url=tuple(hosts(count + 1)))), name)
    assert after in (before, f"redis://host{count}:6379/0")


@pytest.mark.parametrize("name", ["{a}", "a}b{", "a:b", "{", "}"])
async def test_all_keys_of_a_partition_have_one_shard(name: str) -> None:
    shards, keys = Shards(RedisConfig(url=tuple(hosts(5)))), Keys("n")
    made = [keys.summary(name), keys.events(name), keys.trash(name, "1"), keys.blocks(name)]
    assert len({shards.shard_of(key) for key in made}) == 1


# Calls


async def test_every_verb_on_shards(three: list[Server], open_plane: OpenPlane) -> None:
    plane = open_plane(*urls(three))
    await plane.connection.check_server(soon(), namespace=plane.keys.namespace)
    seen = {name: await use_everything(plane, name) for name in NAMES}
    samples = {(place_of(plane, name), i) for name, ids in seen.items() for i in ids}
    assert len(samples) == 8 * len(NAMES), "an id was given out twice in a shard"
    assert len({place_of(plane, name) for name in NAMES}) == 3


def place_of(plane: ControlPlane, name: str) -> str:
    return plane.connection.shard_of(plane.keys.summary(name)).url


async def test_listing_asks_all_and_names_the_one_that_is_gone(
    three: list[Server], open_plane: OpenPlane
) -> None:
    plane = open_plane(*urls(three))
    for name in NAMES:
        await plane.produce(name, write(1, ["x"]), soon())
    assert await plane.partitions(soon()) == sorted(NAMES)
    three[1].freeze()
    try:
        gone = urls(three)[1].replace("pw", "***")
        with pytest.raises(ServerUnavailableError, match=gone.replace("*", r"\*")):
            await plane.partitions(Deadline(0.5))
        # The others go on.
        near = next(name for name in NAMES if place_of(plane, name) != gone)
        await plane.produce(near, write(1, ["x"]), soon())
    finally:
        three[1].thaw()
    await clear(plane, *NAMES)


# The list in Redis


async def test_a_client_on_shards(three: list[Server], namespace: str, closed_client: None) -> None:
    await asyncio.to_thread(tq.init, settings(urls(three), namespace))
    client = tq.get_client()
    metas = [
        await client.async_put({"x": torch.tensor([float(n)])}, partition_id=name)
        for n, name in enumerate(NAMES)
    ]
    assert await client.async_get_partition_list() == sorted(NAMES)
    values = [(await client.async_get_columns(meta))["x"].item() for meta in metas]
    assert values == list(range(len(NAMES)))
    for server in three:
        key = f"tq:{namespace}:shards"
        assert "pw" not in str(server.admin.get(key))
        assert server.admin.ttl(key) > 7 * 24 * 3600
        assert server.admin.smembers(f"tq:{namespace}:partitions")
    assert sum(server.admin.exists(f"tq:{namespace}:owner") for server in three) == 1
    await asyncio.to_thread(tq.close)
    assert [key for server in three for key in unexpected_keys(server.admin)] == []


@pytest.fixture
def running(three: list[Server], namespace: str, closed_client: None) -> tq.Client:
    tq.init(settings(urls(three), namespace))
    return tq.get_client()


async def test_one_address_is_enough(
    three: list[Server], running: tq.Client, open_plane: OpenPlane
) -> None:
    for name in NAMES:
        await running.async_put({"x": torch.zeros(1)}, partition_id=name)
    for url in (*urls(three), urls(three)[0].replace("127.0.0.1", "localhost")):
        plane = open_plane(url)
        assert isinstance(plane.connection, Shards)
        assert await plane.connection.learn(plane.keys, soon())
        assert await plane.partitions(soon()) == sorted(NAMES)
        assert (await plane.summary(NAMES[0], soon()))["samples"] == 1


async def test_other_servers_are_refused_and_both_are_named(
    three: list[Server], running: tq.Client, open_plane: OpenPlane
) -> None:
    plane = open_plane(*urls(three[:2]))
    assert isinstance(plane.connection, Shards)
    with pytest.raises(ConfigError) as caught:
        await plane.connection.learn(plane.keys, soon())
    message = str(caught.value)
    for url in urls(three, user=""):
        assert url in message, "the stored servers"
    assert " ".join(urls(three[:2], ":***@")) in message, "those that were given"
    assert "pw" not in message


async def test_an_owner_with_other_servers_is_refused_and_leaves_nothing(
    three: list[Server], namespace: str, closed_client: None
) -> None:
    keys = Keys(namespace)
    first = Shards(RedisConfig(url=tuple(urls(three[1:]))))
    await first.publish(keys, 100, soon())
    with pytest.raises(ConfigError, match="has its partitions on"):
        await asyncio.to_thread(tq.init, settings(urls(three[:2]), namespace))
    assert not three[0].admin.keys(f"tq:{namespace}:*")
    await first.withdraw(keys, soon())
    await first.close()


async def test_of_two_lists_at_once_one_stands(three: list[Server], namespace: str) -> None:
    keys = Keys(namespace)
    some = Shards(RedisConfig(url=tuple(urls(three[1:]))))
    others = Shards(RedisConfig(url=tuple(urls(three[:2]))))
    await some.publish(keys, 100, soon())
    with pytest.raises(ConfigError, match="has its partitions on"):
        await others.publish(keys, 100, soon())
    assert not three[0].admin.exists(keys.shards)
    await some.publish(keys, 100, soon())  # its own list stands
    await some.withdraw(keys, soon())
    await some.close()
    await others.close()


async def test_one_server_under_two_names_is_refused(
    three: list[Server], namespace: str, closed_client: None
) -> None:
    url = urls(three)[0]
    same = [url, url.replace("127.0.0.1", "localhost")]
    with pytest.raises(ConfigError, match="same server"):
        await asyncio.to_thread(tq.init, settings(same, namespace))
    assert not three[0].admin.exists(f"tq:{namespace}:shards", f"tq:{namespace}:owner")
    with pytest.raises(ConfigError, match="twice"):
        Shards(RedisConfig(url=(url, url.replace(":pw@", ""))))


async def test_the_list_comes_back_when_a_server_lost_it(
    three: list[Server], namespace: str
) -> None:
    keys = Keys(namespace)
    shards = Shards(RedisConfig(url=tuple(urls(three))))
    await shards.publish(keys, 100, soon())
    three[2].admin.delete(keys.shards)
    three[1].admin.expire(keys.shards, 5)
    await shards.publish(keys, 100, soon())
    assert all(server.admin.ttl(keys.shards) > 90 for server in three)
    await shards.withdraw(keys, soon())
    await shards.close()


async def test_the_environment_names_several(
    three: list[Server], namespace: str, monkeypatch: pytest.MonkeyPatch, closed_client: None
) -> None:
    monkeypatch.setenv("TQ_REDIS_URL", " ".join(urls(three)))
    monkeypatch.setenv("TQ_REDIS_NAMESPACE", namespace)
    config = await asyncio.to_thread(tq.init, {"data": {"backend": "memory"}})
    assert config.redis.urls == tuple(urls(three))
    await tq.get_client().async_put({"x": torch.zeros(1)}, partition_id="p")
