"""Prefix cache as a radix tree over whole pages.

Each node holds a segment: tokens, the pages that hold their keys and values, and how often requests came by.
Two children of a node differ within their first page, so a child is found by the bytes of that page, and a
segment is compared as bytes, not token by token. Where a prompt leaves a segment in the middle, the segment
is split at the page border:

    before   root -- [a b c d]           after   root -- [a b] -+- [c d]
                                                                +- [x y]

The lower half stays the same node, so handles and locks on it mean the same path as before.

A lock on a node counts on every node up to the root. So what is unlocked is closed downwards: leaves can go
first, and every unlocked page can be had in the end. A victim leaf gives up pages from its end, and only as
many as are asked for: what is left is still a prefix. (Giving up the whole leaf, as other trees do, throws a
long conversation away to make room for one page.)

The tree owns locks, splits and pages; `victims.Victims` only names the next leaf.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from minisgl.eviction import Entry, EvictionPolicy, History, make_policy, recompute_cost, recompute_work
from minisgl.kvcache.prefix import CacheStats, PrefixMatch
from minisgl.kvcache.victims import Victim, Victims

_TOKEN_BYTES = 4
assert array("i").itemsize == _TOKEN_BYTES


class _Node:
    """A segment: `tokens` (int32 bytes) at positions start, start + 1, ... and its pages.

    prints: fingerprints of the path up to the end of each page; made when first needed.
    """

    __slots__ = ("children", "history", "locks", "pages", "parent", "prints", "start", "tokens")

    def __init__(
        self, parent: _Node | None, tokens: bytes, pages: list[int], start: int, history: History
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.start = start
        self.history = history
        self.locks = 0
        self.children: dict[bytes, _Node] = {}
        self.prints: list[int] | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.tokens) // _TOKEN_BYTES


class RadixHandle(NamedTuple):
    """A path: its last node, and its length in tokens, which tells whether it was evicted before it was
    locked.
    """

    node: _Node
    num_tokens: int


class RadixPrefixCache:
    """`PrefixCache` as a radix tree. Not thread-safe.

    policy: from `eviction.make_policy`, default lru. bytes_per_token: KV bytes, for cost-aware scores. clock:
    seconds, never going back.
    """

    def __init__(
        self,
        page_size: int,
        policy: EvictionPolicy | None = None,
        bytes_per_token: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert page_size >= 1
        assert bytes_per_token >= 1
        self.page_size = page_size
        self._policy = policy or make_policy()
        self._recorder = self._policy.recorder
        self._bytes_per_token = bytes_per_token
        self._clock = clock
        self._page_bytes = page_size * _TOKEN_BYTES
        self._root = _Node(None, b"", [], 0, self._recorder.first(clock()))
        self._victims = Victims(self._policy, self._describe)
        self._num_evictable = self._num_protected = 0
        self._num_lookup_tokens = self._num_hit_tokens = self._num_evicted_pages = 0

    @property
    def num_evictable(self) -> int:
        return self._num_evictable

    @property
    def num_protected(self) -> int:
        return self._num_protected

    def stats(self) -> CacheStats:
        learner = self._victims.learner
        return CacheStats(
            num_lookup_tokens=self._num_lookup_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_evicted_pages=self._num_evicted_pages,
            num_policy_failures=self._victims.num_failures,
            num_ghost_hits=self._victims.num_ghost_hits,
            weights=dict(zip((s.name for s in self._policy.scorers), learner.weights)) if learner else {},
        )

    def match(self, token_ids: Sequence[int]) -> PrefixMatch:
        now = self._clock()
        data = self._encode(token_ids)
        node, pos = self._walk(data)
        pages: list[int] = []
        for step in reversed(list(self._path(node))):
            step.history = self._recorder.again(step.history, now)
            pages += step.pages
        self._offer(node)
        if self._victims.ghosts is not None:
            self._tell_misses(node, data, pos, now)
        self._num_lookup_tokens += len(data) // _TOKEN_BYTES
        self._num_hit_tokens += pos // _TOKEN_BYTES
        return PrefixMatch(pages, RadixHandle(node, node.end))

    def lock(self, handle: RadixHandle) -> None:
        assert handle.num_tokens == handle.node.end, (
            "this prefix was evicted after it was matched: lock it at once"
        )
        for node in self._path(handle.node):
            if node.locks == 0:
                self._victims.discard(node)
                self._num_evictable -= len(node.pages)
                self._num_protected += len(node.pages)
            node.locks += 1

    def unlock(self, handle: RadixHandle) -> None:
        for node in self._path(handle.node):
            assert node.locks > 0, "unlocked more often than locked"
            node.locks -= 1
            if node.locks == 0:
                self._num_evictable += len(node.pages)
                self._num_protected -= len(node.pages)
        self._offer(handle.node)

    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> tuple[PrefixMatch, list[int]]:
        assert len(token_ids) == len(pages) * self.page_size, "only whole pages can be shared"
        now = self._clock()
        data = self._encode(token_ids)
        node, pos = self._walk(data)
        own: list[int] = []
        for step in reversed(list(self._path(node))):
            step.history = self._recorder.refresh(step.history, now)
            own += step.pages
        new = list(pages[len(own) :])
        if new:
            self._victims.discard(node)
            node = self._grow(node, data[pos:], new, now)
            self._num_evictable += len(new)
        self._offer(node)
        duplicates = [offered for offered, held in zip(pages, own) if offered != held]
        return PrefixMatch(own + new, RadixHandle(node, node.end)), duplicates

    def evict(self, num_pages: int) -> list[int]:
        now = self._clock()
        freed: list[int] = []
        while len(freed) < num_pages:
            victim = self._victims.select(now)
            if victim is None:
                break
            freed += self._cut(victim, num_pages - len(freed))
        self._num_evicted_pages += len(freed)
        return freed

    def _encode(self, token_ids: Sequence[int]) -> bytes:
        """Whole pages of the tokens as int32 bytes."""
        usable = len(token_ids) // self.page_size * self.page_size
        return array("i", token_ids[:usable]).tobytes()

    def _first_page(self, node: _Node) -> bytes:
        return node.tokens[: self._page_bytes]

    def _path(self, node: _Node) -> Iterator[_Node]:
        """The node and those above it, without the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _offer(self, node: _Node) -> None:
        """Make the node a candidate for eviction, or a changed one, if nobody needs it."""
        if node.parent is not None and node.locks == 0 and not node.children:
            self._victims.put(node)

    def _describe(self, node: _Node) -> Entry:
        num_tokens = node.end - node.start
        cost = recompute_cost(node.start, num_tokens)
        return Entry(node.history, cost, num_tokens * self._bytes_per_token, num_tokens, node.start)

    def _walk(self, data: bytes) -> tuple[_Node, int]:
        """The node where the longest cached prefix of `data` ends, split there if need be, and its length in
        bytes.
        """
        node, pos = self._root, 0
        while pos < len(data):
            child = node.children.get(data[pos : pos + self._page_bytes])
            if child is None:
                break
            if not data.startswith(child.tokens, pos):
                upper = self._split(child, self._common_pages(child.tokens, data, pos))
                return upper, pos + len(upper.tokens)
            node = child
            pos += len(child.tokens)
        return node, pos

    def _grow(self, node: _Node, tokens: bytes, pages: list[int], now: float) -> _Node:
        """Hang new pages under the node: one leaf, or a chain with a node for each use count where pages come back that are
        remembered. Returns the last one.
        """
        start = 0
        for _, group in groupby(self._histories(node, tokens, now), key=lambda history: history.num_uses):
            history, *more = group
            stop = start + 1 + len(more)
            segment = tokens[start * self._page_bytes : stop * self._page_bytes]
            child = _Node(node, segment, pages[start:stop], node.end, history)
            node.children[self._first_page(child)] = child
            node, start = child, stop
        return node

    def _histories(self, node: _Node, tokens: bytes, now: float) -> list[History]:
        """One a page of tokens that are to be held below the node: used for the first time, unless a ghost knows better."""
        first, ghosts = self._recorder.first(now), self._victims.ghosts
        if ghosts is None:
            return [first] * (len(tokens) // self._page_bytes)
        histories = []
        for fingerprint in self._chain(self._end_print(node), tokens):
            known = ghosts.revive(fingerprint)
            histories.append(self._recorder.again(known, now) if known else first)
        return histories

    def _common_pages(self, segment: bytes, data: bytes, pos: int) -> int:
        """Whole pages that `segment` and data[pos:] share; at least the first one, fewer than all. Halves the
        rest each time.
        """
        low, high, width = 1, len(segment) // self._page_bytes - 1, self._page_bytes
        while low < high:
            middle = (low + high + 1) // 2
            if data.startswith(segment[low * width : middle * width], pos + low * width):
                low = middle
            else:
                high = middle - 1
        return low

    def _split(self, lower: _Node, num_pages: int) -> _Node:
        """Cut a segment after num_pages pages. Returns the new upper half; both halves keep history and
        locks.
        """
        assert 0 < num_pages < len(lower.pages)
        assert lower.parent is not None
        cut = num_pages * self._page_bytes
        upper = _Node(lower.parent, lower.tokens[:cut], lower.pages[:num_pages], lower.start, lower.history)
        upper.locks = lower.locks
        lower.parent.children[self._first_page(lower)] = upper
        lower.parent, lower.start = upper, upper.end
        lower.tokens, lower.pages = lower.tokens[cut:], lower.pages[num_pages:]
        upper.children[self._first_page(lower)] = lower
        if lower.prints is not None:
            upper.prints, lower.prints = lower.prints[:num_pages], lower.prints[num_pages:]
        self._offer(lower)
        return upper

    def _cut(self, victim: Victim, num_pages: int) -> list[int]:
        """Take up to num_pages pages off the end of the victim leaf; an emptied leaf leaves the tree."""
        node: _Node = victim.candidate
        assert node.parent is not None, "the root holds nothing"
        assert node.locks == 0
        assert not node.children
        kept = max(0, len(node.pages) - num_pages)
        if self._victims.ghosts is not None:
            self._remember(victim, kept)
        freed = node.pages[kept:]
        self._num_evictable -= len(freed)
        if kept:
            node.pages, node.tokens = node.pages[:kept], node.tokens[: kept * self._page_bytes]
            node.prints = node.prints[:kept] if node.prints else None
            self._offer(node)
            return freed
        parent = node.parent
        del parent.children[self._first_page(node)]
        self._victims.discard(node)
        node.parent, node.pages, node.tokens = None, [], b""
        self._offer(parent)
        return freed

    def _remember(self, victim: Victim, kept: int) -> None:
        """Put the pages of the victim from number `kept` on into the ghost list, each with its own cost and
        depth.
        """
        node, size = victim.candidate, self.page_size
        prints, num_bytes = self._prints(node), size * self._bytes_per_token
        pages = []
        for index in range(kept, len(node.pages)):
            depth = node.start + index * size
            entry = Entry(node.history, recompute_work(depth, size), num_bytes, size, depth)
            pages.append((prints[index], entry))
        self._victims.evicted(victim, pages)

    def _tell_misses(self, node: _Node, data: bytes, pos: int, now: float) -> None:
        """Look up the pages that follow the cached prefix among the ghosts, until one is not there."""
        num_held = self._num_evictable + self._num_protected
        for fingerprint in self._chain(self._end_print(node), data, pos):
            if not self._victims.missed(fingerprint, now, num_held):
                break

    def _chain(self, fingerprint: int, tokens: bytes, start: int = 0) -> Iterator[int]:
        """Fingerprints of the pages of `tokens` from byte `start` on: each one is a hash of the one before and of the page."""
        for pos in range(start, len(tokens), self._page_bytes):
            fingerprint = hash((fingerprint, tokens[pos : pos + self._page_bytes]))
            yield fingerprint

    def _end_print(self, node: _Node) -> int:
        return 0 if node.parent is None else self._prints(node)[-1]

    def _prints(self, node: _Node) -> list[int]:
        """Fingerprints of a node's pages: a chain from the root, so that they don't depend on how it was split."""
        missing = []
        for step in self._path(node):
            if step.prints is not None:
                break
            missing.append(step)
        for step in reversed(missing):
            assert step.parent is not None
            step.prints = list(self._chain(self._end_print(step.parent), step.tokens))
        assert node.prints is not None
        return node.prints
