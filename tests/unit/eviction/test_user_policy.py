"""A policy of the user's own: followed while it answers, replaced by lru for the evictions in which it does not."""

from __future__ import annotations

import logging

import pytest

from minisgl.core import SamplingParams
from minisgl.eviction import Entry
from minisgl.llm import LLM
from minisgl.server.engine_process import numbers_of
from minisgl.server.ipc import Beat
from minisgl.server.metrics import Metrics
from tests.unit.eviction.evictions import Paper


class LongestFirst:
    def score(self, entry: Entry, now: float) -> float:
        return -entry.num_tokens


class Answers:
    """Gives what it was made with; an exception is raised."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def score(self, entry: Entry, now: float) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Sometimes(LongestFirst):
    def __init__(self) -> None:
        self.works = True

    def score(self, entry: Entry, now: float) -> float:
        if not self.works:
            raise RuntimeError("not now")
        return super().score(entry, now)


class Ghosts(LongestFirst):
    def __init__(self) -> None:
        self.seen: list[tuple[Entry, float]] = []

    def on_ghost_hit(self, entry: Entry, now: float) -> None:
        self.seen.append((entry, now))


def three() -> tuple[list[int], ...]:
    return [1, 11], [2, 12, 22], [3]


def test_a_good_one_is_followed():
    paper = Paper(custom=LongestFirst)
    for now, tokens in enumerate(three()):
        paper.use(tokens, now)
    assert sorted(paper.evict(3)) == [2, 112, 222]
    assert paper.cache.stats().num_policy_failures == 0


def test_it_sees_what_it_needs_and_cannot_change_it():
    seen: list[Entry] = []

    class Looks:
        def score(self, entry: Entry, now: float) -> float:
            seen.append(entry)
            return 0.0

    paper = Paper(custom=Looks())
    paper.use([1, 2, 3], 5)
    paper.use([1, 2, 3], 8)
    paper.evict(1, now=9)
    entry = seen[0]
    assert (entry.num_uses, entry.last_use, entry.num_tokens, entry.depth, entry.num_bytes) == (2, 8, 3, 0, 3)
    assert entry.cost == 3 * (0 + 3 / 2)
    with pytest.raises(AttributeError):
        entry.num_tokens = 0  # type: ignore[misc]


@pytest.mark.parametrize(
    "answer", [ValueError("no idea"), float("nan"), None, "high", True, [1.0], 1j, 10**400], ids=repr
)
def test_a_bad_answer_means_lru_for_that_eviction_counted_and_said_once(answer: object, caplog):
    paper = Paper(custom=Answers(answer))
    for now, token in enumerate((4, 5, 6)):
        paper.use([token], now)
    paper.use([4], 3)
    with caplog.at_level(logging.WARNING, logger="minisgl"):
        assert paper.drain() == [5, 6, 4]
    assert paper.cache.stats().num_policy_failures == 3
    assert len(caplog.records) == 1
    assert "Answers" in caplog.text
    assert (paper.cache.num_evictable, paper.cache.num_protected) == (0, 0)


@pytest.mark.parametrize("answer", [1, 2.5, float("inf"), float("-inf"), -(2**60)])
def test_every_number_is_a_good_answer(answer: float):
    paper = Paper(custom=Answers(answer))
    for now, token in enumerate((4, 5, 6)):
        paper.use([token], now)
    assert paper.drain() == [4, 5, 6], "equal scores: the longer unused goes first"
    assert paper.cache.stats().num_policy_failures == 0


def test_it_is_asked_again_after_a_failure():
    policy = Sometimes()
    paper = Paper(custom=policy)
    for now, tokens in enumerate(three()):
        paper.use(tokens, now)
    policy.works = False
    assert paper.evict(1) == [111], "lru: the end of the oldest"
    policy.works = True
    assert sorted(paper.evict(3)) == [2, 112, 222], "longest first again"
    assert paper.cache.stats().num_policy_failures == 1


def test_a_score_that_grows_with_waiting_is_followed():
    class Oldest:
        """Not `static_order`: highest right after a use, falling while time passes."""

        def score(self, entry: Entry, now: float) -> float:
            return 1 / (1 + now - entry.last_use)

    paper = Paper(custom=Oldest())
    for now, token in enumerate((4, 5, 6, 7)):
        paper.use([token], now)
    paper.use([4], 4)
    assert paper.evict(1, now=5) == [5]
    paper.use([6], 6)
    assert [paper.evict(1, now=7 + i) for i in range(3)] == [[7], [4], [6]]


def test_the_ghost_callback_hears_of_what_was_wanted_again():
    policy = Ghosts()
    paper = Paper(custom=policy)
    paper.use([1, 2, 3], 0)
    paper.evict(3, now=1)
    paper.use([9], 2)
    assert policy.seen == []
    paper.use([1, 2, 8], 3)
    assert [(entry.depth, entry.num_tokens, now) for entry, now in policy.seen] == [(0, 1, 3), (1, 1, 3)]
    paper.use([1, 2, 3], 4)
    assert len(policy.seen) == 3, "the third page; the others are held again"


def test_a_ghost_callback_that_raises_is_contained_and_counted(caplog):
    class Bad(LongestFirst):
        def on_ghost_hit(self, entry: Entry, now: float) -> None:
            raise RuntimeError("never mind")

    paper = Paper(custom=Bad())
    paper.use([1, 2, 3], 0)
    paper.evict(3, now=1)
    assert paper.use([1, 2, 3], 2) == 0
    assert paper.use([1, 2, 3], 3) == 3
    assert paper.cache.stats().num_policy_failures == 3
    assert len(caplog.records) == 1


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [f"{number} bottles of milk stood on the wall" for number in range(12)]


@pytest.mark.parametrize("custom", [LongestFirst, Answers(float("nan")), Answers(RuntimeError("no"))])
def test_the_llm_takes_it_and_no_page_is_lost(custom: object, prompts: list[str]):
    options = {"device": "cpu", "num_pages": 24, "page_size": 4, "max_prefill_length": 64}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM("demo", **options) as plain:
        expected = [output.token_ids for output in plain.generate(prompts, params)]
    with LLM("demo", eviction_policy=custom, **options) as llm:
        assert [output.token_ids for output in llm.generate(prompts, params)] == expected
        stats = llm.stats()
    assert stats.pages_free + stats.pages_evictable == stats.pages_total
    assert stats.prefix.num_evicted_pages > 0
    assert (stats.prefix.num_policy_failures > 0) == isinstance(custom, Answers)
    metrics = Metrics("m")
    metrics.update(Beat(numbers_of(stats)))
    shown = f'minisgl:eviction_policy_failures_total{{model_name="m"}} {stats.prefix.num_policy_failures}.0'
    assert shown in metrics.render().decode()


def test_a_mistake_in_it_shows_before_a_model_is_looked_for():
    with pytest.raises(ValueError, match="importing 'no_such_module' failed"):
        LLM("/no/such/model", cache_eviction_policy="no_such_module:Policy")
