"""The grouped GEMMs for 4-bit weights on Hopper (compute capability 9.0), in Gluon: warps have roles, as in `hopper`, and
weights are unpacked where they are multiplied, see `word_operand`. int4 in groups of 128, and mxfp4.

    gate_up_words_kernel, down_words_kernel    as in `grouped`, for blocks of 16 to 128 rows

A tile has 256 rows of weights, half for each consumer. Eight rows of gate and the eight of up that belong to them alternate, so
both results of a hidden unit land in one thread; and what a warp stores is neighbouring units.

A block's rows are counted in pieces of PIECE, and as many pieces as it really has are loaded and multiplied: with 64 rows a
slot every block of 128 is half empty, with 256 the last one. What remains of it may be anything: a column's results depend on
no other.

Scales are copied by the step, 4 bytes a row and 128 columns (of mxfp4, whose rows of scales may begin in the middle of a word,
the two words in which they lie); zeros, a byte each, as the four bytes in which they lie. What passes the end of rows is zero.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.moe.kernels.roles import (
    RING,
    WORD,
    next_place,
    place_of_tile,
    receive,
    rings,
    send,
    take_tile,
)
from minisgl.moe.kernels.word_operand import COLUMNS, PART, multiply, steps_of, words_of_scales
from minisgl.moe.kernels.word_results import store_activated, store_outputs

WEIGHT_ROWS = gl.constexpr(256)  # of a tile, for two consumers
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
COPY = gl.constexpr(
    gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
)  # 16 bytes a thread, 8 threads a row of 64 columns
ROWS_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def _num_pieces(run, num_routes, PIECES: gl.constexpr, PIECE: gl.constexpr):
    """Of a block whose routes begin at `run`, real ones first: at least one."""
    pieces = 1
    for i in gl.static_range(1, PIECES):
        pieces += (gl.load(run + i * PIECE) < num_routes).to(gl.int32)
    return pieces


@gluon.jit
def _params_at(scales, zeros, slot, strides, row, K: gl.constexpr):
    """Where a tile's rows have their scales (pointers, and numbers within a slot) and zeros (a slot's pointer, and numbers)."""
    held, zero_at = slot.to(gl.int64), row * (K // 128)
    scale_at = row * (K // 32) // 4 if scales.dtype.element_ty == gl.uint32 else zero_at
    return scales + held * strides[0] + scale_at, scale_at, zeros + held * strides[1], zero_at


@gluon.jit
def _copy_params(pipe, at, params, group, K: gl.constexpr, ROWS: gl.constexpr):
    """A group's scales, and zeros if there are any, of a tile's rows. ROWS: those of a slot."""
    _rows, _words, scales, zeros, _full, _empty = pipe
    if words_of_scales(scales.dtype, K) == 2:
        LAST: gl.constexpr = (ROWS * (K // 32) - 1) // 4
        second = gl.minimum(group + 1, LAST - params[1])
        async_copy.async_copy_global_to_shared(scales.index(2 * at), params[0] + group)
        async_copy.async_copy_global_to_shared(scales.index(2 * at + 1), params[0] + second)
    else:
        async_copy.async_copy_global_to_shared(scales.index(at), params[0] + group)
    if zeros.dtype == gl.int32:
        word = (params[3] + group) // 4
        async_copy.async_copy_global_to_shared(zeros.index(at), params[2] + word)


@gluon.jit
def _copy_rows(tile, rows, column, D: gl.constexpr):
    """Columns from `column` on, zeros where they pass the end of rows."""
    if D % 128 == 0:
        async_copy.async_copy_global_to_shared(tile, rows + column)
    else:
        inside = gl.full(rows.shape, column, gl.int32, rows.type.layout) < D
        async_copy.async_copy_global_to_shared(tile, rows + column, inside)


@gluon.jit
def _gate_up_producer(
    x_TD, weights, scales, zeros, sorted_R, block_slots, num_m, counter, num_routes, strides, pipe, ring,
    D: gl.constexpr, F: gl.constexpr, GROUP_M: gl.constexpr, TOP_K: gl.constexpr, PIECE: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    rows, words, _scales, _zeros, full, empty = pipe
    STEPS: gl.constexpr = steps_of(D, BLOCK_K)
    STAGES: gl.constexpr = full.shape[0]
    TILES: gl.constexpr = BLOCK_K // COLUMNS
    GROUPS: gl.constexpr = BLOCK_K // 128
    BLOCK_M: gl.constexpr = rows.shape[1]
    PIECES: gl.constexpr = BLOCK_M // PIECE
    NUM_N: gl.constexpr = steps_of(2 * F, WEIGHT_ROWS)
    pieces_of_rows = rows._reinterpret(rows.dtype, [STAGES * TILES * PIECES, PIECE, COLUMNS], rows.layout)
    r = gl.arange(0, PIECE, gl.SliceLayout(1, COPY))
    k = gl.arange(0, COLUMNS, gl.SliceLayout(0, COPY))
    line = gl.arange(0, WEIGHT_ROWS, LINE)
    total = num_m * NUM_N
    stage, phase, at, at_phase = 0, 0, 0, 0
    tile = take_tile(counter, total)
    while tile >= 0:
        m, n = place_of_tile(tile, num_m, NUM_N, GROUP_M)
        slot = gl.load(block_slots + m)
        run = sorted_R + m * BLOCK_M
        pieces = _num_pieces(run, num_routes, PIECES, PIECE)
        x_rows = ()
        for i in gl.static_range(PIECES):
            route = gl.load(run + i * PIECE + r)
            token = gl.where(route < num_routes, route // TOP_K, 0).to(gl.int64)  # padding computes token 0
            x_rows = x_rows + (x_TD + token[:, None] * D + k[None, :],)  # noqa: RUF005
        unit = n * (WEIGHT_ROWS // 2) + line // 16 * 8 + line % 8
        if 2 * F % WEIGHT_ROWS != 0:
            unit = gl.minimum(unit, F - 1)
        params = _params_at(scales, zeros, slot, strides, line // 8 % 2 * F + unit, D)
        send(ring, at, at_phase, (m << 12 | n) << 4 | pieces)
        at, at_phase = next_place(at, at_phase, RING)
        tile = 0
        for half in gl.static_range(2):  # the next tile is asked for while buffers are full of this one
            for step in range(half * (STEPS // 2), STEPS if half == 1 else STEPS // 2):
                here = full.index(stage)
                mbarrier.wait(empty.index(stage), phase ^ 1)
                mbarrier.expect(here, WEIGHT_ROWS * BLOCK_K // 2)
                tma.async_copy_global_to_shared(
                    weights,
                    [slot, n * (WEIGHT_ROWS // 16), 0, 0, step * (BLOCK_K // 4)],
                    here,
                    words.index(stage),
                )
                for g in gl.static_range(GROUPS):
                    _copy_params(pipe, stage * GROUPS + g, params, step * GROUPS + g, D, 2 * F)
                for i in gl.static_range(PIECES):
                    if pieces > i:
                        for t in gl.static_range(TILES):
                            _copy_rows(
                                pieces_of_rows.index((stage * TILES + t) * PIECES + i),
                                x_rows[i],
                                step * BLOCK_K + t * COLUMNS,
                                D,
                            )
                async_copy.mbarrier_arrive(here, increment_count=False)
                stage, phase = next_place(stage, phase, STAGES)
            if half == 0:
                tile = take_tile(counter, total)
    send(ring, at, at_phase, -1)


@gluon.jit
def _gate_up_consumer(
    c: gl.constexpr, activated_PF, bias, stride_bias_s, block_slots, pipe, ring, D: gl.constexpr, F: gl.constexpr,
    HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, PIECE: gl.constexpr, BLOCK_K: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = pipe[0].shape[1]
    stage, phase, at, at_phase = 0, 0, 0, 0
    word = receive(ring, at, at_phase)
    while word >= 0:
        at, at_phase = next_place(at, at_phase, RING)
        m, n = word >> 16, word >> 4 & 0xFFF
        unit = n * (WEIGHT_ROWS // 2) + c * (PART // 2)
        b = bias
        if HAS_BIAS:
            b += gl.load(block_slots + m).to(gl.int64) * stride_bias_s
        for pieces in gl.static_range(1, BLOCK_M // PIECE + 1):
            if word & 15 == pieces:
                accs, stage, phase = multiply(pipe, stage, phase, c, pieces * PIECE, D, BLOCK_K, LATE)
                for i in gl.static_range(len(accs)):
                    first = m * BLOCK_M + i * accs[0].shape[1]
                    store_activated(accs[i], activated_PF, b, first, unit, F, HAS_BIAS, ACTIVATION, BLOCK_M)
        word = receive(ring, at, at_phase)


@gluon.jit
def _tiles_of_params(SCALE: gl.constexpr, COUNT: gl.constexpr, K: gl.constexpr, HAS_ZERO: gl.constexpr):
    scales = gl.allocate_shared_memory(SCALE, [COUNT * words_of_scales(SCALE, K), WEIGHT_ROWS], WORD)
    if HAS_ZERO:
        return scales, gl.allocate_shared_memory(gl.int32, [COUNT, WEIGHT_ROWS], WORD)
    else:
        return scales, scales


@gluon.jit(do_not_specialize=["num_routes"])
def gate_up_words_kernel(
    x_TD,
    weights,  # descriptor: int16 words, slots of [F / 8, 2, 8, D / 4], tiles of [1, .., 2, 8, BLOCK_K / 4]
    scales,  # slots of float32 [2F, D / 128]; of mxfp4 of uint8 [2F, D / 32], four as a uint32
    zeros,  # int32: slots of uint8 [2F, D / 128], four at a time (HAS_ZERO)
    bias,  # float32: slots of [2F] (HAS_BIAS)
    activated_PF,  # out, P positions in sorted order
    sorted_R,
    block_slots,
    num_blocks,
    counter,  # int32 [1], zero before and after
    num_routes,
    stride_scale_s,
    stride_zero_s,  # in int32
    stride_bias_s,
    D: gl.constexpr,
    F: gl.constexpr,
    TOP_K: gl.constexpr,
    HAS_ZERO: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BLOCK_M: gl.constexpr,
    PIECE: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    LATE: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PDL: gl.constexpr,
):
    rows = gl.allocate_shared_memory(
        x_TD.dtype.element_ty, [STAGES * (BLOCK_K // COLUMNS), BLOCK_M, COLUMNS], ROWS_LAYOUT
    )
    words = gl.allocate_shared_memory(
        gl.int16, [STAGES, 1, WEIGHT_ROWS // 16, 2, 8, BLOCK_K // 4], weights.layout
    )
    scale_tiles, zero_tiles = _tiles_of_params(
        scales.dtype.element_ty, STAGES * (BLOCK_K // 128), D, HAS_ZERO
    )
    # Full: each of the producer's threads has its copies, and the bytes of the weights that one of them announced are there.
    full, empty, ring = rings(128 + 1, STAGES)
    pipe = (rows, words, scale_tiles, zero_tiles, full, empty)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    num_m = gl.load(num_blocks)
    gl.warp_specialize(
        [
            (
                _gate_up_consumer,
                (0, activated_PF, bias, stride_bias_s, block_slots, pipe, ring, D, F, HAS_BIAS, ACTIVATION, PIECE, BLOCK_K,
                 LATE),
            ),
            (
                _gate_up_consumer,
                (1, activated_PF, bias, stride_bias_s, block_slots, pipe, ring, D, F, HAS_BIAS, ACTIVATION, PIECE, BLOCK_K,
                 LATE),
            ),
            (
                _gate_up_producer,
                (x_TD, weights, scales, zeros, sorted_R, block_slots, num_m, counter, num_routes,
                 (stride_scale_s, stride_zero_s), pipe, ring, D, F, GROUP_M, TOP_K, PIECE, BLOCK_K),
            ),
        ],
        [4, 4],
        [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip


@gluon.jit
def _down_producer(
    activated, weights, scales, zeros, sorted_R, block_slots, num_m, counter, num_routes, strides, pipe,
    ring, D: gl.constexpr, F: gl.constexpr, GROUP_M: gl.constexpr, PIECE: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    rows, words, _scales, _zeros, full, empty = pipe
    STEPS: gl.constexpr = steps_of(F, BLOCK_K)
    STAGES: gl.constexpr = full.shape[0]
    TILES: gl.constexpr = BLOCK_K // COLUMNS
    GROUPS: gl.constexpr = BLOCK_K // 128
    BLOCK_M: gl.constexpr = rows.shape[1]
    PIECES: gl.constexpr = BLOCK_M // PIECE
    NUM_N: gl.constexpr = steps_of(D, WEIGHT_ROWS)
    pieces_of_rows = rows._reinterpret(rows.dtype, [STAGES * TILES * PIECES, PIECE, COLUMNS], rows.layout)
    line = gl.arange(0, WEIGHT_ROWS, LINE)
    total = num_m * NUM_N
    stage, phase, at, at_phase = 0, 0, 0, 0
    tile = take_tile(counter, total)
    while tile >= 0:
        m, n = place_of_tile(tile, num_m, NUM_N, GROUP_M)
        slot = gl.load(block_slots + m)
        pieces = _num_pieces(sorted_R + m * BLOCK_M, num_routes, PIECES, PIECE)
        row = line + n * WEIGHT_ROWS
        if D % WEIGHT_ROWS != 0:
            row = gl.minimum(row, D - 1)
        params = _params_at(scales, zeros, slot, strides, row, F)
        send(ring, at, at_phase, (m << 12 | n) << 4 | pieces)
        at, at_phase = next_place(at, at_phase, RING)
        tile = 0
        for half in gl.static_range(2):
            for step in range(half * (STEPS // 2), STEPS if half == 1 else STEPS // 2):
                here = full.index(stage)
                mbarrier.wait(empty.index(stage), phase ^ 1)
                for i in gl.static_range(1, PIECES + 1):
                    mbarrier.expect(here, (WEIGHT_ROWS // 4 + i * PIECE) * BLOCK_K * 2, pred=pieces == i)
                tma.async_copy_global_to_shared(
                    weights, [slot, n * WEIGHT_ROWS, step * (BLOCK_K // 4)], here, words.index(stage)
                )
                for g in gl.static_range(GROUPS):
                    _copy_params(pipe, stage * GROUPS + g, params, step * GROUPS + g, F, D)
                for i in gl.static_range(PIECES):
                    for t in gl.static_range(TILES):
                        tma.async_copy_global_to_shared(
                            activated, [m * BLOCK_M + i * PIECE, step * BLOCK_K + t * COLUMNS], here,
                            pieces_of_rows.index((stage * TILES + t) * PIECES + i), pred=pieces > i,
                        )  # fmt: skip
                async_copy.mbarrier_arrive(here, increment_count=False)
                stage, phase = next_place(stage, phase, STAGES)
            if half == 0:
                tile = take_tile(counter, total)
    send(ring, at, at_phase, -1)


@gluon.jit
def _down_consumer(
    c: gl.constexpr, rows_RD, bias, stride_bias_s, sorted_R, block_slots, num_routes, pipe, ring, D: gl.constexpr,
    F: gl.constexpr, HAS_BIAS: gl.constexpr, PIECE: gl.constexpr, BLOCK_K: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = pipe[0].shape[1]
    stage, phase, at, at_phase = 0, 0, 0, 0
    word = receive(ring, at, at_phase)
    while word >= 0:
        at, at_phase = next_place(at, at_phase, RING)
        m, n = word >> 16, word >> 4 & 0xFFF
        output = n * WEIGHT_ROWS + c * PART
        b = bias
        if HAS_BIAS:
            b += gl.load(block_slots + m).to(gl.int64) * stride_bias_s
        for pieces in gl.static_range(1, BLOCK_M // PIECE + 1):
            if word & 15 == pieces:
                accs, stage, phase = multiply(pipe, stage, phase, c, pieces * PIECE, F, BLOCK_K, LATE)
                for i in gl.static_range(len(accs)):
                    first = m * BLOCK_M + i * accs[0].shape[1]
                    store_outputs(
                        accs[i], rows_RD, b, sorted_R, num_routes, first, output, D, HAS_BIAS, BLOCK_M
                    )
        word = receive(ring, at, at_phase)


@gluon.jit(do_not_specialize=["num_routes"])
def down_words_kernel(
    activated,  # descriptor: [P, F], tiles of [PIECE, 64]
    weights,  # descriptor: int16 words, slots of [D, F / 4], tiles of [1, .., BLOCK_K / 4]
    scales,  # slots of [D, F / 128] or [D, F / 32], as above
    zeros,  # int32: slots of uint8 [D, F / 128], four at a time (HAS_ZERO)
    bias,  # float32: slots of [D] (HAS_BIAS)
    rows_RD,  # out
    sorted_R,
    block_slots,
    num_blocks,
    counter,
    num_routes,
    stride_scale_s,
    stride_zero_s,
    stride_bias_s,
    D: gl.constexpr,
    F: gl.constexpr,
    HAS_ZERO: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    PIECE: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    LATE: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PDL: gl.constexpr,
):
    rows = gl.allocate_shared_memory(
        activated.dtype, [STAGES * (BLOCK_K // COLUMNS), BLOCK_M, COLUMNS], activated.layout
    )
    words = gl.allocate_shared_memory(gl.int16, [STAGES, 1, WEIGHT_ROWS, BLOCK_K // 4], weights.layout)
    scale_tiles, zero_tiles = _tiles_of_params(
        scales.dtype.element_ty, STAGES * (BLOCK_K // 128), F, HAS_ZERO
    )
    full, empty, ring = rings(128 + 1, STAGES)
    pipe = (rows, words, scale_tiles, zero_tiles, full, empty)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    num_m = gl.load(num_blocks)
    gl.warp_specialize(
        [
            (
                _down_consumer,
                (0, rows_RD, bias, stride_bias_s, sorted_R, block_slots, num_routes, pipe, ring, D, F, HAS_BIAS, PIECE, BLOCK_K,
                 LATE),
            ),
            (
                _down_consumer,
                (1, rows_RD, bias, stride_bias_s, sorted_R, block_slots, num_routes, pipe, ring, D, F, HAS_BIAS, PIECE, BLOCK_K,
                 LATE),
            ),
            (
                _down_producer,
                (activated, weights, scales, zeros, sorted_R, block_slots, num_m, counter, num_routes,
                 (stride_scale_s, stride_zero_s), pipe, ring, D, F, GROUP_M, PIECE, BLOCK_K),
            ),
        ],
        [4, 4],
        [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip
