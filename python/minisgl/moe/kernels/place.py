"""Planning of an expert cache in device memory: one small launch decides everything about one wave of one layer.

Which routed experts are in a slot, which are not, whose slot the missing ones take, and with that the slots of every route.
Nothing waits for the host, so a CUDA graph can hold it. `store.planning.place_step` is the definition in plain Python.

One program, because every decision needs all the others: E experts and S slots are one value a thread. Its threads exchange
what they know through small arrays in global memory, with a barrier after each write, and before one that overwrites what
every thread reads. The order of victims is a rank (how many slots score lower), since a sort would take many more barriers.

With A early slots (see `early`) a slot's number is not yet its place in the slab: `place_of_S` says that. An expert that came
early costs a victim as any other, but the two slots exchange places, and only what is missing of its record is fetched.
"""

import triton
import triton.language as tl

from minisgl.moe.kernels.early import arrived_early, count_early, early_sources, give_places, list_fetches

IDLE = tl.constexpr(0)  # not needed by this wave
HIT = tl.constexpr(1)  # in a slot
LOADED = tl.constexpr(2)  # gets a slot in this wave
PENDING = tl.constexpr(3)  # waits for a later wave

_LAST = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # score of a slot that does not exist


@triton.jit
def count_uses(ids_R, num_routes, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """Routes of each expert."""
    counts = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, num_routes, CHUNK):
        routes = start + tl.arange(0, CHUNK)
        ids = tl.load(ids_R + routes, mask=routes < num_routes, other=-1)
        counts += tl.histogram(tl.where(ids < 0, EXPERTS - 1, ids), EXPERTS)
    return counts


@triton.jit
def victim_rank(s, score, scores_S, S: tl.constexpr, SLOTS: tl.constexpr):
    """How many slots go before each."""
    rank = tl.zeros((SLOTS,), tl.int32)
    for start in range(0, S, 16):
        other = start + tl.arange(0, 16)
        other_score = tl.load(scores_S + other, mask=other < S, other=_LAST)
        lower = other_score[None, :] < score[:, None]
        tie = (other_score[None, :] == score[:, None]) & (other[None, :] < s[:, None])
        rank += tl.sum((lower | tie).to(tl.int32), 1)
    return rank


@triton.jit(do_not_specialize=["num_routes"])
def place_kernel(
    ids_R,  # int32 [R], -1: no expert
    hit_slots_R,  # out int32 [R]: slot of a route whose expert was in one, else -1
    miss_slots_R,  # out int32 [R]: slot of a route whose expert is fetched in this wave, else -1
    slot_of_E,  # int32 [E], -1: none. From here to `clock`: the cache's state
    expert_of_S,  # int32 [S], -1: empty
    last_use_E,  # int32 [E]: step of the latest use
    uses_E,  # int32 [E]: routes so far
    clock,  # int32 [1]: steps so far
    kind_E,  # int32 [E], carries what is PENDING from one wave of a step to the next
    scores_S,  # int64 [S], scratch
    fetch_experts_S,  # out int32 [S]
    fetch_slots_S,  # out int32 [S]: places
    fetch_chunks_S,  # out int32 [S], only with early slots: chunks of the record that are there already
    num_fetch,  # out int32 [1]
    counters,  # int64: hits, misses, evictions, and those of `early`
    place_of_S,  # int32 [S + A]. From here to `progress_N`: see `early`
    expert_of_A,
    chunks_of_A,
    listed_AF,
    listing,
    progress_N,
    scratch_3E,  # int32 [3, E]: experts in order of their victims, turn of a fetch and early slot of an expert
    num_routes,
    E: tl.constexpr,
    S: tl.constexpr,
    A: tl.constexpr,
    N: tl.constexpr,  # programs that fetch early
    CHUNKS: tl.constexpr,  # of a record, as they fetch it
    FIRST: tl.constexpr,  # first wave of a step
    COUNT: tl.constexpr,  # whether it is counted
    EXPERTS: tl.constexpr,  # power of two > E; the last bin counts the -1
    SLOTS: tl.constexpr,  # power of two >= S
    CHUNK: tl.constexpr,  # routes at a time
):
    # 1. Which experts are needed.
    e = tl.arange(0, EXPERTS)
    inside = e < E
    if FIRST:
        counts = count_uses(ids_R, num_routes, EXPERTS, CHUNK)
        needed = inside & (counts > 0)
        now = tl.load(clock) + 1
        uses = tl.load(uses_E + e, mask=needed, other=0)
        tl.debug_barrier()  # every thread has read what one of them overwrites
        tl.store(clock, now)
        tl.store(last_use_E + e, now, mask=needed)
        tl.store(uses_E + e, uses + counts, mask=needed)
        if A > 0:
            copied = arrived_early(listed_AF, listing, now - 1, progress_N, chunks_of_A, A, N, CHUNKS)
            tl.debug_barrier()
    else:
        needed = tl.load(kind_E + e, mask=inside, other=0) == PENDING
        tl.debug_barrier()

    # 2. Who has a slot, and who of the others gets one now.
    slot_e = tl.load(slot_of_E + e, mask=inside, other=-1)
    hit = needed & (slot_e >= 0)
    missed = needed & (slot_e < 0)
    turn = tl.cumsum(missed.to(tl.int32), 0) - 1
    num_hits = tl.sum(hit.to(tl.int32), 0)
    loaded = missed & (turn < S - num_hits)
    num_loaded = tl.sum(loaded.to(tl.int32), 0)
    kind = tl.where(hit, HIT, tl.where(loaded, LOADED, tl.where(missed, PENDING, IDLE)))
    num_fetched, loads_S = num_loaded, fetch_experts_S
    if A > 0:
        loads_S = scratch_3E
        source, there = early_sources(e, loaded, expert_of_A, chunks_of_A, A, FIRST)
        fetched = loaded & (there < CHUNKS)
        list_fetches(e, fetched, source, there, fetch_experts_S, fetch_chunks_S, scratch_3E, E)
        num_fetched = tl.sum(fetched.to(tl.int32), 0)
        kind = tl.where(loaded & (there == CHUNKS), HIT, kind)
    tl.store(kind_E + e, kind, mask=inside)
    tl.store(loads_S + turn, e, mask=loaded)
    tl.store(num_fetch, num_fetched)
    tl.debug_barrier()

    # 3. Whose slots they take: those whose experts were used longest ago, then least often. Never those of a hit: hits were
    # used just now, and no more slots are taken than there are others.
    num_evicted = 0
    if num_loaded > 0:
        s = tl.arange(0, SLOTS)
        expert_s = tl.load(expert_of_S + s, mask=s < S, other=-1)
        held = expert_s >= 0
        stamp = tl.load(last_use_E + expert_s, mask=held, other=-1).to(tl.int64)
        score = (stamp << 32) | tl.load(uses_E + expert_s, mask=held, other=0).to(tl.int64)
        score = tl.where(s < S, score, _LAST)
        tl.store(scores_S + s, score, mask=s < S)
        tl.debug_barrier()
        rank = victim_rank(s, score, scores_S, S, SLOTS)
        taken = (s < S) & (rank < num_loaded)
        evicted = taken & held
        num_evicted = tl.sum(evicted.to(tl.int32), 0)
        tl.store(slot_of_E + expert_s, -1, mask=evicted)
        new_expert = tl.load(loads_S + rank, mask=taken, other=0)
        tl.store(slot_of_E + new_expert, s, mask=taken)
        tl.store(expert_of_S + s, new_expert, mask=taken)
        if A > 0:
            give_places(
                s, taken, new_expert, fetch_slots_S, place_of_S, expert_of_A, chunks_of_A, scratch_3E, E, S
            )
        else:
            tl.store(fetch_slots_S + rank, s, mask=taken)
        tl.debug_barrier()

    # 4. What that means for every route.
    for start in range(0, num_routes, CHUNK):
        routes = start + tl.arange(0, CHUNK)
        ids = tl.load(ids_R + routes, mask=routes < num_routes, other=-1)
        slot = tl.load(slot_of_E + ids, mask=ids >= 0, other=-1)
        if A > 0:
            slot = tl.load(place_of_S + slot, mask=slot >= 0, other=-1)
        kind_r = tl.load(kind_E + ids, mask=ids >= 0, other=0)
        tl.store(hit_slots_R + routes, tl.where(kind_r == HIT, slot, -1), mask=routes < num_routes)
        tl.store(miss_slots_R + routes, tl.where(kind_r == LOADED, slot, -1), mask=routes < num_routes)
    if COUNT:
        tl.store(counters, tl.load(counters) + num_hits + num_loaded - num_fetched)
        tl.store(counters + 1, tl.load(counters + 1) + num_fetched)
        tl.store(counters + 2, tl.load(counters + 2) + num_evicted)
    if A > 0 and FIRST:  # a prompt's end saves nothing: its experts pass by whole
        count_early(counters, copied, fetched & COUNT, there)
