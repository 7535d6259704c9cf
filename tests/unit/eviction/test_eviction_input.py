"""What `EvictionConfig` and `make_policy` refuse, each with the flag or the policy's name, and the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.config import EngineConfig
from minisgl.eviction import POLICIES, EvictionConfig, make_policy


class Fine:
    def score(self, entry, now):
        return entry.num_tokens


class NeedsAnArgument:
    def __init__(self, weight):
        self.weight = weight

    def score(self, entry, now):
        return self.weight


class NoScore:
    pass


class GhostIsNoFunction(Fine):
    on_ghost_hit = 3


@pytest.mark.parametrize("name", POLICIES)
def test_every_named_policy_is_made(name: str):
    assert make_policy(EvictionConfig(policy=name)).name == name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": "mru"}, "--cache-eviction-policy 'mru' is unknown: use one of lru, lfu"),
        ({"policy": Fine}, "eviction_policy="),
        ({"policy": "no_such_module:Policy"}, "importing 'no_such_module' failed"),
        ({"policy": "minisgl.eviction:NoSuchPolicy"}, "has no 'NoSuchPolicy'"),
        ({"policy": "minisgl.eviction:SCORES"}, "has no score"),
        ({"experts": ()}, "--adaptive-experts is empty: use some of"),
        ({"experts": " , "}, "--adaptive-experts is empty"),
        ({"experts": ("lru", "lfu", "lru")}, "--adaptive-experts lru,lfu,lru repeats"),
        ({"experts": "lru,adaptive"}, "can't hold adaptive itself"),
        ({"experts": "lru,mru"}, "--adaptive-experts 'mru' is unknown"),
        ({"k": 0}, "--eviction-k 0"),
        ({"k": 1.5}, "--eviction-k 1.5"),
        ({"k": True}, "--eviction-k True"),
        ({"half_life": 0}, "--eviction-half-life 0"),
        ({"half_life": -1.0}, "--eviction-half-life -1.0"),
        ({"half_life": float("nan")}, "--eviction-half-life nan"),
        ({"half_life": float("inf")}, "--eviction-half-life inf"),
        ({"learning_rate": 0.0}, "--adaptive-learning-rate 0.0"),
        ({"seed": -1}, "--adaptive-seed -1"),
        ({"ghost_capacity": -1}, "--eviction-ghost-capacity -1"),
        ({"policy": "adaptive", "ghost_capacity": 0}, "leaves adaptive nothing to learn from"),
    ],
)
def test_bad_configurations_are_refused_with_the_remedy(options: dict, words: str):
    with pytest.raises(ValueError, match=words):
        make_policy(EvictionConfig(**options))


@pytest.mark.parametrize(
    ("custom", "words"),
    [
        (NoScore, "NoScore has no score"),
        (NoScore(), "NoScore has no score"),
        (NeedsAnArgument, "NeedsAnArgument: creating it raised TypeError"),
        (GhostIsNoFunction, "GhostIsNoFunction: on_ghost_hit must be a function"),
        ("a.module:Class", "pass it as cache_eviction_policy"),
        (7, "int has no score"),
    ],
)
def test_bad_policies_of_the_users_own_are_refused_by_name(custom: Any, words: str):
    with pytest.raises(ValueError, match=words):
        make_policy(custom=custom)


def test_a_module_that_raises_when_imported_is_named(tmp_path, monkeypatch):
    (tmp_path / "policy_that_raises.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="'policy_that_raises' raised ZeroDivisionError"):
        make_policy(EvictionConfig(policy="policy_that_raises:Policy"))


@pytest.mark.parametrize("custom", [Fine, Fine(), NeedsAnArgument(2)])
def test_objects_and_classes_are_taken(custom: Any):
    name = custom.__name__ if isinstance(custom, type) else type(custom).__name__
    assert make_policy(custom=custom).name == name


def test_an_import_path_is_taken(tmp_path, monkeypatch):
    source = "class Policy:\n    def score(self, entry, now):\n        return entry.depth\n"
    (tmp_path / "policy_of_a_user.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert make_policy(EvictionConfig(policy="policy_of_a_user:Policy")).name == "Policy"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"adaptive_experts": "lru,lru"}, "repeats"),
        ({"adaptive_experts": ""}, "empty"),
        ({"eviction_k": 0}, "--eviction-k"),
        ({"eviction_half_life": 0}, "--eviction-half-life"),
    ],
)
def test_the_engines_options_are_checked_the_same_way(options: dict, words: str):
    with pytest.raises(ValueError, match=words):
        EngineConfig.from_kwargs(model="m", **options)
