"""Who owns which KV page: the allocator's free list, the prefix cache, and the requests between them.

At every moment free + evictable + protected == total, where protected are pages locked in the cache plus pages that running
requests own alone. A request's pages, in order:

    |<- shared: the cache's, locked ->|<- own: full ->|<- own: partial ->|
"""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.kvcache.pool import PageAllocator
from minisgl.kvcache.prefix import PrefixCache
from minisgl.scheduler.state import RequestState


@dataclass(frozen=True)
class PageCounts:
    """Pages by state; the three add up to total. own: those of `protected` that running requests own alone."""

    free: int
    evictable: int
    protected: int
    own: int
    total: int


class PageManager:
    """Gives requests the pages they need, evicting cached prefixes, and takes them back into the cache."""

    def __init__(self, allocator: PageAllocator, cache: PrefixCache) -> None:
        assert cache.page_size >= 1
        self.allocator = allocator
        self.cache = cache
        self.page_size = cache.page_size
        self._num_own = 0

    @property
    def num_available(self) -> int:
        """Pages that can be had: free ones and those the cache can give up."""
        return self.allocator.num_free + self.cache.num_evictable

    def counts(self) -> PageCounts:
        free, evictable = self.allocator.num_free, self.cache.num_evictable
        protected = self.cache.num_protected + self._num_own
        return PageCounts(free, evictable, protected, self._num_own, self.allocator.total)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def attach_prefix(self, state: RequestState) -> None:
        """Give a request that holds nothing the longest cached prefix, locked. At least one token stays to be computed:
        its logits choose the next token. A prompt whose log-probabilities are wanted is computed as a whole."""
        assert not state.pages and state.lock is None and state.num_computed == 0
        usable = (len(state.token_ids) - 1) // self.page_size * self.page_size if state.is_scored else 0
        match = self.cache.match(state.token_ids[:usable])
        self.cache.lock(match.handle)
        state.lock = match.handle
        state.pages = list(match.pages)
        state.num_shared = len(match.pages)
        state.num_computed = len(match.pages) * self.page_size

    def grow(self, state: RequestState, num_tokens: int) -> bool:
        """Make room for the first num_tokens tokens of the sequence. False, with nothing changed, if there is none."""
        missing = self.pages_for(num_tokens) - len(state.pages)
        if missing <= 0:
            return True
        short = missing - self.allocator.num_free
        if short > 0:
            if short > self.cache.num_evictable:
                return False
            self.allocator.free(self.cache.evict(short))
        pages = self.allocator.alloc(missing)
        assert pages is not None, "the cache evicted fewer pages than it promised"
        state.pages += pages
        self._num_own += missing
        return True

    def share(self, state: RequestState, num_tokens: int) -> list[int]:
        """Offer the full pages of the first num_tokens tokens to the cache and use the cache's from now on.

        Returns pages that turned out to be duplicates. They still belong to the request: give them to `free_duplicates` once
        no step in flight reads or writes them.
        """
        full = num_tokens // self.page_size
        if full <= state.num_shared:
            return []
        match, duplicates = self.cache.insert(state.token_ids[: full * self.page_size], state.pages[:full])
        held = len(match.pages)  # 0: this cache keeps nothing
        self.cache.lock(match.handle)
        self.cache.unlock(state.lock)
        state.lock = match.handle
        state.pages[:held] = match.pages
        self._num_own -= held - state.num_shared - len(duplicates)
        state.num_shared = held
        return duplicates

    def free_duplicates(self, pages: list[int]) -> None:
        self.allocator.free(pages)
        self._num_own -= len(pages)

    def release(self, state: RequestState) -> None:
        """Take everything back: full computed pages stay in the cache, evictable; the rest is free."""
        if state.lock is not None:
            known = min(state.num_computed, len(state.token_ids))
            self.free_duplicates(self.share(state, known))
            self.discard(state)

    def discard(self, state: RequestState) -> None:
        """Take everything back and offer nothing to the cache."""
        if state.lock is None:
            return
        own = state.pages[state.num_shared :]
        self.allocator.free(own)
        self._num_own -= len(own)
        self.cache.unlock(state.lock)
        state.lock, state.pages, state.num_shared, state.num_computed = None, [], 0, 0

    def forget_all(self) -> None:
        """Empty the cache of everything that no request has locked."""
        self.allocator.free(self.cache.evict(self.cache.num_evictable))
