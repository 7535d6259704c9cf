"""The grouped GEMMs: blocks of BLOCK_M rows that share a slot, times that slot's weights. Any number of tokens.

    gate_up_kernel   x rows (gathered by route) -> activated rows, in sorted order, padding included
    down_kernel      activated rows -> rows_RD, each at its own route

A program of gate_up owns BLOCK_N columns of gate and the same columns of up, read as one tile whose rows
alternate: one product instead of two reads the rows half as often from shared memory, the two results lie in
the same thread, and the activation is applied to registers, so the [R, 2F] intermediate never exists.
Activated rows stay in sorted order, so the second GEMM reads its rows contiguously.

TILES_N: a program may own several column tiles. The two loops are flattened into one, so the loads of the next tile
travel while this one's rows are stored, and filling the pipeline is paid once.

TAIL: a slot's last block is on average half empty, and at 256 rows a slot that is a fifth of all arithmetic. A
block whose rows fit half of BLOCK_M runs as such.
"""

import triton
import triton.language as tl

from minisgl.moe.kernels.dependent import start_next, wait_for_previous
from minisgl.moe.kernels.product import activated, multiply_step, scaled


@triton.jit
def _program_blocks(num_m, num_n, GROUP_M: tl.constexpr):
    """Program id to (row block, column block), GROUP_M row blocks sharing each column block's weights in L2."""
    pid = tl.program_id(0)
    if GROUP_M == 1:
        return pid // num_n, pid % num_n
    else:
        group = pid // (GROUP_M * num_n)
        size = min(num_m - group * GROUP_M, GROUP_M)
        within = pid % (GROUP_M * num_n)
        return group * GROUP_M + within % size, within // size


@triton.jit
def _rows_in_block(sorted_R, first, num_routes, BLOCK_M: tl.constexpr):
    route = tl.load(sorted_R + first + tl.arange(0, BLOCK_M))
    return tl.sum((route < num_routes).to(tl.int32), 0)


@triton.jit
def _gate_up_block(
    x_TD, x_scale_T, weights, scales, zeros, bias, activated_PF, amax_P, sorted_R, num_routes, slot, first, pid_n,
    stride_s, stride_scale_n, D: tl.constexpr, F: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, AMAX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr,
    TMA: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr, OUT_UNIT: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = 2 * BLOCK_N
    m = first + tl.arange(0, BLOCK_M)
    route = tl.load(sorted_R + m)
    token = tl.where(route < num_routes, route // TOP_K, 0).to(tl.int64)  # padding computes token 0, unused
    x_rows = x_TD + token[:, None] * D
    r = tl.arange(0, ROWS)
    x_scale = tl.zeros((BLOCK_M,), tl.float32)
    if (FORMAT == "fp8") or (FORMAT == "fp8_block"):
        x_scale = tl.load(x_scale_T + token)
    x_sums = x_scale_T
    if UNIT > 0:
        x_sums = x_scale_T + token * (D // UNIT)
    out = activated_PF + m.to(tl.int64)[:, None] * F
    for tile in tl.range(0, TILES_N, flatten=True):
        first_n = (pid_n * TILES_N + tile) * BLOCK_N
        n_of_row = tl.minimum(first_n + r // 2, F - 1)
        row_n = r % 2 * F + n_of_row
        block_n = (
            r % 2 * ((F + 127) // 128) + n_of_row // 128
        )  # gate and up have their own blocks of 128 rows
        acc = tl.zeros((ROWS, BLOCK_M) if SWAP else (BLOCK_M, ROWS), tl.float32)
        for k0 in range(0, D, BLOCK_K):
            acc = multiply_step(
                acc, x_rows, x_scale, weights, scales, zeros, slot, first_n, row_n, block_n, k0, stride_s,
                stride_scale_n, FORMAT, HAS_ZERO, GROUP, D, ROWS, 2, BLOCK_M, BLOCK_K, SWAP, TMA, True, False, ASM,
                PRECISION, x_sums, UNIT,
            )  # fmt: skip
        if SWAP:
            gate_up = tl.trans(acc)
        else:
            gate_up = acc
        gate_up = scaled(gate_up, x_scale, scales, row_n, FORMAT, ASM)
        if HAS_BIAS:
            gate_up += tl.load(bias + row_n)[None, :].to(tl.float32)
        gate, up = tl.split(gate_up.reshape(BLOCK_M, BLOCK_N, 2))
        row = activated(gate, up, ACTIVATION).to(activated_PF.dtype.element_ty)
        n = first_n + tl.arange(0, BLOCK_N)
        if FORMAT == "int8":
            even, odd = tl.split(row.reshape(BLOCK_M, BLOCK_N // 2, 2))
            half = first_n // 2 + tl.arange(0, BLOCK_N // 2)
            tl.store(out + half[None, :], even, mask=(half < F // 2)[None, :])
            tl.store(out + F // 2 + half[None, :], odd, mask=(half < F // 2)[None, :])
        elif F % (BLOCK_N * TILES_N) == 0:
            tl.store(out + n[None, :], row)
        else:
            tl.store(out + n[None, :], row, mask=(n < F)[None, :])
        if AMAX:  # of each row, for the fp8 codes that down makes of it; a maximum doesn't depend on who comes first
            magnitude = tl.where((n < F)[None, :], tl.abs(row.to(tl.float32)), 0.0)
            tl.atomic_max(amax_P + m, tl.max(magnitude, 1), sem="relaxed")
        if OUT_UNIT > 0:  # sums of each row, for down
            sums = tl.sum(row.to(tl.float32).reshape(BLOCK_M, BLOCK_N // OUT_UNIT, OUT_UNIT), 2)
            unit = first_n // OUT_UNIT + tl.arange(0, BLOCK_N // OUT_UNIT)
            sums_of_m = amax_P + m.to(tl.int64)[:, None] * (F // OUT_UNIT)
            tl.store(sums_of_m + unit[None, :], sums, mask=(unit < F // OUT_UNIT)[None, :])


@triton.jit(do_not_specialize=["num_routes", "grid_m"])
def gate_up_kernel(
    x_TD,
    x_scale_T,  # float32: scales (fp8), or sums over UNIT columns (int4)
    weights,  # slots of [2F, D], a pointer or a tensor descriptor
    scales,
    zeros,
    bias,
    activated_PF,  # out, P positions in sorted order; int8: even columns first, then odd ones
    amax_P,  # out float32: zero before (AMAX), or sums of rows over OUT_UNIT columns
    sorted_R,
    block_slots,
    num_blocks,
    num_routes,
    grid_m,
    stride_s,  # of weights, in words
    stride_scale_s,
    stride_scale_n,
    stride_zero_s,
    stride_bias_s,
    D: tl.constexpr,
    F: tl.constexpr,
    TOP_K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TAIL: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    ASM: tl.constexpr,
    PRECISION: tl.constexpr,
    UNIT: tl.constexpr,  # of sums of x, 0 for none
    OUT_UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    NUM_N: tl.constexpr = (F + BLOCK_N * TILES_N - 1) // (BLOCK_N * TILES_N)
    pid_m, pid_n = _program_blocks(grid_m, NUM_N, GROUP_M)
    wait_for_previous(PDL)
    start_next(PDL)
    if pid_m >= tl.load(num_blocks):
        return
    slot = tl.load(block_slots + pid_m)
    first = pid_m * BLOCK_M
    scales += slot.to(tl.int64) * stride_scale_s
    zeros += slot.to(tl.int64) * stride_zero_s
    bias += slot.to(tl.int64) * stride_bias_s
    small = False
    if TAIL:
        small = _rows_in_block(sorted_R, first, num_routes, BLOCK_M) <= BLOCK_M // 2
    if small:
        if TAIL:
            _gate_up_block(
                x_TD, x_scale_T, weights, scales, zeros, bias, activated_PF, amax_P, sorted_R, num_routes, slot,
                first, pid_n, stride_s, stride_scale_n, D, F, TOP_K, FORMAT, GROUP, HAS_ZERO, HAS_BIAS, ACTIVATION,
                AMAX, BLOCK_M // 2, BLOCK_N, TILES_N, BLOCK_K, SWAP, TMA, ASM, PRECISION, UNIT, OUT_UNIT,
            )  # fmt: skip
    else:
        _gate_up_block(
            x_TD, x_scale_T, weights, scales, zeros, bias, activated_PF, amax_P, sorted_R, num_routes, slot,
            first, pid_n, stride_s, stride_scale_n, D, F, TOP_K, FORMAT, GROUP, HAS_ZERO, HAS_BIAS, ACTIVATION,
            AMAX, BLOCK_M, BLOCK_N, TILES_N, BLOCK_K, SWAP, TMA, ASM, PRECISION, UNIT, OUT_UNIT,
        )  # fmt: skip


@triton.jit
def _down_block(
    activated_PF, activated_scale_P, weights, scales, zeros, bias, rows_RD, sorted_R, num_routes, slot, first, pid_n,
    stride_s, stride_scale_n, D: tl.constexpr, F: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, AMAX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TILES_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, ASM: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    m = first + tl.arange(0, BLOCK_M)
    x_rows = activated_PF + m.to(tl.int64)[:, None] * F
    x_scale = tl.zeros((BLOCK_M,), tl.float32)
    if (FORMAT == "fp8") or (FORMAT == "fp8_block"):
        x_scale = tl.load(activated_scale_P + m)
        if AMAX:
            x_scale = tl.where(x_scale > 0, x_scale / 448.0, 1.0)
    x_sums = activated_scale_P
    if UNIT > 0:
        x_sums = activated_scale_P + m.to(tl.int64) * (F // UNIT)
    route = tl.load(sorted_R + m)
    for tile in tl.range(0, TILES_N, flatten=True):
        first_n = (pid_n * TILES_N + tile) * BLOCK_N
        n = first_n + tl.arange(0, BLOCK_N)
        row_n = tl.minimum(n, D - 1)
        acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
        for k0 in range(0, F, BLOCK_K):
            acc = multiply_step(
                acc, x_rows, x_scale, weights, scales, zeros, slot, first_n, row_n, row_n // 128, k0, stride_s,
                stride_scale_n, FORMAT, HAS_ZERO, GROUP, F, BLOCK_N, 1, BLOCK_M, BLOCK_K, SWAP, TMA, True, AMAX, ASM,
                PRECISION, x_sums, UNIT,
            )  # fmt: skip
        if SWAP:
            row = tl.trans(acc)
        else:
            row = acc
        row = scaled(row, x_scale, scales, row_n, FORMAT, ASM)
        if HAS_BIAS:
            row += tl.load(bias + row_n)[None, :].to(tl.float32)
        out = rows_RD + route.to(tl.int64)[:, None] * D + n[None, :]
        mask = (route < num_routes)[:, None]
        if D % (BLOCK_N * TILES_N) != 0:
            mask = mask & (n < D)[None, :]
        tl.store(out, row.to(rows_RD.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_routes", "grid_m"])
def down_kernel(
    activated_PF,
    activated_scale_P,  # float32. fp8: scales of codes, or (AMAX) largest magnitudes of rows; int4: sums over UNIT columns
    weights,  # slots of [D, F], a pointer or a tensor descriptor
    scales,
    zeros,
    bias,
    rows_RD,  # out
    sorted_R,
    block_slots,
    num_blocks,
    num_routes,
    grid_m,
    stride_s,
    stride_scale_s,
    stride_scale_n,
    stride_zero_s,
    stride_bias_s,
    D: tl.constexpr,
    F: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TAIL: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    ASM: tl.constexpr,
    PRECISION: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    NUM_N: tl.constexpr = (D + BLOCK_N * TILES_N - 1) // (BLOCK_N * TILES_N)
    pid_m, pid_n = _program_blocks(grid_m, NUM_N, GROUP_M)
    wait_for_previous(PDL)
    start_next(PDL)
    if pid_m >= tl.load(num_blocks):
        return
    slot = tl.load(block_slots + pid_m)
    first = pid_m * BLOCK_M
    scales += slot.to(tl.int64) * stride_scale_s
    zeros += slot.to(tl.int64) * stride_zero_s
    bias += slot.to(tl.int64) * stride_bias_s
    small = False
    if TAIL:
        small = _rows_in_block(sorted_R, first, num_routes, BLOCK_M) <= BLOCK_M // 2
    if small:
        if TAIL:
            _down_block(
                activated_PF, activated_scale_P, weights, scales, zeros, bias, rows_RD, sorted_R, num_routes, slot,
                first, pid_n, stride_s, stride_scale_n, D, F, FORMAT, GROUP, HAS_ZERO, HAS_BIAS, AMAX, BLOCK_M // 2,
                BLOCK_N, TILES_N, BLOCK_K, SWAP, TMA, ASM, PRECISION, UNIT,
            )  # fmt: skip
    else:
        _down_block(
            activated_PF, activated_scale_P, weights, scales, zeros, bias, rows_RD, sorted_R, num_routes, slot,
            first, pid_n, stride_s, stride_scale_n, D, F, FORMAT, GROUP, HAS_ZERO, HAS_BIAS, AMAX, BLOCK_M,
            BLOCK_N, TILES_N, BLOCK_K, SWAP, TMA, ASM, PRECISION, UNIT,
        )  # fmt: skip
