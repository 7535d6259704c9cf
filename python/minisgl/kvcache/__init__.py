"""Keys and values of past tokens: the pages they live in, and the prefix cache that finds them again."""

from __future__ import annotations

from minisgl.eviction import EvictionPolicy
from minisgl.kvcache.naive import NaivePrefixCache
from minisgl.kvcache.pool import KVPool, PageAllocator, bytes_per_page
from minisgl.kvcache.prefix import CacheStats, PrefixCache, PrefixMatch
from minisgl.kvcache.radix import RadixPrefixCache

__all__ = [
    "CACHE_KINDS",
    "CacheStats",
    "KVPool",
    "NaivePrefixCache",
    "PageAllocator",
    "PrefixCache",
    "PrefixMatch",
    "RadixPrefixCache",
    "bytes_per_page",
    "make_prefix_cache",
]

CACHE_KINDS = ("radix", "naive")


def make_prefix_cache(
    kind: str, page_size: int, policy: EvictionPolicy | None = None, bytes_per_token: int = 1
) -> PrefixCache:
    """The prefix cache named by --cache: radix or naive. policy: from `eviction.make_policy`, default lru;
    naive has no use for it.

    bytes_per_token: KV bytes a token takes, for scores that weigh memory. Raises ValueError for an unknown
    kind.
    """
    if kind == "radix":
        return RadixPrefixCache(page_size, policy, bytes_per_token)
    if kind == "naive":
        return NaivePrefixCache(page_size)
    raise ValueError(f"--cache {kind!r} is unknown: use one of {', '.join(CACHE_KINDS)}")
