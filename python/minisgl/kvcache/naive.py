"""A prefix cache that never finds anything: the slow and plain twin of the radix tree, and `--cache naive`.

It keeps the contract all the same. Offered pages stay with it while they are locked, because a running
request still reads them; once unlocked they are evictable and the next `evict` gives them back. Nothing is
ever shared.
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.kvcache.prefix import CacheStats, PrefixMatch


class NaivePrefixCache:
    """`PrefixCache` without reuse. A handle is the tuple of pages it protects."""

    def __init__(self, page_size: int) -> None:
        assert page_size >= 1
        self.page_size = page_size
        self._locks: dict[int, int] = {}  # every page held, and how many handles protect it
        self._unlocked: dict[int, None] = {}
        self._num_lookup_tokens = self._num_evicted_pages = 0

    @property
    def num_evictable(self) -> int:
        return len(self._unlocked)

    @property
    def num_protected(self) -> int:
        return len(self._locks) - len(self._unlocked)

    def stats(self) -> CacheStats:
        return CacheStats(
            num_lookup_tokens=self._num_lookup_tokens, num_evicted_pages=self._num_evicted_pages
        )

    def match(self, token_ids: Sequence[int]) -> PrefixMatch:
        self._num_lookup_tokens += len(token_ids) // self.page_size * self.page_size
        return PrefixMatch([], ())

    def lock(self, handle: tuple[int, ...]) -> None:
        for page in handle:
            assert page in self._locks, "these pages were evicted after they were inserted: lock them at once"
            self._locks[page] += 1
            self._unlocked.pop(page, None)

    def unlock(self, handle: tuple[int, ...]) -> None:
        for page in handle:
            assert self._locks[page] > 0, "unlocked more often than locked"
            self._locks[page] -= 1
            if self._locks[page] == 0:
                self._unlocked[page] = None

    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> tuple[PrefixMatch, list[int]]:
        assert len(token_ids) == len(pages) * self.page_size, "only whole pages can be shared"
        for page in pages:
            if page not in self._locks:
                self._locks[page] = 0
                self._unlocked[page] = None
        return PrefixMatch(list(pages), tuple(pages)), []

    def evict(self, num_pages: int) -> list[int]:
        freed = []
        while len(freed) < num_pages and self._unlocked:
            page, _ = self._unlocked.popitem()
            del self._locks[page]
            freed.append(page)
        self._num_evicted_pages += len(freed)
        return freed
