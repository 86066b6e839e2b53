"""Settings: read from a mapping, Hydra's config or the environment; wrong ones are refused."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from tq_redis.config import Config, DataConfig, RedisConfig, load_config, namespace_asked_for
from tq_redis.errors import ConfigError


def test_defaults() -> None:
    config = load_config()
    assert config == Config()
    assert config.redis == RedisConfig(url=None, namespace="default")
    assert config.data.backend == "ray"


def test_a_partial_mapping_keeps_the_other_defaults() -> None:
    config = load_config({"redis": {"namespace": "run_7"}, "timeout_s": 5})
    assert config.redis.namespace == "run_7"
    assert config.redis.max_connections == RedisConfig().max_connections
    assert config.timeout_s == 5.0
    assert config.data == DataConfig()


def test_hydra_config_is_resolved() -> None:
    conf = OmegaConf.create({"seconds": 3, "queue": {"timeout_s": "${seconds}"}})
    assert load_config(conf.queue).timeout_s == 3.0
    assert load_config({"redis": OmegaConf.create({"namespace": "x"})}).redis.namespace == "x"


def test_a_plain_mapping_is_taken_word_by_word() -> None:
    # A password may look like an interpolation.
    url = "redis://:${secret}@host:6379/0"
    assert load_config({"redis": {"url": url}}).redis.url == url


def test_a_config_passes_through() -> None:
    config = Config(timeout_s=7.0)
    assert load_config(config) == config


def test_settings_do_not_change_after_the_start() -> None:
    with pytest.raises(AttributeError):
        load_config().timeout_s = 1.0  # type: ignore[misc]


def test_the_environment_stands_in_for_what_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_REDIS_URL", "redis://there:1/0")
    monkeypatch.setenv("TQ_REDIS_NAMESPACE", "from_outside")
    assert load_config().redis == RedisConfig(url="redis://there:1/0", namespace="from_outside")
    explicit = {"redis": {"url": "redis://here:2/0", "namespace": "mine"}}
    assert load_config(explicit).redis == RedisConfig(url="redis://here:2/0", namespace="mine")
    assert load_config(Config()).redis.url == "redis://there:1/0"
    assert namespace_asked_for(None) == "from_outside"
    assert namespace_asked_for(explicit) == "mine"


def test_several_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    several = ("redis://a:1", "redis+cluster://b:1,b:2")
    for conf in (
        {"redis": {"url": list(several)}},
        {"redis": {"url": " ".join(several)}},
        {"redis": {"url": OmegaConf.create(list(several))}},
        OmegaConf.create({"redis": {"url": list(several)}}),
    ):
        assert load_config(conf).redis.urls == several
    monkeypatch.setenv("TQ_REDIS_URL", " ".join(several))
    assert load_config().redis.url == several
    assert load_config({"redis": {"url": "redis://c"}}).redis.urls == ("redis://c",)
    assert Config().redis.urls == ()


@pytest.mark.parametrize("url", ["", " ", []])
def test_no_address_is_not_the_same_as_none(url: Any) -> None:
    with pytest.raises(ConfigError, match=r"redis\.url must not be empty"):
        load_config({"redis": {"url": url}})


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_REDIS_URL", "")
    monkeypatch.setenv("TQ_REDIS_NAMESPACE", "")
    assert load_config() == Config()


def test_a_bad_namespace_from_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_REDIS_NAMESPACE", "two words")
    with pytest.raises(ConfigError, match="'two words'"):
        load_config()


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"timeouts": 1}, r"timeouts.*'timeout_s'"),
        ({"redis": {"adress": "x", "url": "y"}}, r"redis\.adress"),
        ({"redis": {"name_space": "x"}}, r"redis\.name_space.*'namespace'"),
        ({"data": {"blockbytes": 1}}, r"data\.blockbytes.*'block_bytes'"),
        ({7: 1}, r"setting 7"),
    ],
)
def test_an_unknown_setting_is_named_with_the_nearest(conf: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(conf)


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"timeout_s": "soon"}, r"timeout_s"),
        ({"redis": "redis://host"}, r"redis"),
        ({"redis": None}, r"redis"),
        ({"redis": {"url": 6379}}, r"url"),
        ({"redis": {"max_connections": 1.5}}, r"max_connections"),
        ({"data": {"backend": "mooncake"}}, r"mooncake.*backend"),
        ({"data": {"pickle": "no"}}, r"pickle"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(conf: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(conf)


@pytest.mark.parametrize("value", [0, -1, float("nan")])
@pytest.mark.parametrize("name", ["timeout_s", "data.orphan_grace_s"])
def test_times_must_be_positive(name: str, value: float) -> None:
    conf = OmegaConf.from_dotlist([f"{name}={value}"])
    with pytest.raises(ConfigError, match=name):
        load_config(conf)


@pytest.mark.parametrize("name", ["idle_ttl_s", "redis.max_connections", "data.block_bytes"])
def test_counts_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be positive, got 0"):
        load_config(OmegaConf.from_dotlist([f"{name}=0"]))


def test_parsers_are_for_units_that_init_starts() -> None:
    parsers = {"load": "my_package.images:load"}
    conf = OmegaConf.create({"data": {"parsers": parsers, "units": 1}})
    assert load_config(conf).data.parsers == parsers
    with pytest.raises(ConfigError, match=r"data\.parsers.*data\.units is 0.*--parser"):
        load_config({"data": {"parsers": parsers}})


@pytest.mark.parametrize(
    ("placement", "units", "words"),
    [
        ({"strategy": "STRICT_SPREAD"}, 0, r"data\.placement .*data\.units is 0"),
        ({"strategy": "RANDOM"}, 1, r"RANDOM"),
        ({"strategi": "PACK"}, 1, r"data\.placement\.strategi.*'strategy'"),
        ({"resources": {"CPU": 1}}, 1, r"must not name CPU.*data\.placement\.cpus"),
        ({"cpus": 1.5}, 1, r"data\.placement\.cpus must be .*got 1\.5"),
        ({"cpus": -1}, 1, r"data\.placement\.cpus must be .*got -1"),
        ({"cpus": float("nan")}, 1, r"data\.placement\.cpus must be .*got nan"),
        ({"resources": {"storage": 1e-5}}, 1, r"data\.placement\.resources\.storage must be"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(
    placement: dict[str, Any], units: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config({"data": {"placement": placement, "units": units}})


@pytest.mark.parametrize("cpus", [0, 0.5, 1, 2])
def test_a_unit_reserves_part_of_a_cpu_or_whole_ones(cpus: float) -> None:
    conf = {"data": {"units": 1, "placement": {"cpus": cpus, "resources": {"memory": 1 << 30}}}}
    assert load_config(conf).data.placement.cpus == cpus


@pytest.mark.parametrize("namespace", ["", "a b", "a:b", "{a}", "a\n", "a\u00a0b"])
def test_a_namespace_is_one_word(namespace: str) -> None:
    with pytest.raises(ConfigError, match=r"redis\.namespace"):
        load_config({"redis": {"namespace": namespace}})


@pytest.mark.parametrize("conf", [["timeout_s"], "timeout_s=1", 5])
def test_only_a_mapping_will_do(conf: Any) -> None:
    with pytest.raises(ConfigError, match="must be a mapping"):
        load_config(conf)


@pytest.mark.parametrize("value", ["???", "${nowhere}"])
def test_a_hydra_value_that_is_missing_is_named(value: str) -> None:
    with pytest.raises(ConfigError, match=r"timeout_s|nowhere"):
        load_config(OmegaConf.create({"timeout_s": value}))


def test_a_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="Unknown setting"):
        load_config({"nothing": 1})
