"""Both grouped GEMMs in one launch whose programs stay, for few rows a block, on Hopper (capability 9.0), in Gluon.

Where reading weights takes all the time, two launches lose some at their beginnings and ends: memory idles until the first
tiles have come, and again while the last ones are multiplied and stored. Here one program a multiprocessor takes tiles from
a counter, first all of gate_up, then all of down, and its ring of buffers (see `stream`) never runs dry in between: weights
of a down tile are asked for at once, and only the block's activated rows are waited for.

    weights   [64 rows, K] of a slot are the tall operand of the tensor cores, straight from shared memory (int8: converted
              in registers); a consumer has 64 rows of gate and the same 64 of up, or 128 rows of down
    rows      of x or activated ones, 16 to 128, are the columns of the product. A large block with at most half its rows
              runs as such.

A block's count in done_B goes up with every tile of gate_up that is stored. Waiting for it ends, since all those tiles are
with programs that run when the first tile of down is taken. fp8: whoever finishes a block makes codes of its activated
rows, once, and adds one more.

Nothing depends on who multiplies a tile or when, so results are the same at every call, also when gate_up and down are
launched apart because something has to happen in between.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.moe.kernels.roles import next_place, sigmoid
from minisgl.moe.kernels.stream import (
    HALF,
    RING,
    acc_layout,
    barriers,
    multiply,
    out_layout,
    place_of_tile,
    receive,
    rows_producer,
    shares,
    weights_producer,
)
from minisgl.moe.kernels.tiles import KEPT

CODE_ROWS = gl.constexpr(16)  # of a block, quantized at a time
CODE_COLUMNS = gl.constexpr(1024)
# Up to here scales of rows are loaded before the products; later they would cost registers.
AHEAD_ROWS = gl.constexpr(64)


@gluon.jit
def _load_activated(activated_PF, row, n0, there, F: gl.constexpr, layout: gl.constexpr):
    """(float32 values [CODE_ROWS, CODE_COLUMNS] from column n0 on, offsets, mask)"""
    n = n0 + gl.arange(0, CODE_COLUMNS, gl.SliceLayout(0, layout))
    mask = there[:, None] & (n < F)[None, :]
    offsets = row.to(gl.int64)[:, None] * F + n[None, :]
    values = gl.load(activated_PF + offsets, mask=mask, other=0.0, cache_modifier=".cg")
    return values.to(gl.float32), offsets, mask


@gluon.jit
def _make_codes(
    activated_PF, codes_PF, scale_P, sorted_R, first, num_routes, F: gl.constexpr, BLOCK_M: gl.constexpr
):  # fmt: skip
    """fp8 codes of a block's activated rows, as `rows.fp8_rows` makes them."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    r = gl.arange(0, CODE_ROWS, gl.SliceLayout(1, layout))
    start = 0
    while start < BLOCK_M:
        row = first + start + r
        there = gl.load(sorted_R + row) < num_routes
        values, offsets, mask = _load_activated(activated_PF, row, 0, there, F, layout)
        amax = gl.max(gl.abs(values), 1)
        for n0 in range(CODE_COLUMNS, F, CODE_COLUMNS):
            more, _, _ = _load_activated(activated_PF, row, n0, there, F, layout)
            amax = gl.maximum(amax, gl.max(gl.abs(more), 1))
        scale = gl.where(amax > 0, amax / 448.0, 1.0)
        gl.store(scale_P + row, scale, mask=there)
        gl.store(codes_PF + offsets, (values / scale[:, None]).to(gl.float8e4nv), mask=mask)
        for n0 in range(CODE_COLUMNS, F, CODE_COLUMNS):
            more, offsets, mask = _load_activated(activated_PF, row, n0, there, F, layout)
            gl.store(codes_PF + offsets, (more / scale[:, None]).to(gl.float8e4nv), mask=mask)
        start += CODE_ROWS
        if start < BLOCK_M:  # rows come first, padding after them
            start = gl.where(gl.load(sorted_R + first + start) < num_routes, start, BLOCK_M)


@gluon.jit
def _store_split(row, activated_PF, first, column, F: gl.constexpr):
    """row: [64, BLOCK_M] from hidden unit `column` on, to rows with even columns first, then odd ones (int8). Padding, too."""
    BLOCK_M: gl.constexpr = row.shape[1]
    even, odd = row.reshape([HALF // 2, 2, BLOCK_M]).permute([0, 2, 1]).split()
    p = first + gl.arange(0, BLOCK_M, gl.SliceLayout(0, even.type.layout))
    n = column // 2 + gl.arange(0, HALF // 2, gl.SliceLayout(1, even.type.layout))
    pointers = activated_PF + p.to(gl.int64)[None, :] * F + n[:, None]
    gl.store(pointers, even, eviction_policy=KEPT)
    gl.store(pointers + F // 2, odd, eviction_policy=KEPT)


@gluon.jit
def _scales_of_x(
    x_scale_T, sorted_R, first, num_routes, TOP_K: gl.constexpr, BLOCK_M: gl.constexpr, part: gl.constexpr
):  # fmt: skip
    route = gl.load(sorted_R + first + gl.arange(0, BLOCK_M, gl.SliceLayout(0, part)))
    return gl.load(x_scale_T + gl.where(route < num_routes, route // TOP_K, 0))


@gluon.jit
def _up_tile(
    c: gl.constexpr, slot, n, first, x_scale_T, scales, stride_s, activated_PF, sorted_R, num_routes, pipe, stage, phase,
    D: gl.constexpr, F: gl.constexpr, TOP_K: gl.constexpr, BLOCK_M: gl.constexpr, NC: gl.constexpr,
    FORMAT: gl.constexpr,
):  # fmt: skip
    """first: the block's first position; of its rows BLOCK_M are multiplied."""
    part: gl.constexpr = acc_layout(BLOCK_M, pipe[0].dtype)
    out: gl.constexpr = out_layout(BLOCK_M)
    column = (n * NC + c) * HALF
    # Scales are asked for before the weights come.
    if FORMAT != "native":
        scale = scales + slot.to(gl.int64) * stride_s + column
        scale += gl.arange(0, HALF, gl.SliceLayout(1, part))
        gate_scale, up_scale = gl.load(scale), gl.load(scale + F)
    if (FORMAT == "fp8") and (BLOCK_M <= AHEAD_ROWS):
        x_scale = _scales_of_x(x_scale_T, sorted_R, first, num_routes, TOP_K, BLOCK_M, part)
    p = first + gl.arange(0, BLOCK_M, gl.SliceLayout(0, out))
    there = gl.load(sorted_R + p) < num_routes
    gate, up, stage, phase = multiply(pipe, stage, phase, c, D, BLOCK_M, NC)
    if FORMAT != "native":
        gate, up = gate * gate_scale[:, None], up * up_scale[:, None]
    if FORMAT == "fp8":
        if BLOCK_M > AHEAD_ROWS:
            x_scale = _scales_of_x(x_scale_T, sorted_R, first, num_routes, TOP_K, BLOCK_M, part)
        gate, up = gate * x_scale[None, :], up * x_scale[None, :]
    row = gl.convert_layout((gate * sigmoid(gate) * up).to(activated_PF.dtype.element_ty), out)
    if FORMAT == "int8":
        _store_split(row, activated_PF, first, column, F)
    else:
        w = column + gl.arange(0, HALF, gl.SliceLayout(1, out))
        pointers = activated_PF + p.to(gl.int64)[None, :] * F + w[:, None]
        gl.store(pointers, row, mask=there[None, :], eviction_policy=KEPT)
    return stage, phase


@gluon.jit
def _down_tile(
    c: gl.constexpr, slot, n, first, activated_scale_P, scales, stride_s, rows_RD, sorted_R, num_routes, pipe, stage, phase,
    D: gl.constexpr, F: gl.constexpr, BLOCK_M: gl.constexpr, NC: gl.constexpr, FORMAT: gl.constexpr,
):  # fmt: skip
    part: gl.constexpr = acc_layout(BLOCK_M, pipe[0].dtype)
    out: gl.constexpr = out_layout(BLOCK_M)
    dtype: gl.constexpr = rows_RD.dtype.element_ty
    column = (n * NC + c) * 2 * HALF
    if FORMAT != "native":
        scale = scales + slot.to(gl.int64) * stride_s + column
        scale += gl.arange(0, HALF, gl.SliceLayout(1, part))
        scale0, scale1 = gl.load(scale), gl.load(scale + HALF)
    route = gl.load(sorted_R + first + gl.arange(0, BLOCK_M, gl.SliceLayout(0, out)))
    if FORMAT == "fp8":  # written while this kernel runs, so not from the L1; there when the first rows are
        p = first + gl.arange(0, BLOCK_M, gl.SliceLayout(0, part))
        if BLOCK_M <= AHEAD_ROWS:
            mbarrier.wait(pipe[2].index(stage), phase)
            x_scale = gl.load(activated_scale_P + p, cache_modifier=".cg")
    acc0, acc1, stage, phase = multiply(pipe, stage, phase, c, F, BLOCK_M, NC)
    if FORMAT != "native":
        acc0, acc1 = acc0 * scale0[:, None], acc1 * scale1[:, None]
    if FORMAT == "fp8":
        if BLOCK_M > AHEAD_ROWS:
            x_scale = gl.load(activated_scale_P + p, cache_modifier=".cg")
        acc0, acc1 = acc0 * x_scale[None, :], acc1 * x_scale[None, :]
    w = column + gl.arange(0, HALF, gl.SliceLayout(1, out))
    pointers = rows_RD + route.to(gl.int64)[None, :] * D + w[:, None]
    there = (route < num_routes)[None, :]
    gl.store(pointers, gl.convert_layout(acc0.to(dtype), out), mask=there, eviction_policy=KEPT)
    gl.store(pointers + HALF, gl.convert_layout(acc1.to(dtype), out), mask=there, eviction_policy=KEPT)
    return stage, phase


@gluon.jit
def _consumer(
    c: gl.constexpr, x_scale_T, up_scales, down_scales, activated_PF, codes_PF, activated_scale_P, rows_RD, sorted_R,
    done_B, num_m, num_routes, up_stride, down_stride, pipe, ring, D: gl.constexpr, F: gl.constexpr, TOP_K: gl.constexpr,
    UP_N: gl.constexpr, DOWN_N: gl.constexpr, NC: gl.constexpr, GROUP_M: gl.constexpr, FORMAT: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = pipe[0].shape[1]
    SHARE: gl.constexpr = BLOCK_M // shares(BLOCK_M)
    stage, phase, at, at_phase = 0, 0, 0, 0
    tile, whole, slot = receive(ring, at, at_phase)
    while tile >= 0:
        up, m, n = place_of_tile(tile, num_m, UP_N, DOWN_N, GROUP_M)
        first = m * BLOCK_M
        if up:
            if SHARE == BLOCK_M or whole:
                stage, phase = _up_tile(
                    c, slot, n, first, x_scale_T, up_scales, up_stride, activated_PF, sorted_R, num_routes, pipe, stage,
                    phase, D, F, TOP_K, BLOCK_M, NC, FORMAT,
                )  # fmt: skip
            else:
                stage, phase = _up_tile(
                    c, slot, n, first, x_scale_T, up_scales, up_stride, activated_PF, sorted_R, num_routes, pipe, stage,
                    phase, D, F, TOP_K, SHARE, NC, FORMAT,
                )  # fmt: skip
            gl.thread_barrier()  # every thread has stored
            done = gl.atomic_add(done_B + m, 1, sem="acq_rel")
            if FORMAT == "fp8":  # noqa: SIM102 (decided at compile time)
                if done == UP_N * NC - 1:
                    _make_codes(
                        activated_PF, codes_PF, activated_scale_P, sorted_R, first, num_routes, F, BLOCK_M
                    )
                    gl.thread_barrier()
                    gl.atomic_add(done_B + m, 1, sem="release")
        else:
            if SHARE == BLOCK_M or whole:
                stage, phase = _down_tile(
                    c, slot, n, first, activated_scale_P, down_scales, down_stride, rows_RD, sorted_R, num_routes, pipe,
                    stage, phase, D, F, BLOCK_M, NC, FORMAT,
                )  # fmt: skip
            else:
                stage, phase = _down_tile(
                    c, slot, n, first, activated_scale_P, down_scales, down_stride, rows_RD, sorted_R, num_routes, pipe,
                    stage, phase, D, F, SHARE, NC, FORMAT,
                )  # fmt: skip
        at, at_phase = next_place(at, at_phase, RING)
        tile, whole, slot = receive(ring, at, at_phase)


@gluon.jit(do_not_specialize=["num_routes", "has_up", "has_down"])
def persistent_kernel(
    x_TD,  # rows made ready
    x_scale_T,  # float32 (fp8)
    up_weights,  # descriptor: slots of [2F, D] (int8: 16-bit words), tiles of [1, 64, 128 bytes]
    up_scales,  # float32: slots of [2F] (fp8, int8)
    down_weights,  # descriptor: slots of [D, F], as above
    down_scales,
    activated_PF,  # out, P positions in sorted order; int8: even columns first, then odd ones
    codes_PF,  # out (fp8), else activated_PF
    activated_scale_P,  # out float32 (fp8)
    rows_RD,  # out
    sorted_R,
    block_slots,
    num_blocks,
    done_B,  # int32: how many parts of a block's tiles of gate_up consumers have stored; zero before
    counter,  # int32 [1], zero before and after; not written by the kernel just before this one
    num_routes,
    has_up,  # 1: multiply tiles of gate_up
    has_down,
    up_stride,  # of a slot's scales
    down_stride,
    D: gl.constexpr,
    F: gl.constexpr,
    TOP_K: gl.constexpr,
    FORMAT: gl.constexpr,  # "native", "fp8" or "int8"
    BLOCK_M: gl.constexpr,
    NC: gl.constexpr,  # consumers: 1 or 2
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,  # of the second consumer; the first gets what is left
    ROWS_REGS: gl.constexpr,
    WEIGHTS_REGS: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = x_TD.dtype.element_ty
    STEP: gl.constexpr = up_weights.block_shape[2]
    PARTS: gl.constexpr = 2 if FORMAT == "int8" else 1
    UP_N: gl.constexpr = F // (HALF * NC)
    DOWN_N: gl.constexpr = D // (2 * HALF * NC)
    EXPECTED: gl.constexpr = UP_N * NC + (1 if FORMAT == "fp8" else 0)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, STEP], dtype)
    rows = gl.allocate_shared_memory(dtype, [STAGES * PARTS, BLOCK_M, STEP], layout)
    weights = gl.allocate_shared_memory(up_weights.dtype, [STAGES * NC * 2, 1, HALF, STEP], up_weights.layout)
    full, empty, ring = barriers(STAGES, NC)
    pipe = (rows, weights, full, empty)
    first_turn = gl.atomic_add(counter, 1, sem="relaxed")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    num_m = gl.load(num_blocks)
    base = num_m * UP_N * (1 - has_up)
    order = (num_m, base, num_m * (UP_N + DOWN_N * has_down) - base)
    if NC == 1:
        gl.warp_specialize(
            [
                (
                    _consumer,
                    (0, x_scale_T, up_scales, down_scales, activated_PF, codes_PF, activated_scale_P, rows_RD, sorted_R,
                     done_B, num_m, num_routes, up_stride, down_stride, pipe, ring, D, F, TOP_K, UP_N, DOWN_N, NC,
                     GROUP_M, FORMAT),
                ),
                (
                    rows_producer,
                    (x_TD, codes_PF, sorted_R, done_B, num_m, num_routes, pipe, ring, D, F, UP_N, DOWN_N, EXPECTED,
                     TOP_K, GROUP_M),
                ),
                (
                    weights_producer,
                    (up_weights, down_weights, sorted_R, block_slots, counter, first_turn, order, num_routes, pipe, ring,
                     D, F, UP_N, DOWN_N, NC, GROUP_M),
                ),
            ],
            [4, 1],
            [ROWS_REGS, WEIGHTS_REGS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _consumer,
                    (0, x_scale_T, up_scales, down_scales, activated_PF, codes_PF, activated_scale_P, rows_RD, sorted_R,
                     done_B, num_m, num_routes, up_stride, down_stride, pipe, ring, D, F, TOP_K, UP_N, DOWN_N, NC,
                     GROUP_M, FORMAT),
                ),
                (
                    _consumer,
                    (1, x_scale_T, up_scales, down_scales, activated_PF, codes_PF, activated_scale_P, rows_RD, sorted_R,
                     done_B, num_m, num_routes, up_stride, down_stride, pipe, ring, D, F, TOP_K, UP_N, DOWN_N, NC,
                     GROUP_M, FORMAT),
                ),
                (
                    rows_producer,
                    (x_TD, codes_PF, sorted_R, done_B, num_m, num_routes, pipe, ring, D, F, UP_N, DOWN_N, EXPECTED,
                     TOP_K, GROUP_M),
                ),
                (
                    weights_producer,
                    (up_weights, down_weights, sorted_R, block_slots, counter, first_turn, order, num_routes, pipe, ring,
                     D, F, UP_N, DOWN_N, NC, GROUP_M),
                ),
            ],
            [4, 4, 1],
            [CONSUMER_REGS, ROWS_REGS, WEIGHTS_REGS],
        )  # fmt: skip
