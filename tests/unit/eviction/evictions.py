"""A prefix cache with a hand-set clock, for eviction orders that can be worked out on paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minisgl.eviction import EvictionConfig, make_policy
from minisgl.kvcache import RadixPrefixCache


class Paper:
    """Pages of one token, and a page's number is its token plus 100 times its depth: so a page says what was evicted."""

    def __init__(self, custom: Any = None, **config: Any) -> None:
        self.now = 0.0
        self.cache = RadixPrefixCache(
            1, make_policy(EvictionConfig(**config), custom), clock=lambda: self.now
        )

    def use(self, tokens: Sequence[int], now: float) -> int:
        """A request for these tokens that is over at once; returns how many were found."""
        self.now = now
        match = self.cache.match(tokens)
        pages = [token + 100 * depth for depth, token in enumerate(tokens)]
        self.cache.insert(tokens, match.pages + pages[len(match.pages) :])
        return len(match.pages)

    def evict(self, num_pages: int, now: float | None = None) -> list[int]:
        self.now = self.now if now is None else now
        return self.cache.evict(num_pages)

    def drain(self) -> list[int]:
        """All pages, one eviction each."""
        return [page for _ in range(self.cache.num_evictable) for page in self.evict(1)]
