"""The radix prefix cache against a plain model, under random operations.

The model is a dict from a prefix (a tuple of whole pages' tokens) to the page that holds its last page, and a count of locks
a prefix. It knows nothing of nodes, splits or scores; which page goes at an eviction is the cache's to say, and the model only
checks that it may: held, unlocked, and nothing longer left behind.
"""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minisgl.eviction import EvictionConfig, make_policy
from minisgl.kvcache import PageAllocator, RadixPrefixCache

NUM_PAGES = 24
Prefix = tuple[int, ...]


class Moody:
    """A user's policy of the worst kind: right, raising, NaN, no number, by turns."""

    def __init__(self) -> None:
        self.calls = itertools.count()

    def score(self, entry, now):
        answers = (1.0, float("nan"), entry.last_use, None, float("inf"), "high")
        turn = next(self.calls) % (len(answers) + 1)
        if turn == len(answers):
            raise RuntimeError("not today")
        return answers[turn]

    def on_ghost_hit(self, entry, now):
        raise RuntimeError("never mind")


POLICIES = {
    "lru": {},
    "lfu": {"policy": "lfu"},
    "lru-k": {"policy": "lru-k", "k": 3},
    "frequency-decay": {"policy": "frequency-decay", "half_life": 5.0},
    "cost-aware": {"policy": "cost-aware"},
    "adaptive": {"policy": "adaptive", "ghost_capacity": 8, "learning_rate": 0.5},
}


def policy_of(name: str):
    if name == "moody":
        return make_policy(EvictionConfig(ghost_capacity=8), custom=Moody())
    return make_policy(EvictionConfig(**POLICIES[name]))


class CacheMachine(RuleBasedStateMachine):
    """Requests that match, lock, allocate, insert, unlock, and evictions in between."""

    @initialize(page_size=st.sampled_from([1, 4, 16]), policy=st.sampled_from([*POLICIES, "moody"]))
    def start(self, page_size: int, policy: str) -> None:
        self.size = page_size
        self.allocator = PageAllocator(NUM_PAGES + 1)
        ticks = itertools.count()
        self.cache = RadixPrefixCache(page_size, policy_of(policy), clock=lambda: float(next(ticks)))
        self.held: dict[Prefix, int] = {}
        self.locks: dict[Prefix, int] = {}
        self.open: list[tuple[Prefix, object]] = []

    def tokens(self, letters: list[int], tail: int) -> list[int]:
        """One page a letter, then `tail` tokens that fill no page. Letters 0 and 1 differ in a page's last token only."""
        pages = [[9] * (self.size - 1) + [letter] for letter in letters]
        return [*itertools.chain.from_iterable(pages), *[7] * min(tail, self.size - 1)]

    def prefixes(self, tokens: list[int]) -> list[Prefix]:
        ends = range(self.size, len(tokens) + 1, self.size)
        return [tuple(tokens[:end]) for end in ends]

    def expected(self, tokens: list[int]) -> list[int]:
        found = itertools.takewhile(self.held.__contains__, self.prefixes(tokens))
        return [self.held[prefix] for prefix in found]

    def lock(self, prefix: Prefix, handle: object) -> None:
        self.cache.lock(handle)
        self.open.append((prefix, handle))
        for part in self.prefixes(list(prefix)):
            self.locks[part] = self.locks.get(part, 0) + 1

    def evict(self, num_pages: int) -> list[int]:
        evictable = {prefix for prefix in self.held if not self.locks.get(prefix)}
        pages = self.cache.evict(num_pages)
        assert len(pages) == len(set(pages)) >= min(num_pages, len(evictable))
        gone = {prefix for prefix, page in self.held.items() if page in set(pages)}
        assert len(gone) == len(pages), "a page that was not held"
        assert gone <= evictable, "a locked page was evicted"
        for prefix in gone:
            del self.held[prefix]
        assert all(prefix[: -self.size] in self.held for prefix in self.held if len(prefix) > self.size)
        self.allocator.free(pages)
        return pages

    @rule(letters=st.lists(st.integers(0, 2), max_size=7), tail=st.integers(0, 3), extra=st.integers(0, 3))
    def request(self, letters: list[int], tail: int, extra: int) -> None:
        """Match and lock a prompt, find pages for the rest, share all full pages, keep the lock."""
        tokens = self.tokens(letters + [1] * extra, tail)
        match = self.cache.match(tokens)
        assert match.pages == self.expected(tokens)
        matched = tuple(tokens[: len(match.pages) * self.size])
        self.lock(matched, match.handle)
        missing = len(tokens) // self.size - len(match.pages)
        if missing > self.allocator.num_free:
            self.evict(missing - self.allocator.num_free)
        new = self.allocator.alloc(missing)
        if new is not None:
            self.share(tokens[: len(tokens) // self.size * self.size], match.pages + new)

    @rule(letters=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def computed_twice(self, letters: list[int]) -> None:
        """A request that never looked: every page it computed that is held already comes back."""
        tokens = self.tokens(letters, 0)
        pages = self.allocator.alloc(len(letters))
        if pages is not None:
            self.share(tokens, pages)

    def share(self, tokens: list[int], pages: list[int]) -> None:
        held = self.expected(tokens)
        match, duplicates = self.cache.insert(tokens, pages)
        assert match.pages == held + pages[len(held) :]
        assert duplicates == [page for page, own in zip(pages, held) if page != own]
        self.held.update(zip(self.prefixes(tokens), match.pages))
        self.allocator.free(duplicates)
        self.lock(tuple(tokens), match.handle)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 100))
    def finish(self, which: int) -> None:
        prefix, handle = self.open.pop(which % len(self.open))
        self.cache.unlock(handle)
        for part in self.prefixes(list(prefix)):
            self.locks[part] -= 1

    @rule(num_pages=st.integers(0, 8))
    def make_room(self, num_pages: int) -> None:
        self.evict(num_pages)

    @invariant()
    def every_page_is_counted(self) -> None:
        protected = sum(1 for prefix in self.held if self.locks.get(prefix))
        assert self.cache.num_protected == protected
        assert self.cache.num_evictable == len(self.held) - protected
        assert self.allocator.num_free + len(self.held) == self.allocator.total == NUM_PAGES

    def teardown(self) -> None:
        while self.open:
            self.finish(0)
        self.evict(NUM_PAGES)
        assert self.allocator.num_free == NUM_PAGES
        assert (self.cache.num_evictable, self.cache.num_protected) == (0, 0)


TestRadix = CacheMachine.TestCase
TestRadix.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
