"""Replays a trace through the real prefix cache under one policy, and through Belady's furthest-next-use for comparison.

One request runs at a time: match the prompt, lock what was found, evict what is missing, insert prompt and answer, unlock.
A page of the cache is a block of the trace. The cache's clock is the trace's.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from eviction_traces import Trace
from minisgl.eviction import EvictionPolicy, recompute_cost
from minisgl.kvcache import PageAllocator, RadixPrefixCache


@dataclass
class Replay:
    """What one policy did with one trace. Tokens are of prompts, in whole blocks.

    cost: work of recomputing what missed, in token pairs (recompute_cost). evict_seconds: spent in `evict`, for num_evicted
    pages. weights: (seconds, weights of the experts) at a hundred moments.
    """

    policy: str
    prompt_tokens: int = 0
    hit_tokens: int = 0
    cost: float = 0.0
    num_evicted: int = 0
    evict_seconds: float = 0.0
    num_ghost_hits: int = 0
    weights: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    @property
    def recomputed_tokens(self) -> int:
        return self.prompt_tokens - self.hit_tokens

    def count(self, num_prompt: int, num_hit: int, block_tokens: int) -> None:
        self.prompt_tokens += num_prompt * block_tokens
        self.hit_tokens += num_hit * block_tokens
        self.cost += recompute_cost(num_hit * block_tokens, (num_prompt - num_hit) * block_tokens)


def replay(trace: Trace, policy: EvictionPolicy, num_pages: int) -> Replay:
    """Through RadixPrefixCache with num_pages pages of one block each. Checks at the end that no page was lost."""
    now = 0.0
    size = trace.block_tokens
    cache = RadixPrefixCache(size, policy, clock=lambda: now)
    allocator = PageAllocator(num_pages + 1)
    result = Replay(policy.name)
    every = max(1, len(trace.requests) // 100)
    for number, request in enumerate(trace.requests):
        now = request.time
        blocks = request.blocks[:num_pages]
        tokens = np.repeat(np.array(blocks, dtype=np.int32), size).tolist()
        match = cache.match(tokens[: request.num_prompt * size])
        cache.lock(match.handle)
        num_hit = len(match.pages)
        result.count(min(request.num_prompt, num_pages), num_hit, size)
        missing = len(blocks) - num_hit
        if missing > allocator.num_free:
            start = time.perf_counter()
            pages = cache.evict(missing - allocator.num_free)
            result.evict_seconds += time.perf_counter() - start
            result.num_evicted += len(pages)
            allocator.free(pages)
        pages = allocator.alloc(missing)
        assert pages is not None
        _, duplicates = cache.insert(tokens, match.pages + pages)
        allocator.free(duplicates)
        cache.unlock(match.handle)
        if cache.stats().weights and number % every == 0:
            result.weights.append((now, dict(cache.stats().weights)))
    result.num_ghost_hits = cache.stats().num_ghost_hits
    assert cache.num_protected == 0
    assert allocator.num_free + cache.num_evictable == num_pages
    return result


def belady(trace: Trace, num_pages: int) -> Replay:
    """The same with knowledge of the future: the block whose next use is furthest goes first, of equals the deeper one.

    A block is used whenever a longer prefix is, so its next use is never later: what is held stays a tree by itself.
    """
    result = Replay("belady")
    paths = _paths([request.blocks[:num_pages] for request in trace.requests])
    next_use = _next_uses(paths)
    held: dict[int, float] = {}  # block of a path -> its next use
    heap: list[tuple[float, int, int]] = []
    for number, request in enumerate(trace.requests):
        path, uses = paths[number], next_use[number]
        prompt = path[: request.num_prompt]
        num_hit = next((i for i, block in enumerate(prompt) if block not in held), len(prompt))
        result.count(len(prompt), num_hit, trace.block_tokens)
        for block in path:  # in use, so no candidate: the stale items of the heap are skipped
            held[block] = float(number)
        while len(held) > num_pages:
            negated, _, block = heapq.heappop(heap)
            if held.get(block) == -negated:
                del held[block]
                result.num_evicted += 1
        for depth, (block, use) in enumerate(zip(path, uses)):
            held[block] = use
            heapq.heappush(heap, (-use, -depth, block))
    return result


def _paths(requests: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Each request's blocks as numbers that stand for the whole prefix: equal only where everything before is equal."""
    numbers: dict[tuple[int, int], int] = {}
    paths = []
    for blocks in requests:
        node, path = -1, []
        for block in blocks:
            node = numbers.setdefault((node, block), len(numbers))
            path.append(node)
        paths.append(path)
    return paths


def _next_uses(paths: Sequence[Sequence[int]]) -> list[list[float]]:
    """For each block of each request, the number of the next request that has it; infinity if there is none."""
    seen: dict[int, float] = {}
    uses: list[list[float]] = []
    for number in range(len(paths) - 1, -1, -1):
        uses.append([seen.get(block, float("inf")) for block in paths[number]])
        seen.update(dict.fromkeys(paths[number], float(number)))
    return uses[::-1]
