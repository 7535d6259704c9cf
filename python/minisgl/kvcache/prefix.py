"""Contract of a prefix cache: which pages already hold the keys and values of a prompt's beginning.

Pages are counted in one of three states, and at every moment free + evictable + protected == total free: in
the pool's free list. evictable: held by the cache, used by nobody. protected: used by a running request, or
held by the cache and locked by one.

The cache works in whole pages: a prefix of n tokens is shared only up to the last full page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class PrefixMatch:
    """The longest cached prefix: `pages` in order, len(pages) * page_size tokens, and the handle that locks
    them.
    """

    pages: list[int]
    handle: Any


@dataclass(frozen=True)
class CacheStats:
    """What a prefix cache did since it was made, for metrics.

    num_lookup_tokens, num_hit_tokens: whole pages asked for by `match`, and found. num_policy_failures:
    choices for which lru stood in for a user's eviction policy. num_ghost_hits: pages wanted again not long
    after they were evicted. weights: of the adaptive policy's experts, by name; they add up to 1.
    """

    num_lookup_tokens: int = 0
    num_hit_tokens: int = 0
    num_evicted_pages: int = 0
    num_policy_failures: int = 0
    num_ghost_hits: int = 0
    weights: Mapping[str, float] = field(default_factory=dict)


class PrefixCache(Protocol):
    """Maps token prefixes to pages. Never allocates; gives back the pages it stops holding."""

    page_size: int

    def match(self, token_ids: Sequence[int]) -> PrefixMatch:
        """Longest cached prefix in whole pages; touches it (recency, use count). Locks nothing."""
        ...

    def lock(self, handle: Any) -> None:
        """Protect the matched path from eviction until `unlock`; counted, a path may be locked many times."""
        ...

    def unlock(self, handle: Any) -> None:
        """Undo one `lock` of the same handle."""
        ...

    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> tuple[PrefixMatch, list[int]]:
        """Offer full pages of a sequence: len(token_ids) == len(pages) * page_size.

        Returns the match that now covers the whole sequence (its pages are the cache's own: where the cache
        already held a page for the same tokens, that one), and the offered pages that were duplicates, which
        the caller frees once no step in flight writes or reads them.
        """
        ...

    def evict(self, num_pages: int) -> list[int]:
        """Give up at least num_pages unlocked pages if there are as many, lowest eviction score first;
        returns them.
        """
        ...

    @property
    def num_evictable(self) -> int:
        """Pages held and unlocked."""
        ...

    @property
    def num_protected(self) -> int:
        """Pages held and locked."""
        ...

    def stats(self) -> CacheStats:
        """Counters since the cache was made."""
        ...
