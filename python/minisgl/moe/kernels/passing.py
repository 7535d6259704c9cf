"""Planning of a short prompt in device memory: which of its experts are in a slot, and through which transient slots the others
pass by.

The cache is only read: `place` decides what the prompt's end leaves in it. What it lacks passes in waves of `size` experts, one
behind the other through the same transient slots, first what the last tokens use, so that few waves hold it, then the others,
each in ascending order. `store.prompts.pass_step` is the definition in plain Python.

Every program works out the whole plan, writes the same tables, and reads of them what its own routes need; so none waits for
another.
"""

import triton
import triton.language as tl

from minisgl.moe.kernels.place import count_uses


@triton.jit(do_not_specialize=["num_routes", "num_last", "num_waves", "size"])
def pass_kernel(
    ids_R,  # int32 [R], -1: no expert
    slot_of_E,  # int32 [E], -1: none
    place_of_S,  # int32 [S + A]: where in the slab a slot is
    places_WE,  # out int32 [1 + waves, E]: place of each expert in the cache's slab, then, by wave, in the transient one
    places_WR,  # out int32 [1 + waves, R]: the same of each route; -1 where it is elsewhere
    fetch_experts_WX,  # out int32 [waves, size]
    fetch_slots_WX,  # out int32 [waves, size]
    num_fetch_W4,  # out int32 [waves, 4], the first of each: pointers that are aligned alike need one kernel only
    counters,  # int64: hits, misses
    num_routes,
    num_last,  # routes of the last tokens
    num_waves,
    size,  # experts a wave
    E: tl.constexpr,
    EXPERTS: tl.constexpr,  # power of two > E; the last bin counts the -1
    CHUNK: tl.constexpr,  # routes at a time, and of a program
):
    e = tl.arange(0, EXPERTS)
    inside = e < E
    needed = inside & (count_uses(ids_R, num_routes, EXPERTS, CHUNK) > 0)
    is_last = count_uses(ids_R + num_routes - num_last, num_last, EXPERTS, CHUNK) > 0
    slot = tl.load(slot_of_E + e, mask=inside, other=-1)
    hit, missed = needed & (slot >= 0), needed & (slot < 0)
    first, later = missed & is_last, missed & (is_last == 0)
    num_first = tl.sum(first.to(tl.int32), 0)
    turn = tl.where(first, tl.cumsum(first.to(tl.int32), 0), num_first + tl.cumsum(later.to(tl.int32), 0)) - 1
    wave, place = turn // size, turn % size
    tl.store(places_WE + e, tl.load(place_of_S + slot, mask=hit, other=-1), mask=inside)
    for w in range(num_waves):
        here = missed & (wave == w)
        tl.store(places_WE + (1 + w) * E + e, tl.where(here, place, -1), mask=inside)
        tl.store(num_fetch_W4 + 4 * w, tl.sum(here.to(tl.int32), 0))
    tl.store(fetch_experts_WX + turn, e, mask=missed)
    tl.store(fetch_slots_WX + turn, place, mask=missed)
    if tl.program_id(0) == 0:
        tl.store(counters, tl.load(counters) + tl.sum(hit.to(tl.int32), 0))
        tl.store(counters + 1, tl.load(counters + 1) + tl.sum(missed.to(tl.int32), 0))
    tl.debug_barrier()
    route = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_R + route, mask=route < num_routes, other=-1)
    for w in range(num_waves + 1):
        value = tl.load(places_WE + w * E + ids, mask=ids >= 0, other=-1)
        tl.store(places_WR + w * num_routes + route, value, mask=route < num_routes)
