"""The naive prefix cache keeps the contract and never finds anything."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.kvcache import NaivePrefixCache, PageAllocator


def test_a_finished_sequence_is_not_found_but_its_pages_come_back():
    cache = NaivePrefixCache(page_size=2)
    match, duplicates = cache.insert([1, 2, 3, 4], [5, 6])
    assert (match.pages, duplicates) == ([5, 6], [])
    cache.lock(match.handle)
    assert (cache.num_evictable, cache.num_protected) == (0, 2)
    assert cache.evict(2) == []
    assert cache.match([1, 2, 3, 4]).pages == []
    cache.unlock(match.handle)
    assert sorted(cache.evict(9)) == [5, 6]
    assert (cache.num_evictable, cache.num_protected) == (0, 0)


def test_a_growing_sequence_hands_its_lock_over():
    cache = NaivePrefixCache(page_size=1)
    first, _ = cache.insert([1], [7])
    cache.lock(first.handle)
    second, _ = cache.insert([1, 2], [7, 8])
    cache.lock(second.handle)
    cache.unlock(first.handle)
    assert (cache.num_evictable, cache.num_protected) == (0, 2)
    cache.unlock(second.handle)
    assert cache.num_evictable == 2


def test_late_locks_and_extra_unlocks_are_bugs():
    cache = NaivePrefixCache(page_size=1)
    match, _ = cache.insert([1], [7])
    with pytest.raises(AssertionError):
        cache.unlock(match.handle)
    cache.evict(1)
    with pytest.raises(AssertionError):
        cache.lock(match.handle)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=30))
def test_every_page_is_counted(steps: list[tuple[int, bool]]):
    allocator, cache = PageAllocator(13), NaivePrefixCache(page_size=4)
    running = []
    for num_pages, finish in steps:
        if num_pages > allocator.num_free:
            allocator.free(cache.evict(num_pages - allocator.num_free))
        pages = allocator.alloc(num_pages)
        if pages is not None:
            match, _ = cache.insert(list(range(4 * num_pages)), pages)
            cache.lock(match.handle)
            running.append(match.handle)
        if finish and running:
            cache.unlock(running.pop())
        assert cache.num_protected == len(set(itertools.chain.from_iterable(running)))
        assert allocator.num_free + cache.num_evictable + cache.num_protected == allocator.total
