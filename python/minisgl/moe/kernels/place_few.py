"""Planning of an expert cache for the few routes of a decode step, which one wave always serves.

It decides what `place` decides, by the same definition, and no later than it must: everything that depends on the cache alone,
down to the order in which slots would be given up, is worked out before the routing is there, while the router still runs.
With the routing, a few comparisons of routes with slots are left, and what threads exchange stays within the kernel.
"""

import triton
import triton.language as tl

from minisgl.moe.kernels.dependent import start_next, wait_for_previous

_LAST = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # score of a slot that does not exist


@triton.jit
def order_of_victims(s, expert_s, last_use_E, uses_E, S: tl.constexpr):
    """How many slots would be given up before each: those whose experts were used longest ago, then least often, go first."""
    held = expert_s >= 0
    stamp = tl.load(last_use_E + expert_s, mask=held, other=-1).to(tl.int64)
    score = (stamp << 32) | tl.load(uses_E + expert_s, mask=held, other=0).to(tl.int64)
    score = tl.where(s < S, score, _LAST)
    lower = score[None, :] < score[:, None]
    tie = (score[None, :] == score[:, None]) & (s[None, :] < s[:, None])
    return tl.sum((lower | tie).to(tl.int32), 1)


@triton.jit
def count_among(ids, slot):
    """Of every route: (whether it is the first of its expert, routes of its expert, how many missed experts are lower)."""
    r = tl.arange(0, ids.shape[0])
    needed = ids >= 0
    same = (ids[:, None] == ids[None, :]) & needed[None, :]
    is_first = needed & (tl.sum((same & (r[None, :] < r[:, None])).to(tl.int32), 1) == 0)
    missed = is_first & (slot < 0)
    turn = tl.sum(((ids[None, :] < ids[:, None]) & missed[None, :]).to(tl.int32), 1)
    return is_first, tl.sum(same.to(tl.int32), 1), turn


@triton.jit(do_not_specialize=["num_routes"])
def place_few_kernel(
    ids_R,  # int32 [R], -1: no expert
    slots_R,  # out int32 [R]: slot of a route, -1: no expert. Without JOINT -1 also where its expert must be fetched
    others_R,  # out int32 [R]. JOINT: turn of the fetch that a route waits for, -1: none. Else its slot if it waits, or -1
    slot_of_E,  # from here to `clock`: the cache's state, see `place`
    expert_of_S,
    last_use_E,
    uses_E,
    clock,
    fetch_experts_S,  # out int32 [S]
    fetch_slots_S,  # out int32 [S]
    num_fetch,  # out int32 [1]
    arrived_S1,  # out int32 [S + 1], with JOINT: zero
    counters,  # int64: hits, misses, evictions
    num_routes,
    S: tl.constexpr,
    JOINT: tl.constexpr,  # one launch computes all routes, and waits for those that are fetched
    COUNT: tl.constexpr,  # whether it is counted
    AHEAD: tl.constexpr,  # whether the kernel before this one leaves the state alone
    ROUTES: tl.constexpr,  # power of two >= R
    SLOTS: tl.constexpr,  # power of two > S
    PDL: tl.constexpr,
):
    # 1. What the cache alone decides.
    if not AHEAD:
        wait_for_previous(PDL)
    s, r = tl.arange(0, SLOTS), tl.arange(0, ROUTES)
    expert_s = tl.load(expert_of_S + s, mask=s < S, other=-1)
    order = order_of_victims(s, expert_s, last_use_E, uses_E, S)
    now = tl.load(clock) + 1
    counted = tl.load(counters), tl.load(counters + 1), tl.load(counters + 2)

    # 2. Which experts are needed, which of them have a slot, and in which turn the others are fetched.
    if AHEAD:
        wait_for_previous(PDL)
    start_next(PDL)
    ids = tl.load(ids_R + r, mask=r < num_routes, other=-1)
    needed = ids >= 0
    slot = tl.load(slot_of_E + ids, mask=needed, other=-1)
    uses = tl.load(uses_E + ids, mask=needed, other=0)
    is_first, times, turn = count_among(ids, slot)
    is_hit, is_missed = is_first & (slot >= 0), is_first & (slot < 0)
    num_hits, num_loaded = tl.sum(is_hit.to(tl.int32), 0), tl.sum(is_missed.to(tl.int32), 0)

    # 3. Whose slots these take: the first in order, hits left out.
    same_slot = (slot[None, :] == s[:, None]) & is_hit[None, :]
    kept = tl.sum(same_slot.to(tl.int32), 1) > 0
    order_r = tl.sum(tl.where(same_slot, order[:, None], 0), 0)
    order -= tl.sum(((order_r[None, :] < order[:, None]) & is_hit[None, :]).to(tl.int32), 1)
    taken = (s < S) & (kept == 0) & (order < num_loaded)
    takes = taken[:, None] & (order[:, None] == turn[None, :]) & (needed & (slot < 0))[None, :]
    new_slot = tl.sum(tl.where(takes, s[:, None], 0), 0)
    new_expert = tl.max(tl.where(takes, ids[None, :], -1), 1)
    evicted = taken & (expert_s >= 0)
    num_evicted = tl.sum(evicted.to(tl.int32), 0)

    # 4. What that means for every route, and for the cache.
    tl.debug_barrier()  # every thread has read what others overwrite
    waits = needed & (slot < 0)
    if JOINT:
        tl.store(slots_R + r, tl.where(waits, new_slot, slot), mask=r < num_routes)
        tl.store(others_R + r, tl.where(waits, turn, -1), mask=r < num_routes)
        tl.store(arrived_S1 + s, tl.zeros_like(s), mask=s <= S)
    else:
        tl.store(slots_R + r, slot, mask=r < num_routes)
        tl.store(others_R + r, tl.where(waits, new_slot, -1), mask=r < num_routes)
    tl.store(fetch_experts_S + turn, ids, mask=is_missed)
    tl.store(fetch_slots_S + turn, new_slot, mask=is_missed)
    tl.store(num_fetch, num_loaded)
    tl.store(slot_of_E + expert_s, -1, mask=evicted)
    tl.store(slot_of_E + new_expert, s, mask=taken)
    tl.store(expert_of_S + s, new_expert, mask=taken)
    tl.store(clock, now)
    tl.store(last_use_E + ids, now, mask=is_first)
    tl.store(uses_E + ids, uses + times, mask=is_first)
    if COUNT:
        tl.store(counters, counted[0] + num_hits)
        tl.store(counters + 1, counted[1] + num_loaded)
        tl.store(counters + 2, counted[2] + num_evicted)
