"""The grouped GEMMs for many tokens on Hopper (compute capability 9.0), in Gluon: warps have roles.

    gate_up_hopper_kernel, down_hopper_kernel    as in `grouped`, for blocks of 128 rows and weights of 16 bits or fp8

The kernels of `grouped` lose time between tiles: a program fills its pipeline, multiplies, stores and makes room for
the next. Here one program a multiprocessor stays, and of its twelve warps

    four produce    take the next tile, ask for weights (tensor descriptors) and rows (gate_up: gathered by asynchronous copies)
    eight consume   two groups of four, each 64 rows x 256 columns: multiply what has arrived, then store it

They meet in a ring of STAGES buffers (`roles`), so the loads of the next tile travel while this one is stored. A consumer has
at most two steps in the tensor cores, and frees the first's buffer when it has left them.

Tiles are handed out by a counter, because half blocks make them unequal; a tile's sums don't depend on who adds them up,
so results are the same at every call. A half block's second consumer has nothing to do but free buffers.

A tile of gate_up has 128 rows of gate, then the same 128 rows of up. Both results of a column lie in one thread.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.moe.kernels.roles import (
    BLOCK_M,
    BLOCK_N,
    RING,
    ROWS,
    multiply,
    next_place,
    place_of_tile,
    receive,
    rings,
    send,
    skip,
    store_layout,
    take_tile,
)


@gluon.constexpr_function
def copy_layout(block_k, dtype):
    """[64, block_k]: a thread copies 16 bytes of a row at a time, neighbours neighbouring ones."""
    width = 128 // int(dtype.primitive_bitwidth)
    lanes = block_k // width
    return gl.BlockedLayout([1, width], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def _sigmoid(x):
    """To a few units in the last place, and 2^-60 at least. Two values share a reciprocal, 1/a = b/(ab), since special
    functions are what a tile's end takes longest for."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 a, b, r; mul.f32 a, $2, 0fBFB8AA3B; mul.f32 b, $3, 0fBFB8AA3B; "
        "min.f32 a, a, 0f42700000; min.f32 b, b, 0f42700000; ex2.approx.ftz.f32 a, a; ex2.approx.ftz.f32 b, b; "
        "add.f32 a, a, 0f3F800000; add.f32 b, b, 0f3F800000; mul.f32 r, a, b; rcp.approx.ftz.f32 r, r; "
        "mul.f32 $0, r, b; mul.f32 $1, r, a; }",
        "=&f,=&f,f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _gate_up_producer(
    x_TD, weights, sorted_R, block_slots, num_m, counter, num_routes, pipe, ring, D: gl.constexpr, NUM_N: gl.constexpr,
    GROUP_M: gl.constexpr, TOP_K: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    rows, weight_tiles, full, empty = pipe
    STEPS: gl.constexpr = D // BLOCK_K
    WEIGHT_BYTES: gl.constexpr = BLOCK_N * BLOCK_K * x_TD.dtype.element_ty.primitive_bitwidth // 8
    layout: gl.constexpr = copy_layout(BLOCK_K, x_TD.dtype.element_ty)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    total = num_m * NUM_N
    stage, phase, at, at_phase = 0, 0, 0, 0
    tile = take_tile(counter, total)
    while tile >= 0:
        m, n = place_of_tile(tile, num_m, NUM_N, GROUP_M)
        slot = gl.load(block_slots + m)
        run = sorted_R + m * BLOCK_M
        whole = gl.load(run + ROWS) < num_routes
        route0 = gl.load(run + r)
        route1 = gl.load(run + ROWS + r)
        token0 = gl.where(route0 < num_routes, route0 // TOP_K, 0).to(gl.int64)  # padding computes token 0
        token1 = gl.where(route1 < num_routes, route1 // TOP_K, 0).to(gl.int64)
        x0 = x_TD + token0[:, None] * D + k[None, :]
        x1 = x_TD + token1[:, None] * D + k[None, :]
        send(ring, at, at_phase, (m << 12 | n) << 1 | whole.to(gl.int32))
        at, at_phase = next_place(at, at_phase, RING)
        tile = 0
        for half in gl.static_range(2):  # the next tile is asked for while buffers are full of this one
            for step in range(half * (STEPS // 2), STEPS if half == 1 else STEPS // 2):
                k0 = step * BLOCK_K
                mbarrier.wait(empty.index(stage), phase ^ 1)
                mbarrier.expect(full.index(stage), WEIGHT_BYTES)
                tma.async_copy_global_to_shared(
                    weights, [slot, 0, n * (BLOCK_N // 2), k0], full.index(stage), weight_tiles.index(stage)
                )
                async_copy.async_copy_global_to_shared(rows.index(stage * 2), x0 + k0)
                if whole:
                    async_copy.async_copy_global_to_shared(rows.index(stage * 2 + 1), x1 + k0)
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                stage, phase = next_place(stage, phase, full.shape[0])
            if half == 0:
                tile = take_tile(counter, total)
    send(ring, at, at_phase, -1)


@gluon.jit
def _gate_up_consumer(
    c: gl.constexpr, x_scale_T, scales, block_slots, sorted_R, activated_PF, num_routes, stride_scale_s, pipe, ring,
    D: gl.constexpr, F: gl.constexpr, TOP_K: gl.constexpr, BLOCK_K: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    STEPS: gl.constexpr = D // BLOCK_K
    COLUMNS: gl.constexpr = BLOCK_N // 2
    out: gl.constexpr = store_layout(COLUMNS)
    stage, phase, at, at_phase = 0, 0, 0, 0
    word = receive(ring, at, at_phase)
    while word >= 0:
        at, at_phase = next_place(at, at_phase, RING)
        m, n = word >> 13, word >> 1 & 0xFFF
        if c > 0 and word & 1 == 0:
            stage, phase = skip(pipe, stage, phase, STEPS)
        else:
            first = m * BLOCK_M + c * ROWS
            acc, stage, phase = multiply(pipe, stage, phase, c, STEPS, True)
            gate, up = acc.reshape([ROWS, 2, COLUMNS]).permute([0, 2, 1]).split()
            if SCALED:
                part: gl.constexpr = gate.type.layout
                route = gl.load(sorted_R + first + gl.arange(0, ROWS, gl.SliceLayout(1, part)))
                x_scale = gl.load(x_scale_T + gl.where(route < num_routes, route // TOP_K, 0))
                scale = scales + gl.load(block_slots + m).to(gl.int64) * stride_scale_s + n * COLUMNS
                scale += gl.arange(0, COLUMNS, gl.SliceLayout(0, part))
                gate = gate * gl.load(scale)[None, :] * x_scale[:, None]
                up = up * gl.load(scale + F)[None, :] * x_scale[:, None]
            row = (gate * _sigmoid(gate) * up).to(activated_PF.dtype.element_ty)
            p = first + gl.arange(0, ROWS, gl.SliceLayout(1, out))
            column = n * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, out))
            pointers = activated_PF + p.to(gl.int64)[:, None] * F + column[None, :]
            gl.store(pointers, gl.convert_layout(row, out))
        word = receive(ring, at, at_phase)


@gluon.jit(do_not_specialize=["num_routes"])
def gate_up_hopper_kernel(
    x_TD,
    x_scale_T,  # float32: scales (SCALED)
    weights,  # descriptor: slots of [2, F, D], tiles of [1, 2, 128, BLOCK_K]
    scales,  # float32: slots of [2F] (SCALED)
    activated_PF,  # out, P positions in sorted order
    sorted_R,
    block_slots,
    num_blocks,
    counter,  # int32 [1], zero before and after
    num_routes,
    stride_scale_s,
    D: gl.constexpr,
    F: gl.constexpr,
    TOP_K: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    SCALED: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = x_TD.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_K], dtype)
    rows = gl.allocate_shared_memory(dtype, [STAGES * 2, ROWS, BLOCK_K], layout)
    weight_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 2, BLOCK_N // 2, BLOCK_K], weights.layout)
    # Full: each of the producer's threads has its copies, and the bytes of the weights that one of them announced are there.
    full, empty, ring = rings(128 + 1, STAGES)
    pipe = (rows, weight_tiles, full, empty)
    NUM_N: gl.constexpr = 2 * F // BLOCK_N
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    num_m = gl.load(num_blocks)
    gl.warp_specialize(
        [
            (
                _gate_up_consumer,
                (0, x_scale_T, scales, block_slots, sorted_R, activated_PF, num_routes, stride_scale_s, pipe, ring, D,
                 F, TOP_K, BLOCK_K, SCALED),
            ),
            (
                _gate_up_consumer,
                (1, x_scale_T, scales, block_slots, sorted_R, activated_PF, num_routes, stride_scale_s, pipe, ring, D,
                 F, TOP_K, BLOCK_K, SCALED),
            ),
            (
                _gate_up_producer,
                (x_TD, weights, sorted_R, block_slots, num_m, counter, num_routes, pipe, ring, D, NUM_N, GROUP_M, TOP_K,
                 BLOCK_K),
            ),
        ],
        [4, 4],
        [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip


@gluon.jit
def _down_producer(
    activated, weights, sorted_R, block_slots, num_m, counter, num_routes, pipe, ring, F: gl.constexpr,
    NUM_N: gl.constexpr, GROUP_M: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    rows, weight_tiles, full, empty = pipe
    STEPS: gl.constexpr = F // BLOCK_K
    ROW_BYTES: gl.constexpr = BLOCK_K * activated.dtype.primitive_bitwidth // 8
    total = num_m * NUM_N
    stage, phase, at, at_phase = 0, 0, 0, 0
    tile = take_tile(counter, total)
    while tile >= 0:
        m, n = place_of_tile(tile, num_m, NUM_N, GROUP_M)
        slot = gl.load(block_slots + m)
        whole = gl.load(sorted_R + m * BLOCK_M + ROWS) < num_routes
        half_only = whole == False  # noqa: E712 (a predicate, not a Python value)
        send(ring, at, at_phase, (m << 12 | n) << 1 | whole.to(gl.int32))
        at, at_phase = next_place(at, at_phase, RING)
        tile = 0
        for half in gl.static_range(2):
            for step in range(half * (STEPS // 2), STEPS if half == 1 else STEPS // 2):
                k0 = step * BLOCK_K
                here = full.index(stage)
                mbarrier.wait(empty.index(stage), phase ^ 1)
                mbarrier.expect(here, (BLOCK_N + BLOCK_M) * ROW_BYTES, pred=whole)
                mbarrier.expect(here, (BLOCK_N + ROWS) * ROW_BYTES, pred=half_only)
                tma.async_copy_global_to_shared(
                    weights, [slot, n * BLOCK_N, k0], here, weight_tiles.index(stage)
                )
                tma.async_copy_global_to_shared(activated, [m * BLOCK_M, k0], here, rows.index(stage * 2))
                tma.async_copy_global_to_shared(
                    activated, [m * BLOCK_M + ROWS, k0], here, rows.index(stage * 2 + 1), pred=whole
                )
                stage, phase = next_place(stage, phase, full.shape[0])
            if half == 0:
                tile = take_tile(counter, total)
    send(ring, at, at_phase, -1)


@gluon.jit
def _down_consumer(
    c: gl.constexpr, activated_scale_P, scales, block_slots, rows_RD, sorted_R, num_routes, stride_scale_s, pipe, ring,
    D: gl.constexpr, F: gl.constexpr, BLOCK_K: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    STEPS: gl.constexpr = F // BLOCK_K
    out: gl.constexpr = store_layout(BLOCK_N)
    stage, phase, at, at_phase = 0, 0, 0, 0
    word = receive(ring, at, at_phase)
    while word >= 0:
        at, at_phase = next_place(at, at_phase, RING)
        m, n = word >> 13, word >> 1 & 0xFFF
        if c > 0 and word & 1 == 0:
            stage, phase = skip(pipe, stage, phase, STEPS)
        else:
            first = m * BLOCK_M + c * ROWS
            route = gl.load(sorted_R + first + gl.arange(0, ROWS, gl.SliceLayout(1, out)))
            acc, stage, phase = multiply(pipe, stage, phase, c, STEPS, False)
            if SCALED:
                part: gl.constexpr = acc.type.layout
                x_scale = gl.load(activated_scale_P + first + gl.arange(0, ROWS, gl.SliceLayout(1, part)))
                scale = scales + gl.load(block_slots + m).to(gl.int64) * stride_scale_s + n * BLOCK_N
                scale += gl.arange(0, BLOCK_N, gl.SliceLayout(0, part))
                acc = acc * gl.load(scale)[None, :] * x_scale[:, None]
            row = gl.convert_layout(acc.to(rows_RD.dtype.element_ty), out)
            column = n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, out))
            pointers = rows_RD + route.to(gl.int64)[:, None] * D + column[None, :]
            gl.store(pointers, row, mask=(route < num_routes)[:, None])
        word = receive(ring, at, at_phase)


@gluon.jit(do_not_specialize=["num_routes"])
def down_hopper_kernel(
    activated,  # descriptor: [P, F], tiles of [64, BLOCK_K]
    activated_scale_P,  # float32 (SCALED)
    weights,  # descriptor: slots of [D, F], tiles of [1, 256, BLOCK_K]
    scales,  # float32: slots of [D] (SCALED)
    rows_RD,  # out
    sorted_R,
    block_slots,
    num_blocks,
    counter,
    num_routes,
    stride_scale_s,
    D: gl.constexpr,
    F: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    SCALED: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PDL: gl.constexpr,
):
    rows = gl.allocate_shared_memory(activated.dtype, [STAGES * 2, ROWS, BLOCK_K], activated.layout)
    weight_tiles = gl.allocate_shared_memory(weights.dtype, [STAGES, 1, BLOCK_N, BLOCK_K], weights.layout)
    full, empty, ring = rings(1, STAGES)
    pipe = (rows, weight_tiles, full, empty)
    NUM_N: gl.constexpr = D // BLOCK_N
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    num_m = gl.load(num_blocks)
    gl.warp_specialize(
        [
            (
                _down_consumer,
                (0, activated_scale_P, scales, block_slots, rows_RD, sorted_R, num_routes, stride_scale_s, pipe, ring,
                 D, F, BLOCK_K, SCALED),
            ),
            (
                _down_consumer,
                (1, activated_scale_P, scales, block_slots, rows_RD, sorted_R, num_routes, stride_scale_s, pipe, ring,
                 D, F, BLOCK_K, SCALED),
            ),
            (
                _down_producer,
                (activated, weights, sorted_R, block_slots, num_m, counter, num_routes, pipe, ring, F, NUM_N, GROUP_M,
                 BLOCK_K),
            ),
        ],
        [4, 4],
        [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip
