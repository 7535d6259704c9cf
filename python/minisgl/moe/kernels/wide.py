"""Decode on the tensor cores: a program a (route, BLOCK_N rows of weights), for formats whose conversion costs.

With one row of activations the tensor cores run almost empty, but they take two weights a register, and so the
unpacking of `tiles` applies, which is several times cheaper than turning every code into a float32. All
BLOCK_M rows of the tile are the same token's; the first row of the product is kept. Rows of the down product
are float32 and added up by the reduce kernel.
"""

import triton
import triton.language as tl

from minisgl.moe.kernels.dependent import start_next, wait_for_previous
from minisgl.moe.kernels.product import activated, multiply_step, scaled

_BLOCK_M = tl.constexpr(16)


@triton.jit
def _first_row(tile):
    """Row 0 of a tile whose rows are all equal."""
    m = tl.arange(0, tile.shape[0])
    return tl.sum(tl.where((m == 0)[:, None], tile, 0.0), 0)


@triton.jit(do_not_specialize=["num_routes"])
def wide_gate_up_kernel(
    x_TD,
    weights,  # a pointer or a tensor descriptor, in words
    scales,
    zeros,
    bias,
    activated_RF,  # out
    slots_R,
    served_R,  # out int8 [R]
    num_routes,
    stride_s,
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
    FIRST_WAVE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    ASM: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    ROWS: tl.constexpr = 2 * BLOCK_N
    route = tl.program_id(0) % num_routes
    pid_n = tl.program_id(0) // num_routes
    wait_for_previous(PDL)
    start_next(PDL)
    slot = tl.load(slots_R + route)
    if pid_n == 0:
        if FIRST_WAVE:
            tl.store(served_R + route, (slot >= 0).to(tl.int8))
        elif slot >= 0:
            tl.store(served_R + route, 1)
    if slot < 0:
        return
    x_rows = x_TD + (route // TOP_K).to(tl.int64) * D + tl.zeros((_BLOCK_M, 1), tl.int32)
    r = tl.arange(0, ROWS)
    n_of_row = tl.minimum(pid_n * BLOCK_N + r // 2, F - 1)
    row_n = r % 2 * F + n_of_row
    scales += slot.to(tl.int64) * stride_scale_s
    zeros += slot.to(tl.int64) * stride_zero_s
    no_scale = tl.zeros((_BLOCK_M,), tl.float32)
    acc = tl.zeros((_BLOCK_M, ROWS), tl.float32)
    for k0 in range(0, D, BLOCK_K):
        acc = multiply_step(
            acc, x_rows, no_scale, weights, scales, zeros, slot, pid_n * BLOCK_N, row_n, row_n, k0, stride_s, stride_scale_n,
            FORMAT, HAS_ZERO, GROUP, D, ROWS, 2, _BLOCK_M, BLOCK_K, False, TMA, False, False, ASM, PRECISION,
        )  # fmt: skip
    acc = scaled(acc, no_scale, scales, row_n, FORMAT, ASM)
    if HAS_BIAS:
        acc += tl.load(bias + slot.to(tl.int64) * stride_bias_s + row_n)[None, :].to(tl.float32)
    gate, up = tl.split(acc.reshape(_BLOCK_M, BLOCK_N, 2))
    row = _first_row(activated(gate, up, ACTIVATION)).to(activated_RF.dtype.element_ty)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(activated_RF + route.to(tl.int64) * F + n, row, mask=n < F)


@triton.jit(do_not_specialize=["num_routes"])
def wide_down_kernel(
    activated_RF,
    weights,
    scales,
    zeros,
    bias,
    rows_RD,  # out float32
    slots_R,
    num_routes,
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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    ASM: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    route = tl.program_id(0) % num_routes
    pid_n = tl.program_id(0) // num_routes
    slot = tl.load(slots_R + route)  # written before the previous kernel began
    wait_for_previous(PDL)
    start_next(PDL)
    if slot < 0:
        return
    x_rows = activated_RF + route.to(tl.int64) * F + tl.zeros((_BLOCK_M, 1), tl.int32)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_n = tl.minimum(n, D - 1)
    scales += slot.to(tl.int64) * stride_scale_s
    zeros += slot.to(tl.int64) * stride_zero_s
    no_scale = tl.zeros((_BLOCK_M,), tl.float32)
    acc = tl.zeros((_BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, F, BLOCK_K):
        acc = multiply_step(
            acc, x_rows, no_scale, weights, scales, zeros, slot, pid_n * BLOCK_N, row_n, row_n, k0, stride_s, stride_scale_n,
            FORMAT, HAS_ZERO, GROUP, F, BLOCK_N, 1, _BLOCK_M, BLOCK_K, False, TMA, False, False, ASM, PRECISION,
        )  # fmt: skip
    acc = scaled(acc, no_scale, scales, row_n, FORMAT, ASM)
    if HAS_BIAS:
        acc += tl.load(bias + slot.to(tl.int64) * stride_bias_s + row_n)[None, :].to(tl.float32)
    tl.store(rows_RD + route.to(tl.int64) * D + n, _first_row(acc), mask=n < D)
