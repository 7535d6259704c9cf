"""Parts of kernels whose programs stay and stream weights past few rows, on Hopper (capability 9.0), in Gluon: `persistent`.

Of a program's warps one asks for weights, four for rows of activations, and one or two groups of four multiply. They meet in a
ring of STAGES buffers. A buffer holds one step of K, 128 bytes of each row: of NC x 128 rows of weights, and of the BLOCK_M
rows of a block. int8 weights come as 16-bit words of two codes, and rows with their even and their odd columns apart
(see `rows`), so there a step has two tiles of rows.

The weights' producer takes tiles from a counter and tells the others in a ring of numbers. It never waits for anything but
room; the rows' producer also waits until a block's activated rows exist.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from minisgl.moe.kernels.hopper import copy_layout
from minisgl.moe.kernels.roles import WORD, next_place, taken_tile
from minisgl.moe.kernels.roles import place_of_tile as place_in_groups
from minisgl.moe.kernels.tiles import unpack_int8

HALF = gl.constexpr(64)  # rows of weights of one instruction; a consumer has two such halves
RING = gl.constexpr(4)  # numbers of tiles on their way
ROW_THREADS = gl.constexpr(128)  # of the rows' producer


@gluon.constexpr_function
def acc_layout(block_m, dtype):
    """[64, block_m] of products with rows of this dtype."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_m, 256 // int(dtype.primitive_bitwidth)])


@gluon.constexpr_function
def out_layout(block_m):
    """[64, block_m]: a warp keeps the 16 rows of weights that it has; a thread gets 8 neighbouring ones of a row of x."""
    columns = [[0, 1 << i] for i in range(block_m.bit_length() - 1)]
    lanes, more = [[8, 0], *columns[:4]], columns[4:]
    return gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [4, 0], *more], lanes, [[16, 0], [32, 0]], [], [64, block_m]
    )


@gluon.constexpr_function
def shares(block_m):
    """In how many parts the rows of a block come: the second one of a large block only where it has rows."""
    return 2 if block_m >= 64 else 1


@gluon.constexpr_function
def number_layout(num_warps):
    return gl.BlockedLayout([1], [32], [num_warps], [0])


@gluon.jit
def send(ring, at, phase, word, slot):
    """By a producer of one warp."""
    tiles, slots, sent, taken = ring
    mbarrier.wait(taken.index(at), phase ^ 1)
    layout: gl.constexpr = number_layout(1)
    tiles.index(at).store(gl.full([1], word, gl.int32, layout))
    slots.index(at).store(gl.full([1], slot, gl.int32, layout))
    mbarrier.arrive(sent.index(at), count=1)


@gluon.jit
def receive(ring, at, phase):
    """(tile, or -1: there are no more; whether both shares of its block have rows; slot). By four warps."""
    tiles, slots, sent, taken = ring
    mbarrier.wait(sent.index(at), phase)
    layout: gl.constexpr = number_layout(4)
    word, slot = gl.max(tiles.index(at).load(layout), 0), gl.max(slots.index(at).load(layout), 0)
    mbarrier.arrive(taken.index(at), count=1)
    return word >> 1, (word & 1) != 0, slot


@gluon.jit
def _place(tile, num_m, NUM_N: gl.constexpr, GROUP_M: gl.constexpr):
    if GROUP_M == 1:
        return tile // NUM_N, tile % NUM_N
    else:
        return place_in_groups(tile, num_m, NUM_N, GROUP_M)


@gluon.jit
def place_of_tile(tile, num_m, UP_N: gl.constexpr, DOWN_N: gl.constexpr, GROUP_M: gl.constexpr):
    """(whether it is one of gate_up, row block, column block). All tiles of gate_up come first; GROUP_M row blocks share
    each column block's weights in L2."""
    up = tile < num_m * UP_N
    up_m, up_n = _place(tile, num_m, UP_N, GROUP_M)
    down_m, down_n = _place(tile - num_m * UP_N, num_m, DOWN_N, GROUP_M)
    return up, gl.where(up, up_m, down_m), gl.where(up, up_n, down_n)


@gluon.jit
def weights_producer(
    up_weights, down_weights, sorted_R, block_slots, counter, first_turn, order, num_routes, pipe, ring, D: gl.constexpr,
    F: gl.constexpr, UP_N: gl.constexpr, DOWN_N: gl.constexpr, NC: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """order: number of row blocks, the first tile, how many tiles. first_turn: this program's first turn of the counter."""
    rows, weights, full, empty = pipe
    num_m, base, count = order
    STAGES: gl.constexpr = full.shape[0]
    BLOCK_M: gl.constexpr = rows.shape[1]
    STEP: gl.constexpr = weights.shape[3]
    BYTES: gl.constexpr = NC * 2 * HALF * STEP * weights.dtype.primitive_bitwidth // 8
    COLUMNS: gl.constexpr = rows.shape[0] // STAGES * rows.shape[2]  # of K, a step
    stage, phase, at, at_phase = 0, 0, 0, 0
    tile = taken_tile(first_turn, counter, base, count)
    while tile >= 0:
        up, m, n = place_of_tile(tile, num_m, UP_N, DOWN_N, GROUP_M)
        slot = gl.load(block_slots + m)
        word = tile << 1
        if shares(BLOCK_M) == 2:
            word |= (gl.load(sorted_R + m * BLOCK_M + BLOCK_M // 2) < num_routes).to(gl.int32)
        send(ring, at, at_phase, word, slot)
        at, at_phase = next_place(at, at_phase, RING)
        tile = 0
        steps = gl.where(up, D // COLUMNS, F // COLUMNS)
        for step in range(steps):
            here, k = full.index(stage), step * STEP
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(here, BYTES)
            for c in gl.static_range(NC):
                half0, half1 = weights.index((stage * NC + c) * 2), weights.index((stage * NC + c) * 2 + 1)
                if up:
                    row = (n * NC + c) * HALF
                    tma.async_copy_global_to_shared(up_weights, [slot, row, k], here, half0)
                    tma.async_copy_global_to_shared(up_weights, [slot, F + row, k], here, half1)
                else:
                    row = (n * NC + c) * 2 * HALF
                    tma.async_copy_global_to_shared(down_weights, [slot, row, k], here, half0)
                    tma.async_copy_global_to_shared(down_weights, [slot, row + HALF, k], here, half1)
            stage, phase = next_place(stage, phase, STAGES)
            if step == steps // 2:  # the next tile is asked for while buffers are full of this one
                tile = taken_tile(gl.atomic_add(counter, 1, sem="relaxed"), counter, base, count)
    send(ring, at, at_phase, -1, 0)


@gluon.jit
def rows_producer(
    x_TD, activated_PF, sorted_R, done_B, num_m, num_routes, pipe, ring, D: gl.constexpr, F: gl.constexpr,
    UP_N: gl.constexpr, DOWN_N: gl.constexpr, EXPECTED: gl.constexpr, TOP_K: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """EXPECTED: what a block's count of done_B must reach before its activated rows are read."""
    rows = pipe[0]
    BLOCK_M: gl.constexpr = rows.shape[1]
    SHARE: gl.constexpr = BLOCK_M // shares(BLOCK_M)
    layout: gl.constexpr = copy_layout(rows.shape[2], rows.dtype)
    r = gl.arange(0, SHARE, gl.SliceLayout(1, layout))
    k = gl.arange(0, rows.shape[2], gl.SliceLayout(0, layout))
    stage, phase, at, at_phase = 0, 0, 0, 0
    tile, whole, _ = receive(ring, at, at_phase)
    while tile >= 0:
        at, at_phase = next_place(at, at_phase, RING)
        up, m, _ = place_of_tile(tile, num_m, UP_N, DOWN_N, GROUP_M)
        first0, first1 = m * BLOCK_M, m * BLOCK_M + (BLOCK_M - SHARE)
        route0, route1 = gl.load(sorted_R + first0 + r), gl.load(sorted_R + first1 + r)
        there0, there1 = (route0 < num_routes)[:, None], (route1 < num_routes)[:, None]
        if up:
            token0 = gl.where(route0 < num_routes, route0 // TOP_K, 0).to(gl.int64)
            token1 = gl.where(route1 < num_routes, route1 // TOP_K, 0).to(gl.int64)
            x0 = x_TD + token0[:, None] * D + k[None, :]
            x1 = x_TD + token1[:, None] * D + k[None, :]
            stage, phase = _copy_rows(pipe, stage, phase, x0, x1, there0, there1, whole, D)
        else:
            while gl.atomic_add(done_B + m, 0, sem="acquire") < EXPECTED:
                pass
            x0 = activated_PF + (first0 + r).to(gl.int64)[:, None] * F + k[None, :]
            x1 = activated_PF + (first1 + r).to(gl.int64)[:, None] * F + k[None, :]
            stage, phase = _copy_rows(pipe, stage, phase, x0, x1, there0, there1, whole, F)
        tile, whole, _ = receive(ring, at, at_phase)


@gluon.jit
def _copy_rows(pipe, stage, phase, x0, x1, there0, there1, whole, SIZE: gl.constexpr):
    """x0, x1: pointers to the rows of both shares; rows that are not there become zero."""
    rows, _weights, full, empty = pipe
    STAGES: gl.constexpr = full.shape[0]
    PARTS: gl.constexpr = rows.shape[0] // STAGES
    STEP: gl.constexpr = rows.shape[2]
    SHARE: gl.constexpr = rows.shape[1] // shares(rows.shape[1])
    for step in range(SIZE // (STEP * PARTS)):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        for part in gl.static_range(PARTS):
            here, k0 = rows.index(stage * PARTS + part), part * (SIZE // PARTS) + step * STEP
            async_copy.async_copy_global_to_shared(here.slice(0, SHARE), x0 + k0, mask=there0)
            if rows.shape[1] > SHARE:  # noqa: SIM102 (decided at compile time)
                if whole:
                    async_copy.async_copy_global_to_shared(here.slice(SHARE, SHARE), x1 + k0, mask=there1)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        stage, phase = next_place(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _add_products(weights, pipe, stage, acc, BLOCK_M: gl.constexpr):
    """A half's 64 rows of weights times a step's rows; under way."""
    rows, full = pipe[0], pipe[2]
    tile = weights.reshape([HALF, rows.shape[2]])
    if rows.shape[0] == full.shape[0]:
        x = rows.index(stage).slice(0, BLOCK_M).permute([1, 0])
        return warpgroup_mma(tile, x, acc, is_async=True)
    else:
        x0 = rows.index(stage * 2).slice(0, BLOCK_M).permute([1, 0])
        x1 = rows.index(stage * 2 + 1).slice(0, BLOCK_M).permute([1, 0])
        even, odd = unpack_int8(
            tile.load(gl.DotOperandLayout(0, acc_layout(BLOCK_M, rows.dtype), 2)), gl.bfloat16, True
        )
        return warpgroup_mma(odd, x1, warpgroup_mma(even, x0, acc, is_async=True), is_async=True)


@gluon.jit
def multiply(
    pipe, stage, phase, c: gl.constexpr, SIZE: gl.constexpr, BLOCK_M: gl.constexpr, NC: gl.constexpr,
):  # fmt: skip
    """Both halves of consumer c's weights times the block's first BLOCK_M rows, K = SIZE; then where the ring stands."""
    rows, weights, full, empty = pipe
    PARTS: gl.constexpr = rows.shape[0] // full.shape[0]
    layout: gl.constexpr = acc_layout(BLOCK_M, rows.dtype)
    acc0 = gl.zeros([HALF, BLOCK_M], gl.float32, layout)
    acc1 = gl.zeros([HALF, BLOCK_M], gl.float32, layout)
    # Products of a step that are left to the next one; but weights in registers must stay there until they are used.
    AHEAD: gl.constexpr = 2 if PARTS == 1 else 0
    before = 0  # not `stage`: the frontend takes an alias of a variable of the loop for a constant
    for step in range(SIZE // (PARTS * rows.shape[2])):
        mbarrier.wait(full.index(stage), phase)
        fence_async_shared()
        half = (stage * NC + c) * 2
        under_way0 = _add_products(weights.index(half), pipe, stage, acc0, BLOCK_M)
        under_way1 = _add_products(weights.index(half + 1), pipe, stage, acc1, BLOCK_M)
        acc0, acc1 = warpgroup_mma_wait(AHEAD, [under_way0, under_way1])
        if AHEAD > 0:
            mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
            before = stage
        else:
            mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = next_place(stage, phase, full.shape[0])
    if AHEAD > 0:
        acc0, acc1 = warpgroup_mma_wait(0, [acc0, acc1])
        mbarrier.arrive(empty.index(before), count=1)
    return acc0, acc1, stage, phase


@gluon.jit
def barriers(STAGES: gl.constexpr, NC: gl.constexpr):
    """Barriers of the buffers, each full when every thread of the rows' producer has its copies and the weights' bytes are
    there, and the ring of tile numbers."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    sent = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    tiles = gl.allocate_shared_memory(gl.int32, [RING, 1], WORD)
    slots = gl.allocate_shared_memory(gl.int32, [RING, 1], WORD)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=ROW_THREADS + 1)
        mbarrier.init(empty.index(i), count=NC)
    for i in gl.static_range(RING):
        mbarrier.init(sent.index(i), count=1)
        mbarrier.init(taken.index(i), count=NC + 1)
    return full, empty, (tiles, slots, sent, taken)
