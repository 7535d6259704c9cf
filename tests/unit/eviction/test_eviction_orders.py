"""Every policy on sequences worked out by hand. Single-page prefixes 1, 2, 3 ... unless a test says otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from minisgl.eviction import SCORES, Entry, Recorder, recompute_cost
from minisgl.moe.store.planning import SlotTable
from tests.unit.eviction.evictions import Paper

USES = [(1, 0), (2, 1), (3, 2), (1, 3), (1, 4), (2, 5)]  # (token, second): 1 thrice, 2 twice, 3 once


def after(uses: Sequence[tuple[int, float]], **config) -> list[int]:
    paper = Paper(**config)
    for token, now in uses:
        paper.use([token], now)
    return paper.drain()


def test_lru_takes_what_was_used_longest_ago():
    assert after(USES) == [3, 1, 2]
    assert after(USES, policy="lru") == [3, 1, 2]


def test_lfu_takes_the_least_used_and_of_equals_the_longer_unused():
    assert after(USES, policy="lfu") == [3, 2, 1]
    assert after([(1, 0), (2, 1), (3, 2), (2, 3), (1, 4)], policy="lfu") == [3, 2, 1]


@pytest.mark.parametrize(
    ("k", "order"),
    [
        (1, [3, 1, 2]),  # the latest use: 2 s, 4 s, 5 s
        (2, [3, 2, 1]),  # the latest but one: none, 1 s, 3 s
        (3, [3, 2, 1]),  # none, none (used later than 3), 0 s
        (4, [3, 1, 2]),  # none of them has four: lru
    ],
)
def test_lru_k_compares_the_kth_latest_use_and_takes_those_without_one_first(k: int, order: list[int]):
    assert after(USES, policy="lru-k", k=k) == order


def test_frequency_decay_halves_uses_with_age():
    # 1: three uses at 0 s count 3 x 2^-(20 / 10) = 0.75 at 20 s. 2: one use at 20 s counts 1.
    uses = [(1, 0.0), (1, 0.0), (1, 0.0), (2, 20.0)]
    assert after(uses, policy="frequency-decay", half_life=10.0) == [1, 2]
    # With a half-life of 20 s: 3 x 2^-1 = 1.5 against 1.
    assert after(uses, policy="frequency-decay", half_life=20.0) == [2, 1]


def test_cost_aware_weighs_reuse_and_the_cost_of_recomputing_against_bytes():
    # A segment costs n (depth + n / 2) and takes n bytes: what is deep is dear. [1 2 3 4] has its leaf [3 4] at depth 2:
    # 2 x (2 + 1) / 2 = 3; [9] costs 1 x 0.5 / 1.
    paper = Paper(policy="cost-aware")
    for tokens, now in (([1, 2, 3, 4], 0), ([1, 2], 1), ([9], 2)):
        paper.use(tokens, now)
    assert paper.drain() == [9, 304, 203, 102, 1], "lru would have begun with the leaf [3 4]"
    # A prefix that was asked for again is worth more than one that is a little dearer: 0.5 x 2 uses against 1 x one, a tenth.
    paper = Paper(policy="cost-aware")
    for tokens, now in (([9], 0), ([9], 0), ([1, 2], 0)):
        paper.use(tokens, now)
    assert paper.evict(2) == [1, 102]


def test_recompute_cost_is_the_formula_and_adds_up():
    assert recompute_cost(0, 4) == 4 * (0 + 2)
    assert recompute_cost(10, 4) == 4 * (10 + 2)
    assert recompute_cost(0, 10) + recompute_cost(10, 4) == recompute_cost(0, 14)


def test_histories_by_hand():
    recorder = Recorder(k=2, half_life=10.0)
    history = recorder.first(0.0)
    assert (history.num_uses, history.last_use, history.kth_use) == (1, 0.0, -math.inf)
    history = recorder.again(history, 10.0)
    history = recorder.again(history, 20.0)
    assert (history.num_uses, history.last_use, history.kth_use) == (3, 20.0, 10.0)
    assert 2**history.heat == pytest.approx(1 + 2 + 4)  # 2^(t / half-life) of each use
    assert recorder.refresh(history, 25.0).num_uses == 3
    assert recorder.refresh(history, 25.0).last_use == 25.0


def test_a_year_later_the_order_is_still_right():
    """Decayed counts are kept as logarithms, so that long running neither overflows nor rounds everything to zero."""
    year = 3.15e7
    uses = [(1, year), (1, year), (1, year), (2, year + 20)]
    assert after(uses, policy="frequency-decay", half_life=10.0) == [1, 2]
    assert after(uses, policy="frequency-decay", half_life=20.0) == [2, 1]


@pytest.mark.parametrize("name", ["lru", "lfu", "lru-k", "frequency-decay", "cost-aware"])
def test_no_built_in_order_changes_because_time_passes(name: str):
    """What lets a heap keep them: the same two entries compare the same now and an hour later."""
    recorder = Recorder(2, 60.0)
    old = recorder.again(recorder.again(recorder.first(0.0), 1.0), 2.0)
    entries = [Entry(old, 8.0, 2), Entry(recorder.first(100.0), 3.0, 1), Entry(recorder.first(50.0), 90.0, 4)]
    score = SCORES[name]
    orders = [sorted(range(3), key=lambda i: score(entries[i], now)) for now in (100.0, 3700.0, 1e6)]
    assert orders[0] == orders[1] == orders[2]


def test_a_split_keeps_the_history_of_both_halves():
    """[1 2 3 4] used three times, then [1 2 8]: the rest [3 4] still has three uses, and [1 2] four."""
    paper = Paper(policy="lfu")
    for now in range(3):
        paper.use([1, 2, 3, 4], now)
    assert paper.use([1, 2, 8], 3) == 2
    for now in (4, 5, 6):
        paper.use([7], now)
    # [8]: one use. [3 4] and [7]: three, those of [7] later. [1 2]: four.
    assert paper.drain() == [208, 304, 203, 7, 102, 1]


def test_after_a_split_only_the_half_that_is_used_counts_on():
    paper = Paper(policy="lfu")
    paper.use([1, 2], 0)
    assert [paper.use([1, 9], now) for now in (1, 2)] == [1, 2]
    paper.use([5], 3)
    paper.use([5], 4)
    # [2] has its one use, [9] two at 2 s, [5] two at 4 s; [1], which all of them share, has three and goes last.
    assert paper.drain() == [102, 109, 5, 1]


def test_only_as_many_pages_go_as_are_asked_for_and_from_the_end():
    paper = Paper()
    paper.use([1, 2, 3, 4, 5], 0)
    assert sorted(paper.evict(2)) == [304, 405]
    assert paper.use([1, 2, 3, 4, 5], 1) == 3


def test_locked_prefixes_stay_whatever_their_score():
    paper = Paper()
    paper.use([1], 0)
    paper.use([2], 1)
    match = paper.cache.match([1])
    paper.cache.lock(match.handle)
    paper.use([2], 2)
    assert paper.drain() == [2]
    paper.cache.unlock(match.handle)
    assert paper.drain() == [1]


def test_the_same_scores_rank_the_slots_of_an_expert_cache():
    """Expert 4 used thrice up to 1 s, 5 once at 3 s, 6 twice at 2 s."""

    def first_victims(*names: str) -> list[int]:
        table = SlotTable(8, 3, [SCORES[name] for name in names])
        table.fill([4, 5, 6])
        for expert, now, times in ((4, 0, 2), (4, 1, 1), (6, 2, 2), (5, 3, 1)):
            table.use(expert, now, times)
        return [table.expert_of_S[slot] for slot in table.victims(3)]

    assert first_victims("lru") == first_victims("lru", "lfu") == [4, 6, 5]
    assert first_victims("lfu") == [5, 6, 4]
    default = SlotTable(8, 3)
    assert default.scores == (SCORES["lru"], SCORES["lfu"])
