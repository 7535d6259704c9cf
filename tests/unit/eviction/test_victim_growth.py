"""Choosing a victim takes O(log n) amortised: counted in comparisons and calls, which no busy machine disturbs."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from minisgl.eviction import SCORES, Entry, EvictionPolicy, Recorder, Scorer, make_policy
from minisgl.kvcache.victims import Victims

SIZES = (1_000, 32_000)
CHOICES = 300


class Counted(float):
    """A score that counts how often it is compared with another."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return float.__eq__(self, other)  # type: ignore[arg-type]

    __hash__ = float.__hash__


class Things:
    """Numbered things under one policy; each step one is used, one is added, one is evicted, so their number stays."""

    def __init__(self, policy: EvictionPolicy, count: int) -> None:
        self.recorder, self.rng = policy.recorder, random.Random(0)
        self.histories: dict[int, Any] = {}
        self.described = 0
        self.victims = Victims(policy, self.describe)
        self.now = 0.0
        for _ in range(count):
            self.add()

    def describe(self, thing: int) -> Entry:
        self.described += 1
        return Entry(self.histories[thing], 1.0 + thing % 7, 1)

    def add(self) -> None:
        self.now += 1.0
        thing = len(self.histories)
        self.histories[thing] = self.recorder.first(self.now)
        self.victims.put(thing)

    def step(self) -> None:
        self.add()
        used = self.rng.randrange(len(self.histories))
        if self.histories[used] is not None:
            self.histories[used] = self.recorder.again(self.histories[used], self.now)
            self.victims.put(used)
        victim = self.victims.select(self.now)
        assert victim is not None
        self.victims.discard(victim.candidate)
        self.histories[victim.candidate] = None


def counted_policy(names: tuple[str, ...]) -> EvictionPolicy:
    def scorer(name: str) -> Scorer:
        return Scorer(name, lambda entry, now: Counted(SCORES[name](entry, now)))

    return EvictionPolicy("counted", tuple(map(scorer, names)), Recorder(), 16, 0.05)


@pytest.mark.parametrize("names", [(name,) for name in SCORES] + [("lru", "lfu", "cost-aware")], ids="+".join)
def test_comparisons_grow_like_the_logarithm(names: tuple[str, ...]):
    costs = []
    for size in SIZES:
        things = Things(counted_policy(names), size)
        things.step()  # scores them all, once
        Counted.compared, things.described = 0, 0
        for _ in range(CHOICES):
            things.step()
        costs.append(Counted.compared / CHOICES / len(names))
        assert things.described <= 2 * CHOICES, "only what changed is described again"
    for size, cost in zip(SIZES, costs):
        assert cost < 8 * math.log2(size), f"{cost} comparisons a choice among {size}"


def test_a_users_policy_is_asked_a_bounded_number_of_times():
    class Policy:
        calls = 0

        def score(self, entry: Entry, now: float) -> float:
            Policy.calls += 1
            return entry.last_use - now

    for size in SIZES:
        things = Things(make_policy(custom=Policy()), size)
        things.step()
        Policy.calls = 0
        for _ in range(CHOICES):
            things.step()
        assert Policy.calls <= 20 * CHOICES


@pytest.mark.parametrize("policy", ["lru", "user"])
def test_many_changes_of_few_things_keep_heaps_small(policy: str):
    class Policy:
        def score(self, entry: Entry, now: float) -> float:
            return entry.last_use

    things = Things(make_policy(custom=Policy() if policy == "user" else None), 100)
    for _ in range(5_000):
        things.step()
    victims = things.victims
    rankings = [*victims._rankings, *([victims._fallback] if victims._fallback else [])]
    assert all(len(ranking._heap) <= 2 * 100 + 70 for ranking in rankings)
