"""Routes sorted by slot, each slot's run padded to a multiple of BLOCK_M: one launch, no atomics, no host sync.

One program a slot. Each counts the routes of all slots (a histogram: R integers, read from L2), so that it
knows where its own run begins without waiting for anybody, and then writes its own run in ascending order of
routes. The usual three launches (count, prefix sum, scatter with atomics) cost more in launches than this
costs in repeated counting, and their order within a run changes from call to call.
"""

import triton
import triton.language as tl

from minisgl.moe.kernels.dependent import start_next, wait_for_previous


@triton.jit(do_not_specialize=["num_routes", "num_slots"])
def align_kernel(
    slots_R,  # int32 [R], -1: not here
    sorted_R,  # out int32 [capacity]: route numbers, padded with R
    block_slots,  # out int32 [capacity / BLOCK_M]: slot of each block
    num_blocks,  # out int32 [1]
    served_R,  # out int8 [R]: 1 where some wave of this step computes the route
    num_routes,
    num_slots,
    FIRST_WAVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BINS: tl.constexpr,  # power of two > num_slots; the last bin counts the -1
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    slot = tl.program_id(0)
    wait_for_previous(PDL)
    start_next(PDL)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, num_routes, CHUNK):
        routes = start + tl.arange(0, CHUNK)
        slots = tl.load(slots_R + routes, mask=routes < num_routes, other=-1)
        counts += tl.histogram(tl.where(slots < 0, BINS - 1, slots), BINS)
        if slot == 0:
            served = (slots >= 0).to(tl.int8)
            tl.store(served_R + routes, served, mask=(routes < num_routes) & (FIRST_WAVE | (slots >= 0)))
    blocks = tl.where(bins < num_slots, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    mine = bins == slot
    first_block = tl.sum(tl.where(bins < slot, blocks, 0), 0)
    my_blocks = tl.sum(tl.where(mine, blocks, 0), 0)
    my_routes = tl.sum(tl.where(mine, counts, 0), 0)
    if slot == 0:
        tl.store(num_blocks, tl.sum(blocks, 0))
    if my_routes > 0:
        out = sorted_R + first_block * BLOCK_M
        done = 0
        for start in range(0, num_routes, CHUNK):
            routes = start + tl.arange(0, CHUNK)
            hit = tl.load(slots_R + routes, mask=routes < num_routes, other=-1) == slot
            place = done + tl.cumsum(hit.to(tl.int32), 0) - 1
            tl.store(out + place, routes, mask=hit)
            done += tl.sum(hit.to(tl.int32), 0)
        padding = my_routes + tl.arange(0, BLOCK_M)
        tl.store(out + padding, num_routes, mask=padding < my_blocks * BLOCK_M)
        for start in range(0, my_blocks, 32):
            block = start + tl.arange(0, 32)
            tl.store(block_slots + first_block + block, slot, mask=block < my_blocks)
