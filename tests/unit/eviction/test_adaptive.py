"""The learner: ghosts, penalties, convergence. See `kvcache.adaptive`."""

from __future__ import annotations

import random

import pytest

from minisgl.eviction import Entry, EvictionConfig, Recorder, make_policy
from minisgl.kvcache import RadixPrefixCache
from minisgl.kvcache.adaptive import Ghost, GhostList, Learner
from tests.unit.eviction.evictions import Paper

HISTORY = Recorder().first(0.0)


def ghost(
    cost: float = 1.0, blame: tuple[int, ...] = (0,), probability: float = 0.5, num_pages: int = 1
) -> Ghost:
    return Ghost(Entry(HISTORY, cost, 1), blame, probability, num_pages, 0)


def test_the_ghost_list_is_bounded_and_forgets_the_oldest():
    ghosts = GhostList(3)
    for key in range(10):
        ghosts.put(key, ghost())
    assert len(ghosts) == 3
    assert [key in ghosts for key in range(10)] == [False] * 7 + [True] * 3
    ghosts.put(7, ghost())
    ghosts.put(10, ghost())
    assert 7 in ghosts, "evicted again: young again"
    assert 8 not in ghosts


def test_each_eviction_is_regretted_once_and_revived_once():
    ghosts = GhostList(3)
    ghosts.put("a", ghost())
    assert ghosts.regret("a") is not None
    assert ghosts.regret("a") is None
    assert ghosts.revive("a") is HISTORY
    assert ghosts.revive("a") is None
    assert ghosts.regret("b") is None


def test_the_list_stays_bounded_in_a_cache():
    config = EvictionConfig(policy="adaptive", ghost_capacity=5)
    cache = RadixPrefixCache(1, make_policy(config), clock=lambda: 0.0)
    for token in range(50):
        cache.insert([token], [token])
        cache.evict(1)
    ghosts = cache._victims.ghosts
    assert ghosts is not None
    assert len(ghosts) == 5
    cache.match([2])
    assert cache.stats().num_ghost_hits == 0, "forgotten"
    cache.match([49])
    assert cache.stats().num_ghost_hits == 1


def penalties(costs: list[float]) -> list[float]:
    """How far expert 0's log-weight falls behind by one ghost of each cost, after a run of ghosts of cost 1."""
    falls = []
    for cost in costs:
        learner = Learner(2, 0.01, 0)
        for _ in range(50):
            learner.penalise(ghost(blame=(0, 1)), 0.0)  # blamed on both: sets the scale, moves nothing
        assert learner.weights == (0.5, 0.5)
        learner.penalise(ghost(cost), 0.0)
        falls.append(learner._log_weights[1] - learner._log_weights[0])
    return falls


def test_a_ghost_hit_penalises_who_chose_in_proportion_to_the_cost():
    one, two, ten = penalties([1.0, 2.0, 10.0])
    # The scale is a running mean that the newest cost has one per cent of: 1, 1.01, 1.09.
    assert two / one == pytest.approx(2.0 / 1.01)
    assert ten / one == pytest.approx(10.0 / 1.09)
    learner = Learner(3, 0.1, 0)
    learner.penalise(ghost(blame=(1,)), 0.0)
    assert learner.weights[1] < learner.weights[0] == learner.weights[2]
    assert sum(learner.weights) == pytest.approx(1.0)


def test_blame_is_shared_by_pages_and_shrinks_with_age_and_probability():
    def fall(age: float = 0.0, **kind) -> float:
        learner = Learner(2, 0.01, 0)
        learner.penalise(ghost(**kind), age)
        return learner._log_weights[1] - learner._log_weights[0]

    base = fall()
    assert fall(num_pages=4) == pytest.approx(base / 4)
    assert fall(age=3.0) == pytest.approx(base / 4)
    assert fall(probability=0.25) == pytest.approx(base * 2)


def test_no_weight_dies():
    learner = Learner(3, 1.0, 0)
    for _ in range(1000):
        learner.penalise(ghost(100.0, blame=(2,)), 0.0)
    assert 0 < learner.weights[2] < 0.01
    for _ in range(1000):
        learner.penalise(ghost(100.0, blame=(0,)), 0.0)
        learner.penalise(ghost(100.0, blame=(1,)), 0.0)
    assert learner.weights[2] > 0.9, "a change of traffic brings it back"


def scans(policy: str, seed: int = 0) -> tuple[float, dict[str, float]]:
    """Forty popular pages among pages that come once, in a cache of fifty: hit share, and weights at the end."""
    rng, now = random.Random(1), 0.0
    config = EvictionConfig(policy=policy, experts=("lru", "lfu"), seed=seed)
    cache = RadixPrefixCache(1, make_policy(config), clock=lambda: now)
    fresh, hits = iter(range(1000, 10**6)), 0
    for number in range(6000):
        now = float(number)
        token = rng.randrange(40) if number % 2 else next(fresh)
        match = cache.match([token])
        hits += len(match.pages)
        if not match.pages:
            if cache.num_evictable >= 50:
                cache.evict(1)
            cache.insert([token], [number])
    return hits / 3000, dict(cache.stats().weights)


def test_it_converges_on_the_expert_that_suits_the_traffic():
    lru, lfu = scans("lru")[0], scans("lfu")[0]
    assert lru < 0.7 < 0.9 < lfu
    for seed in range(3):
        hits, weights = scans("adaptive", seed)
        assert weights["lfu"] > 0.9
        assert hits > 0.95 * lfu
        assert sum(weights.values()) == pytest.approx(1.0)


def test_a_seed_decides():
    assert scans("adaptive", 3) == scans("adaptive", 3) != scans("adaptive", 4)


def test_what_comes_back_brings_its_history_along():
    """[1 2] was used three times, then evicted by force. When it is back, lfu still knows, and what hangs below is new."""
    paper = Paper(policy="adaptive", experts=("lfu",))
    for now in range(3):
        paper.use([1, 2], now)
    paper.use([1, 2, 3], 3)  # [1 2] four times, [3] once
    assert sorted(paper.evict(3)) == [1, 102, 203]
    for now in (5, 6):
        paper.use([9], now)  # twice
    assert paper.use([1, 2, 8], 7) == 0
    assert paper.drain() == [208, 9, 102, 1], "[8] is new; [1 2] has five uses, not one"
    paper.use([1, 2, 3, 4], 8)
    for now in (9, 10, 11):
        paper.use([9], now)
    # [9] three uses more than before, five; [3] has two now, [4] one, [1 2] six.
    assert paper.drain() == [304, 203, 9, 102, 1]
