"""Planning of an expert cache for the few routes of a decode step, which one wave always serves.

It decides what `place` decides, by the same definition, and no later than it must: everything that depends on the cache alone,
down to the order in which slots would be given up, is worked out before the routing is there, while the router still runs.
With the routing, a few comparisons of routes with slots are left, and what threads exchange stays within the kernel. JOINT,
the kernels behind it run already, and are told what they need (`told`) before it writes down what the next step will need.

With A early slots (see `early`) a slot's number is not yet its place in the slab, and what came early is not fetched.
"""

import triton
import triton.language as tl

from minisgl.moe.kernels.dependent import start_next, wait_for_previous
from minisgl.moe.kernels.early import came_early, count_early, exchange_early, look_early
from minisgl.moe.kernels.told import fence, fetch_word, route_word

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
    return is_first, tl.sum(same.to(tl.int32), 1), turn_among(ids, is_first & (slot < 0))


@triton.jit
def turn_among(ids, chosen):
    """Of every route: how many of the chosen routes have a lower expert."""
    return tl.sum(((ids[None, :] < ids[:, None]) & chosen[None, :]).to(tl.int32), 1)


@triton.jit
def slots_given_up(exists, order, kept, is_hit, count):
    """(the first `count` slots in order, and the order) without those of hits, kept [R, S]."""
    order_r = tl.sum(tl.where(kept, order[None, :], 0), 1)
    order -= tl.sum(((order_r[:, None] < order[None, :]) & is_hit[:, None]).to(tl.int32), 0)
    return exists & (tl.sum(kept.to(tl.int32), 0) == 0) & (order < count), order


@triton.jit
def clear(arrived_S1, told_3M, s, S: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr):
    """What the kernels behind this one look at; done when this returns."""
    m = tl.arange(0, MOST)
    tl.store(arrived_S1 + s, tl.zeros_like(s), mask=s <= S)
    for row in tl.static_range(3):
        tl.store(told_3M + row * MOST + m, tl.zeros_like(m))
    tl.debug_barrier()
    fence(0, PDL)


@triton.jit
def tell(
    told_3M,
    r,
    routes,
    fetches,
    num_routes,
    num_fetched,
    ROUTES: tl.constexpr,
    MOST: tl.constexpr,
    A: tl.constexpr,
):
    """routes: (place, turn of the fetch it waits for or -1, whether it needs an expert) of every route; fetches: (expert, turn,
    chunks there, whether it is the first route of an expert to be fetched)."""
    expert, turn, there, is_fetched = fetches
    word = fetch_word(expert, routes[0], num_fetched)
    tl.store(told_3M + MOST + turn, word, mask=is_fetched)
    none = tl.full((ROUTES,), -1, tl.int32)
    tl.store(told_3M + MOST + r, none, mask=r < tl.where(num_fetched == 0, 1, 0))
    if A > 0:
        tl.store(told_3M + 2 * MOST + turn, there + 1, mask=is_fetched)
    tl.store(told_3M + r, route_word(routes[0], routes[1], routes[2], num_fetched), mask=r < num_routes)


@triton.jit(do_not_specialize=["num_routes"])
def place_few_kernel(
    ids_R,  # int32 [R], -1: no expert
    slots_R,  # out int32 [R]: place of a route, -1: no expert. Without JOINT -1 also where its expert must be fetched
    others_R,  # out int32 [R]. JOINT: turn of the fetch that a route waits for, -1: none. Else its slot if it waits, or -1
    slot_of_E,  # from here to `clock`: the cache's state, see `place`
    expert_of_S,
    last_use_E,
    uses_E,
    clock,
    fetch_experts_S,  # out int32 [S]
    fetch_slots_S,  # out int32 [S]: places
    fetch_chunks_S,  # out int32 [S], with early slots: chunks of the record that are there already
    num_fetch,  # out int32 [1]
    arrived_S1,  # out int32 [S + 1], with JOINT: zero, until the kernels behind this one count
    told_3M,  # out int32 [3, M], with JOINT: see `told`
    counters,  # int64: hits, misses, evictions, and with early slots those of `early`
    place_of_S,  # int32 [S + A]. From here to `progress_N`: see `early`
    expert_of_A,
    chunks_of_A,
    listed_AF,
    listing,
    progress_N,
    num_routes,
    S: tl.constexpr,
    A: tl.constexpr,  # only with JOINT
    N: tl.constexpr,  # programs that fetch early
    CHUNKS: tl.constexpr,  # of a record, as they fetch it
    JOINT: tl.constexpr,  # one launch computes all routes, and waits for those that are fetched
    COUNT: tl.constexpr,  # whether it is counted
    AHEAD: tl.constexpr,  # whether the kernel before this one leaves the state alone
    ROUTES: tl.constexpr,  # power of two >= R
    SLOTS: tl.constexpr,  # power of two > S
    MOST: tl.constexpr,  # M: power of two >= R
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
    place_s = s
    if A > 0:
        place_s = tl.load(place_of_S + s, mask=s < S, other=0)
        early = look_early(listed_AF, listing, now - 1, expert_of_A, chunks_of_A, place_of_S, A, S)
    if JOINT:
        clear(arrived_S1, told_3M, s, S, MOST, PDL)

    # 2. Which experts are needed, which of them have a slot, and in which turn the others get one.
    if AHEAD:
        wait_for_previous(PDL)
    start_next(PDL)
    if A > 0:  # first of all: what copies on a guess stops
        tl.store(clock, now)
        came = came_early(early, progress_N, N, CHUNKS)
    ids = tl.load(ids_R + r, mask=r < num_routes, other=-1)
    needed = ids >= 0
    found = (ids[:, None] == expert_s[None, :]) & needed[:, None]
    slot = tl.max(tl.where(found, s[None, :], -1), 1)
    uses = tl.load(uses_E + ids, mask=needed, other=0)
    is_first, times, turn = count_among(ids, slot)
    lacks = needed & (slot < 0)
    is_hit, is_missed = is_first & (slot >= 0), is_first & lacks
    num_hits, num_loaded = tl.sum(is_hit.to(tl.int32), 0), tl.sum(is_missed.to(tl.int32), 0)

    # 3. Whose slots these take: the first in order, hits left out.
    taken, order = slots_given_up(s < S, order, found & is_hit[:, None], is_hit, num_loaded)
    takes = taken[None, :] & (order[None, :] == turn[:, None]) & lacks[:, None]
    new_slot = tl.sum(tl.where(takes, s[None, :], 0), 1)
    victim = tl.sum(tl.where(takes, place_s[None, :], 0), 1)
    place = tl.where(lacks, victim, tl.max(tl.where(found, place_s[None, :], -1), 1))

    # 4. What has to be fetched.
    there, fetched, waits = tl.zeros_like(ids), is_missed, lacks
    if A > 0:
        chunks = early[1] + came
        same = (ids[:, None] == early[0][None, :]) & (chunks > 0)[None, :] & lacks[:, None]
        there = tl.sum(tl.where(same, chunks[None, :], 0), 1)
        place = tl.where(there > 0, tl.sum(tl.where(same, early[2][None, :], 0), 1), place)
        fetched, waits = is_missed & (there < CHUNKS), lacks & (there < CHUNKS)
        turn = turn_among(ids, fetched)
    num_fetched = tl.sum(fetched.to(tl.int32), 0)
    waits_for = tl.where(waits, turn, -1)
    if JOINT:
        routes, fetches = (place, waits_for, needed), (ids, turn, there, fetched)
        tell(told_3M, r, routes, fetches, num_routes, num_fetched, ROUTES, MOST, A)
        tl.store(slots_R + r, place, mask=r < num_routes)
        tl.store(others_R + r, waits_for, mask=r < num_routes)
    else:
        tl.store(slots_R + r, slot, mask=r < num_routes)
        tl.store(others_R + r, tl.where(lacks, new_slot, -1), mask=r < num_routes)

    # 5. What that means for the cache.
    new_expert = tl.max(tl.where(takes, ids[:, None], -1), 0)
    evicted = taken & (expert_s >= 0)
    tl.debug_barrier()  # every thread has read what others overwrite
    tl.store(fetch_experts_S + turn, ids, mask=fetched)
    tl.store(fetch_slots_S + turn, place, mask=fetched)
    tl.store(num_fetch, num_fetched)
    tl.store(slot_of_E + expert_s, -1, mask=evicted)
    tl.store(slot_of_E + new_expert, s, mask=taken)
    tl.store(expert_of_S + s, new_expert, mask=taken)
    tl.store(clock, now)
    tl.store(last_use_E + ids, now, mask=is_first)
    tl.store(uses_E + ids, uses + times, mask=is_first)
    if A > 0:
        tl.store(fetch_chunks_S + turn, there, mask=fetched)
        exchange_early(
            same, is_missed, early, chunks, new_slot, victim, place_of_S, expert_of_A, chunks_of_A, A, S
        )
        count_early(counters, tl.sum(came, 0), fetched, tl.where(is_missed, there, 0))
    if COUNT:
        tl.store(counters, counted[0] + num_hits + num_loaded - num_fetched)
        tl.store(counters + 1, counted[1] + num_fetched)
        tl.store(counters + 2, counted[2] + tl.sum(evicted.to(tl.int32), 0))
    if JOINT:  # whoever waits for all counts waits for this, too
        tl.debug_barrier()
        tl.atomic_add(arrived_S1, 1, sem="release")
