"""Prefetching of experts: which of those that a router guesses to list, and a copy that ends as soon as demand begins.

`store.early.EarlySlots` is the definition in plain Python. The list belongs to the planning kernel: nobody else writes it, so
the copy may run beside the place kernel. They meet in two places only: the clock, by which the copy sees that the layer has
begun and its list is out of date, and the progress of every program, by which the place kernel sees how much has come. A chunk
that is under way at that moment may still be written, and the same bytes a second time by the layer's own fetch: that is
harmless, as it only ever belongs to the record that its place is given to.
"""

import triton
import triton.language as tl

FIELDS = tl.constexpr(
    5
)  # of a listed record: expert, place in the slab, chunks before it, chunks there, early slot
EARLY_SLOTS = tl.constexpr(2)  # power of two >= A

PLANS = tl.constexpr(3)  # counters, after hits, misses, evictions
COPIED = tl.constexpr(4)
USEFUL = tl.constexpr(5)
JUDGED_PLANS = tl.constexpr(6)  # both as they were at the latest judgement
JUDGED_USEFUL = tl.constexpr(7)
OFF = tl.constexpr(8)
SAVED = tl.constexpr(9)  # chunks that the layer's own fetches left out


@triton.jit
def is_worth_it(counters, WINDOW: tl.constexpr, COST: tl.constexpr):
    """Whether prefetching goes on; judged once a window."""
    num_plans, useful, off = tl.load(counters + PLANS), tl.load(counters + USEFUL), tl.load(counters + OFF)
    plans = num_plans - tl.load(counters + JUDGED_PLANS)
    gained = useful - tl.load(counters + JUDGED_USEFUL)
    due = plans >= WINDOW
    off = tl.where(due & (gained < plans * COST), 1, off)
    tl.debug_barrier()
    tl.store(counters + OFF, off)
    tl.store(counters + JUDGED_PLANS, num_plans, mask=due)
    tl.store(counters + JUDGED_USEFUL, useful, mask=due)
    return off == 0


@triton.jit
def plan_early_kernel(
    ids_TK,  # int32 [T, K], what a router guesses, the likeliest first; -1: no expert
    slot_of_E,  # int32 [E]
    place_of_S,  # int32 [S + A]
    expert_of_A,  # int32 [A]
    chunks_of_A,  # int32 [A]
    clock,  # int32 [1]
    counters,  # int64
    listed_AF,  # out int32 [A, FIELDS]
    listing,  # out int32 [2]: chunks to copy, the clock at this moment
    progress_N,  # out int32 [N]: the next chunk of every program
    T,
    K: tl.constexpr,
    S: tl.constexpr,
    A: tl.constexpr,
    N: tl.constexpr,  # programs that copy, a power of two
    CHUNKS: tl.constexpr,  # of a record
    WINDOW: tl.constexpr,
    COST: tl.constexpr,  # of a guess, in chunks
    ROUTES: tl.constexpr,  # power of two >= T * K
):
    is_on = is_worth_it(counters, WINDOW, COST)
    # 1. The first A distinct experts, by rank and then by token, that the cache lacks.
    r = tl.arange(0, ROUTES)
    a = tl.arange(0, EARLY_SLOTS)
    ids = tl.load(ids_TK + r % T * K + r // T, mask=r < T * K, other=-1)
    ids = tl.where(is_on, ids, -1)
    lacking = (ids >= 0) & (tl.load(slot_of_E + ids, mask=ids >= 0, other=0) < 0)
    wanted = tl.full((EARLY_SLOTS,), -1, tl.int32)
    for i in tl.static_range(A):
        first = tl.min(tl.where(lacking, r, ROUTES), 0)
        expert = tl.max(tl.where(r == first, ids, -1), 0)
        wanted = tl.where(a == i, expert, wanted)
        lacking = lacking & (ids != expert)

    # 2. Their early slots: the one that has them, else the next that has none of them.
    held = tl.load(expert_of_A + a, mask=a < A, other=-1)
    there = tl.load(chunks_of_A + a, mask=a < A, other=0)
    same = (wanted[:, None] == held[None, :]) & (wanted >= 0)[:, None]
    found = tl.sum(same.to(tl.int32), 1) > 0
    free = (tl.sum(same.to(tl.int32), 0) == 0) & (a < A)
    rank_wanted = tl.cumsum(((wanted >= 0) & (found == 0)).to(tl.int32), 0)
    rank_free = tl.cumsum(free.to(tl.int32), 0)
    new = (
        (rank_wanted[:, None] == rank_free[None, :]) & ((wanted >= 0) & (found == 0))[:, None] & free[None, :]
    )
    index = tl.sum(tl.where(same | new, a[None, :], 0), 1)
    chunks = tl.sum(tl.where(same, there[None, :], 0), 1)
    place = tl.load(place_of_S + S + index, mask=wanted >= 0, other=0)
    tl.debug_barrier()
    tl.store(expert_of_A + index, wanted, mask=wanted >= 0)
    tl.store(chunks_of_A + index, chunks, mask=wanted >= 0)

    # 3. The list.
    left = tl.where(wanted >= 0, CHUNKS - chunks, 0)
    entry = listed_AF + a * FIELDS
    tl.store(entry, wanted, mask=a < A)
    tl.store(entry + 1, place, mask=a < A)
    tl.store(entry + 2, tl.cumsum(left, 0) - left, mask=a < A)
    tl.store(entry + 3, chunks, mask=a < A)
    tl.store(entry + 4, index, mask=a < A)
    total = tl.sum(left, 0)
    tl.store(listing, total)
    tl.store(listing + 1, tl.load(clock))
    n = tl.arange(0, N)
    tl.store(progress_N + n, n)
    tl.store(counters + PLANS, tl.load(counters + PLANS) + (total > 0).to(tl.int64))


@triton.jit
def fetch_early_kernel(
    records_EW,
    slab_SW,
    listed_AF,
    listing,
    clock,
    progress_N,
    A: tl.constexpr,
    N: tl.constexpr,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,  # words
    MOST: tl.constexpr,  # chunks to copy at most, for tests: an interpreter has nobody who interrupts
):
    """Program n copies chunks n, n + N, ... of the list, and looks at the clock before each.

    It looks by an atomic of one thread, whose answer all threads get: a plain load would be one a thread, and those that saw
    the layer begin would leave the others to report a chunk that is not complete.
    """
    total = tl.minimum(tl.load(listing), MOST)
    opened = tl.load(listing + 1)
    chunk = tl.program_id(0)
    goes_on = (chunk < total) & (tl.atomic_add(clock, 0, sem="relaxed") == opened)
    while goes_on:
        entry = 0
        for i in tl.static_range(1, A):
            is_later = (tl.load(listed_AF + i * FIELDS) >= 0) & (chunk >= tl.load(listed_AF + i * FIELDS + 2))
            entry = tl.where(is_later, i, entry)
        listed = listed_AF + entry * FIELDS
        within = chunk - tl.load(listed + 2) + tl.load(listed + 3)
        word = within * CHUNK + tl.arange(0, CHUNK)
        expert, place = tl.load(listed).to(tl.int64), tl.load(listed + 1).to(tl.int64)
        value = tl.load(records_EW + expert * WORDS + word, mask=word < WORDS, other=0)
        tl.store(slab_SW + place * WORDS + word, value, mask=word < WORDS)
        chunk += N
        tl.debug_barrier()  # every thread has written its part of the chunk
        tl.atomic_xchg(progress_N + tl.program_id(0), chunk, sem="release")
        goes_on = (chunk < total) & (tl.atomic_add(clock, 0, sem="relaxed") == opened)


@triton.jit
def arrived_early(
    listed_AF,
    listing,
    before,
    progress_N,
    chunks_of_A,
    A: tl.constexpr,
    N: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Note in chunks_of_A what has come of the list that was made at time `before`; returns how many chunks that is."""
    copied = tl.min(tl.load(progress_N + tl.arange(0, N), volatile=True), 0)
    a = tl.arange(0, EARLY_SLOTS)
    entry = listed_AF + a * FIELDS
    there = tl.load(entry + 3, mask=a < A, other=0)
    expert = tl.load(entry, mask=a < A, other=-1)
    listed = tl.where(tl.load(listing + 1) == before, expert, -1) >= 0
    came = tl.minimum(tl.maximum(copied - tl.load(entry + 2, mask=a < A, other=0), 0), CHUNKS - there)
    tl.store(chunks_of_A + tl.load(entry + 4, mask=a < A, other=0), there + came, mask=listed)
    return tl.sum(tl.where(listed, came, 0), 0)


@triton.jit
def look_early(
    listed_AF, listing, before, expert_of_A, chunks_of_A, place_of_S, A: tl.constexpr, S: tl.constexpr
):
    """Of every early slot what doesn't change before the layer begins: (expert, chunks, place, whether it is on the list that
    was made at time `before`, chunks before it there)."""
    a = tl.arange(0, EARLY_SLOTS)
    expert = tl.load(expert_of_A + a, mask=a < A, other=-1)
    chunks = tl.load(chunks_of_A + a, mask=a < A, other=0)
    place = tl.load(place_of_S + S + a, mask=a < A, other=0)
    entry = listed_AF + a * FIELDS
    is_listed = (tl.load(entry, mask=a < A, other=-1) >= 0) & (tl.load(listing + 1) == before)
    match = (tl.load(entry + 4, mask=a < A, other=0)[None, :] == a[:, None]) & is_listed[None, :]
    chunks_before = tl.load(entry + 2, mask=a < A, other=0)
    return (
        expert,
        chunks,
        place,
        tl.sum(match.to(tl.int32), 1),
        tl.sum(tl.where(match, chunks_before[None, :], 0), 1),
    )


@triton.jit
def came_early(early, progress_N, N: tl.constexpr, CHUNKS: tl.constexpr):
    """Chunks that have come into each early slot by now of what it was listed for."""
    copied = tl.min(tl.load(progress_N + tl.arange(0, N), volatile=True), 0)
    return early[3] * tl.minimum(tl.maximum(copied - early[4], 0), CHUNKS - early[1])


@triton.jit
def exchange_early(same, is_missed, early, chunks, slot, place, place_of_S, expert_of_A, chunks_of_A, A: tl.constexpr,
    S: tl.constexpr):  # fmt: skip
    """Missed routes that found their expert in an early slot, same [R, A], exchange it with what the cache gave up for them:
    `slot`, which was at `place`."""
    a = tl.arange(0, EARLY_SLOTS)
    taken = same & is_missed[:, None]
    takes = tl.sum(taken.to(tl.int32), 1) > 0
    theirs = tl.sum(tl.where(taken, early[2][None, :], 0), 1)
    index = tl.sum(tl.where(taken, a[None, :], 0), 1)
    tl.store(place_of_S + slot, theirs, mask=takes)
    tl.store(place_of_S + S + index, place, mask=takes)
    gone = tl.sum(taken.to(tl.int32), 0) > 0
    tl.store(expert_of_A + a, -1, mask=gone & (a < A))
    tl.store(chunks_of_A + a, tl.where(gone, 0, chunks), mask=a < A)


@triton.jit
def early_sources(e, loaded, expert_of_A, chunks_of_A, A: tl.constexpr, FIRST: tl.constexpr):
    """(early slot, or -1, chunks there) of every expert that is being loaded. Only a step's first wave asks."""
    source, there = tl.where(loaded, -1, -1), tl.where(loaded, 0, 0)
    if FIRST:
        for i in tl.static_range(A):
            expert, chunks = tl.load(expert_of_A + i), tl.load(chunks_of_A + i)
            match = tl.where((e == expert) & loaded, chunks, 0) > 0
            source, there = tl.where(match, i, source), tl.where(match, chunks, there)
    return source, there


@triton.jit
def list_fetches(e, fetched, source, there, fetch_experts_S, fetch_chunks_S, scratch_3E, E: tl.constexpr):
    """The experts to fetch and what is there of them; scratch_3E: their turns, and where the others are."""
    turn = tl.cumsum(fetched.to(tl.int32), 0) - 1
    tl.store(fetch_experts_S + turn, e, mask=fetched)
    tl.store(fetch_chunks_S + turn, there, mask=fetched)
    tl.store(scratch_3E + E + e, tl.where(fetched, turn, -1), mask=e < E)
    tl.store(scratch_3E + 2 * E + e, source, mask=e < E)


@triton.jit
def give_places(
    s,
    taken,
    expert,
    fetch_slots_S,
    place_of_S,
    expert_of_A,
    chunks_of_A,
    scratch_3E,
    E: tl.constexpr,
    S: tl.constexpr,
):
    """Slots s that are taken for `expert` exchange places with the early slots that have it, and fetches learn their places."""
    source = tl.load(scratch_3E + 2 * E + expert, mask=taken, other=-1)
    turn = tl.load(scratch_3E + E + expert, mask=taken, other=-1)
    place = tl.load(place_of_S + s, mask=taken, other=0)
    swapped = source >= 0
    theirs = tl.load(place_of_S + S + source, mask=swapped, other=0)
    tl.debug_barrier()
    tl.store(place_of_S + S + source, place, mask=swapped)
    tl.store(place_of_S + s, theirs, mask=swapped)
    tl.store(expert_of_A + source, -1, mask=swapped)
    tl.store(chunks_of_A + source, 0, mask=swapped)
    tl.store(fetch_slots_S + turn, tl.where(swapped, theirs, place), mask=turn >= 0)


@triton.jit
def count_early(counters, copied, listed, there):
    saved = tl.sum(tl.where(listed, there, 0), 0)
    tl.store(counters + COPIED, tl.load(counters + COPIED) + copied)
    tl.store(counters + USEFUL, tl.load(counters + USEFUL) + tl.sum(there, 0))
    tl.store(counters + SAVED, tl.load(counters + SAVED) + saved)
