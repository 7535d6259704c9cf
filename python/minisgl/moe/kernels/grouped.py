"""The grouped GEMMs: blocks of BLOCK_M rows that share a slot, times that slot's weights. Any number of tokens.

    gate_up_kernel   x rows (gathered by route) -> activated rows, in sorted order, padding included
    down_kernel      activated rows -> rows_RD, each at its own route

A program of gate_up owns the same BLOCK_N columns of gate and of up, so the activation is applied to its
registers and the [R, 2F] intermediate never exists. Activated rows stay in sorted order, so the second GEMM
reads its rows contiguously. SWAP computes the transposed product: then the weights are the tall operand and
the rows may be as few as 16 on tensor cores whose instructions want 64. Operands in shared memory come by
asynchronous copies, or by tensor descriptors (TMA) where `weights` is one.
"""

import triton
import triton.language as tl

from minisgl.moe.kernels.dependent import start_next, wait_for_previous
from minisgl.moe.kernels.tiles import unpack_int4, unpack_mxfp4, widen_int8


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
def _dot(acc, x, w, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """acc + x w^T with x [BLOCK_M, k] and w [BLOCK_N, k]; its transpose if SWAP."""
    if SWAP:
        return tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    else:
        return tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)


@triton.jit
def _load_x(x_rows, k, K: tl.constexpr, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(x_rows + k[None, :])
    else:
        return tl.load(x_rows + k[None, :], mask=(k < K)[None, :], other=0.0)


@triton.jit
def _load_w(
    weights, slot, first_n, n, k0, stride_s, COLS: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
    EVEN_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_N, STEP] of stored elements of a slot's [N, COLS] matrix. Rows past the edge repeat the last one
    (TMA: are zero); their columns are never stored."""
    if TMA:
        return weights.load([slot, first_n, k0]).reshape(BLOCK_N, STEP)
    else:
        k = k0 + tl.arange(0, STEP)
        pointers = weights + slot.to(tl.int64) * stride_s + n[:, None] * COLS + k[None, :]
        if EVEN_K:
            return tl.load(pointers)
        return tl.load(pointers, mask=(k < COLS)[None, :], other=0.0)


@triton.jit
def _group_params(params, n, k0, stride_n, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Per-group numbers [BLOCK_N, GROUPS, 1] of the tile that starts at k0 (zero past the edge)."""
    g = k0 // GROUP + tl.arange(0, GROUPS)
    pointers = params + n[:, None] * stride_n + g[None, :]
    if K % (GROUP * GROUPS) == 0:
        return tl.load(pointers)[:, :, None]
    else:
        return tl.load(pointers, mask=(g * GROUP < K)[None, :], other=0.0)[:, :, None]


@triton.jit
def _accumulate(
    acc, x0, x1, weights, scales, zeros, slot, first_n, n, scale_n, k0, stride_s, stride_scale_n,
    FORMAT: tl.constexpr, HAS_ZERO: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
    ASM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc plus the product of one K step. x0 is the tile of rows, or its low-nibble columns with x1 the high ones."""
    if (FORMAT == "int4") or (FORMAT == "mxfp4"):
        STEP: tl.constexpr = BLOCK_K // 2
        GROUPS: tl.constexpr = BLOCK_K // GROUP if BLOCK_K > GROUP else 1
        packed = _load_w(
            weights, slot, first_n, n, k0 // 2, stride_s, K // 2, BLOCK_N, STEP, EVEN_K, TMA
        ).reshape(BLOCK_N, GROUPS, STEP // GROUPS)
        scale = _group_params(scales, n, k0, stride_scale_n, K, GROUP, GROUPS)
        if FORMAT == "mxfp4":
            low, high = unpack_mxfp4(packed, scale, x0.dtype, ASM)
        else:
            zero = tl.full((BLOCK_N, GROUPS, 1), 8.0, tl.float32)
            if HAS_ZERO:
                zero = _group_params(zeros, n, k0, stride_scale_n, K, GROUP, GROUPS).to(tl.float32)
            low, high = unpack_int4(packed, scale.to(tl.float32), zero, x0.dtype, ASM)
        acc = _dot(acc, x0, low.reshape(BLOCK_N, STEP), SWAP, PRECISION)
        acc = _dot(acc, x1, high.reshape(BLOCK_N, STEP), SWAP, PRECISION)
    else:
        w = _load_w(weights, slot, first_n, n, k0, stride_s, K, BLOCK_N, BLOCK_K, EVEN_K, TMA)
        if FORMAT == "int8":
            w = widen_int8(w, x0.dtype, ASM)
        if FORMAT == "fp8_block":
            scale = tl.load(scales + scale_n * stride_scale_n + k0 // 128)
            part = _dot(None, x0, w, SWAP, PRECISION)
            acc += part * (scale[:, None] if SWAP else scale[None, :])
        else:
            acc = _dot(acc, x0, w, SWAP, PRECISION)
    return acc


@triton.jit
def _scaled(acc, x_scale, scales, n, FORMAT: tl.constexpr):
    """acc [BLOCK_M, BLOCK_N] times the scales that cover a whole row of x or of the weights."""
    if (FORMAT == "fp8") or (FORMAT == "int8"):
        acc = acc * tl.load(scales + n)[None, :]
    if (FORMAT == "fp8") or (FORMAT == "fp8_block"):
        acc = acc * x_scale[:, None]
    return acc


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    """`moe.base.activate` on float32 tiles."""
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    else:
        if ACTIVATION == "gelu":
            return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return (up + 1.0) * gate / (1.0 + tl.exp(-1.702 * gate))


@triton.jit(do_not_specialize=["num_routes", "grid_m"])
def gate_up_kernel(
    x_TD,
    x_scale_T,  # float32, fp8 only
    weights,  # slots of [2F, D], a pointer or a tensor descriptor
    scales,
    zeros,
    bias,
    activated_PF,  # out, P positions in sorted order
    sorted_R,
    block_slots,
    num_blocks,
    num_routes,
    grid_m,
    stride_s,  # of weights, in stored elements
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    ASM: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    NUM_N: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    EVEN_K: tl.constexpr = D % BLOCK_K == 0
    PACKED: tl.constexpr = (FORMAT == "int4") or (FORMAT == "mxfp4")
    pid_m, pid_n = _program_blocks(grid_m, NUM_N, GROUP_M)
    wait_for_previous(PDL)
    start_next(PDL)
    if pid_m >= tl.load(num_blocks):
        return
    slot = tl.load(block_slots + pid_m)
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    route = tl.load(sorted_R + m)
    token = tl.where(route < num_routes, route // TOP_K, 0).to(tl.int64)  # padding computes token 0, unused
    x_rows = x_TD + token[:, None] * D
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    gate_n = tl.minimum(n, F - 1)
    up_n = F + gate_n
    scales += slot.to(tl.int64) * stride_scale_s
    zeros += slot.to(tl.int64) * stride_zero_s
    gate_block, up_block = (
        gate_n // 128,
        (F + 127) // 128 + gate_n // 128,
    )  # fp8_block: gate and up have own blocks

    acc_gate = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    half = tl.arange(0, BLOCK_K // 2)
    low_k = half // 16 * 32 + half % 16
    for k0 in range(0, D, BLOCK_K):
        if PACKED:
            x0 = _load_x(x_rows, k0 + low_k, D, EVEN_K)
            x1 = _load_x(x_rows, k0 + 16 + low_k, D, EVEN_K)
        else:
            x0 = _load_x(x_rows, k0 + tl.arange(0, BLOCK_K), D, EVEN_K)
            x1 = x0
        acc_gate = _accumulate(
            acc_gate, x0, x1, weights, scales, zeros, slot, pid_n * BLOCK_N, gate_n, gate_block, k0, stride_s,
            stride_scale_n, FORMAT, HAS_ZERO, GROUP, D, BLOCK_N, BLOCK_K, EVEN_K, SWAP, TMA, ASM, PRECISION,
        )  # fmt: skip
        acc_up = _accumulate(
            acc_up, x0, x1, weights, scales, zeros, slot, F + pid_n * BLOCK_N, up_n, up_block, k0, stride_s,
            stride_scale_n, FORMAT, HAS_ZERO, GROUP, D, BLOCK_N, BLOCK_K, EVEN_K, SWAP, TMA, ASM, PRECISION,
        )  # fmt: skip
    if SWAP:
        acc_gate, acc_up = tl.trans(acc_gate), tl.trans(acc_up)
    x_scale = tl.zeros((BLOCK_M,), tl.float32)
    if (FORMAT == "fp8") or (FORMAT == "fp8_block"):
        x_scale = tl.load(x_scale_T + token)
    gate = _scaled(acc_gate, x_scale, scales, gate_n, FORMAT)
    up = _scaled(acc_up, x_scale, scales, up_n, FORMAT)
    if HAS_BIAS:
        bias += slot.to(tl.int64) * stride_bias_s
        gate += tl.load(bias + gate_n)[None, :].to(tl.float32)
        up += tl.load(bias + up_n)[None, :].to(tl.float32)
    row = activated(gate, up, ACTIVATION).to(activated_PF.dtype.element_ty)
    out = activated_PF + m.to(tl.int64)[:, None] * F + n[None, :]
    if F % BLOCK_N == 0:
        tl.store(out, row)
    else:
        tl.store(out, row, mask=(n < F)[None, :])


@triton.jit(do_not_specialize=["num_routes", "grid_m"])
def down_kernel(
    activated_PF,
    activated_scale_P,  # float32, fp8 only
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    ASM: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    NUM_N: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    EVEN_K: tl.constexpr = F % BLOCK_K == 0
    PACKED: tl.constexpr = (FORMAT == "int4") or (FORMAT == "mxfp4")
    pid_m, pid_n = _program_blocks(grid_m, NUM_N, GROUP_M)
    wait_for_previous(PDL)
    start_next(PDL)
    if pid_m >= tl.load(num_blocks):
        return
    slot = tl.load(block_slots + pid_m)
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    x_rows = activated_PF + m.to(tl.int64)[:, None] * F
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner_n = tl.minimum(n, D - 1)
    scales += slot.to(tl.int64) * stride_scale_s
    zeros += slot.to(tl.int64) * stride_zero_s

    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    half = tl.arange(0, BLOCK_K // 2)
    low_k = half // 16 * 32 + half % 16
    for k0 in range(0, F, BLOCK_K):
        if PACKED:
            x0 = _load_x(x_rows, k0 + low_k, F, EVEN_K)
            x1 = _load_x(x_rows, k0 + 16 + low_k, F, EVEN_K)
        else:
            x0 = _load_x(x_rows, k0 + tl.arange(0, BLOCK_K), F, EVEN_K)
            x1 = x0
        acc = _accumulate(
            acc, x0, x1, weights, scales, zeros, slot, pid_n * BLOCK_N, inner_n, inner_n // 128, k0, stride_s,
            stride_scale_n, FORMAT, HAS_ZERO, GROUP, F, BLOCK_N, BLOCK_K, EVEN_K, SWAP, TMA, ASM, PRECISION,
        )  # fmt: skip
    if SWAP:
        acc = tl.trans(acc)
    x_scale = tl.zeros((BLOCK_M,), tl.float32)
    if (FORMAT == "fp8") or (FORMAT == "fp8_block"):
        x_scale = tl.load(activated_scale_P + m)
    row = _scaled(acc, x_scale, scales, inner_n, FORMAT)
    if HAS_BIAS:
        row += tl.load(bias + slot.to(tl.int64) * stride_bias_s + inner_n)[None, :].to(tl.float32)
    route = tl.load(sorted_R + m)
    out = rows_RD + route.to(tl.int64)[:, None] * D + n[None, :]
    mask = (route < num_routes)[:, None]
    if D % BLOCK_N != 0:
        mask = mask & (n < D)[None, :]
    tl.store(out, row.to(rows_RD.dtype.element_ty), mask=mask)
