"""Routes sorted by slot, each slot's run padded to a multiple of BLOCK_M: no atomics, no host sync, order fixed.

Few routes, one launch: a program a slot. Each counts the routes of all slots (a histogram: R integers, read
from L2), so that it knows where its own run begins without waiting for anybody, and then writes its own run
in ascending order of routes. Repeating the count is cheaper than a launch. One more program marks what is served.

Many routes, two launches: a program a chunk of routes counts it by slot and ranks its routes among those of the
same slot, by comparing all with all; then, knowing all counts, a program a chunk places its routes, and one a slot
finishes the slot's run.

The usual count, prefix sum and scatter with atomics costs three launches, and its order within a run changes
from call to call. Rows of x are made ready by the same launch (`rows`): further programs, one a row, which don't wait
for the kernel ahead. So that may be anything but one that writes x and lets its successor start early.
"""

import triton
import triton.language as tl

from minisgl.moe.kernels.dependent import start_next, wait_for_previous
from minisgl.moe.kernels.rows import prepare_row


@triton.jit
def _load_slots(slots_R, routes, num_routes):
    return tl.load(slots_R + routes, mask=routes < num_routes, other=-1)


@triton.jit
def _mark_served(served_R, routes, slots, num_routes, FIRST_WAVE: tl.constexpr):
    served = (slots >= 0).to(tl.int8)
    tl.store(served_R + routes, served, mask=(routes < num_routes) & (FIRST_WAVE | (slots >= 0)))


@triton.jit
def _finish_run(
    sorted_R, block_slots, tiles_done_B, amax_P, slot, first_block, blocks, count, num_routes, BLOCK_M: tl.constexpr,
    AMAX: tl.constexpr,
):  # fmt: skip
    """Padding of a slot's run, the slot of each of its blocks, of which nothing is done, and (AMAX) zero for the maxima of its
    rows."""
    padding = count + tl.arange(0, BLOCK_M)
    tl.store(sorted_R + first_block * BLOCK_M + padding, num_routes, mask=padding < blocks * BLOCK_M)
    for start in range(0, blocks, 32):
        block = start + tl.arange(0, 32)
        tl.store(block_slots + first_block + block, slot, mask=block < blocks)
        tl.store(tiles_done_B + first_block + block, 0, mask=block < blocks)
    if AMAX:
        for block in range(0, blocks):
            positions = (first_block + block) * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(amax_P + positions, tl.zeros((BLOCK_M,), tl.float32))


@triton.jit(do_not_specialize=["num_routes", "num_slots"])
def align_kernel(
    slots_R,  # int32 [R], -1: not here
    sorted_R,  # out int32 [capacity]: route numbers, padded with R
    block_slots,  # out int32 [capacity / BLOCK_M]: slot of each block
    num_blocks,  # out int32 [1]
    tiles_done_B,  # out int32 [capacity / BLOCK_M]: zeros
    served_R,  # out int8 [R]: 1 where some wave of this step computes the route
    num_routes,
    num_slots,
    x_TD,
    x_ready_TD,  # out
    x_scale_T,  # out
    amax_P,  # out float32 (AMAX)
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROW_MODE: tl.constexpr,  # "none", "fp8", "split" or "sums"
    UNIT: tl.constexpr,  # columns a sum covers
    FIRST_WAVE: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BINS: tl.constexpr,  # power of two >= num_slots
    CHUNK: tl.constexpr,  # at least num_routes
    PDL: tl.constexpr,
):
    slot = tl.program_id(0)  # num_slots: none; above, a row
    if ROW_MODE != "none":  # noqa: SIM102 (decided at compile time)
        if slot > num_slots:
            prepare_row(x_TD, x_ready_TD, x_scale_T, slot - num_slots - 1, D, BLOCK_D, ROW_MODE, UNIT)
            return
    wait_for_previous(PDL)
    start_next(PDL)
    routes = tl.arange(0, CHUNK)
    slots = _load_slots(slots_R, routes, num_routes)
    if slot == num_slots:
        _mark_served(served_R, routes, slots, num_routes, FIRST_WAVE)
        return
    bins = tl.arange(0, BINS)
    counts = tl.histogram(tl.maximum(slots, 0), BINS, mask=slots >= 0)
    blocks = tl.where(bins < num_slots, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    first_block = tl.sum(tl.where(bins < slot, blocks, 0), 0)
    my_blocks = tl.sum(tl.where(bins == slot, blocks, 0), 0)
    my_routes = tl.sum(tl.where(bins == slot, counts, 0), 0)
    if slot == 0:
        tl.store(num_blocks, tl.sum(blocks, 0))
    if my_routes > 0:
        hit = slots == slot
        place = tl.cumsum(hit.to(tl.int32), 0) - 1
        tl.store(sorted_R + first_block * BLOCK_M + place, routes, mask=hit)
        _finish_run(
            sorted_R, block_slots, tiles_done_B, amax_P, slot, first_block, my_blocks, my_routes, num_routes, BLOCK_M, AMAX,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_routes", "num_chunks"])
def count_kernel(
    slots_R,
    counts_CB,  # out int32 [chunks, BINS]
    rank_R,  # out int32: earlier routes of the chunk with the same slot
    served_R,
    num_routes,
    num_chunks,
    x_TD,
    x_ready_TD,
    x_scale_T,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROW_MODE: tl.constexpr,
    UNIT: tl.constexpr,
    FIRST_WAVE: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    chunk = tl.program_id(0)
    if ROW_MODE != "none":  # noqa: SIM102 (decided at compile time)
        if chunk >= num_chunks:
            prepare_row(x_TD, x_ready_TD, x_scale_T, chunk - num_chunks, D, BLOCK_D, ROW_MODE, UNIT)
            return
    wait_for_previous(PDL)
    start_next(PDL)
    routes = chunk * CHUNK + tl.arange(0, CHUNK)
    slots = _load_slots(slots_R, routes, num_routes)
    counts = tl.histogram(tl.maximum(slots, 0), BINS, mask=slots >= 0)
    tl.store(counts_CB + chunk * BINS + tl.arange(0, BINS), counts)
    i = tl.arange(0, CHUNK)
    earlier = (slots[:, None] == slots[None, :]) & (i[:, None] < i[None, :])
    tl.store(rank_R + routes, tl.sum(earlier.to(tl.int32), 0), mask=routes < num_routes)
    _mark_served(served_R, routes, slots, num_routes, FIRST_WAVE)


@triton.jit(do_not_specialize=["num_routes", "num_slots", "num_chunks"])
def place_kernel(
    slots_R,
    counts_CB,
    rank_R,
    sorted_R,
    block_slots,
    num_blocks,
    tiles_done_B,
    amax_P,
    num_routes,
    num_slots,
    num_chunks,
    AMAX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,  # chunks whose counts are read at a time
    PDL: tl.constexpr,
):
    chunk = tl.program_id(0)  # from num_chunks on: a slot
    wait_for_previous(PDL)
    start_next(PDL)
    bins = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    for start in range(0, num_chunks, CHUNKS):
        c = start + tl.arange(0, CHUNKS)
        counts = tl.load(
            counts_CB + c[:, None] * BINS + bins[None, :], mask=(c < num_chunks)[:, None], other=0
        )
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((c < chunk)[:, None], counts, 0), 0)
    blocks = tl.where(bins < num_slots, (total + BLOCK_M - 1) // BLOCK_M, 0)
    first_block = tl.cumsum(blocks, 0) - blocks
    if chunk == 0:
        tl.store(num_blocks, tl.sum(blocks, 0))
    if chunk < num_chunks:
        routes = chunk * CHUNK + tl.arange(0, CHUNK)
        slots = _load_slots(slots_R, routes, num_routes)
        rank = tl.load(rank_R + routes, mask=routes < num_routes, other=0)
        position = tl.gather(first_block * BLOCK_M + before, tl.maximum(slots, 0), 0) + rank
        tl.store(sorted_R + position, routes, mask=slots >= 0)
    else:
        mine = bins == chunk - num_chunks
        first = tl.sum(tl.where(mine, first_block, 0), 0)
        my_blocks = tl.sum(tl.where(mine, blocks, 0), 0)
        count = tl.sum(tl.where(mine, total, 0), 0)
        _finish_run(
            sorted_R,
            block_slots,
            tiles_done_B,
            amax_P,
            chunk - num_chunks,
            first,
            my_blocks,
            count,
            num_routes,
            BLOCK_M,
            AMAX,
        )
