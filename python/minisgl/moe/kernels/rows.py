"""Rows of activations made ready for a format: fp8 codes with one scale a row, even and odd columns apart for int8, or
sums over units of columns for int4, whose codes are then multiplied as they are stored; or, for the kernels of
`few_rows`, columns in the order in which fragments take them.

fp8: scale = amax / 448, or 1 where the row is zero. int8: a 16-bit word of weights holds two neighbouring
columns, which unpack into a tile of even and a tile of odd columns; rows in that order meet both with
contiguous loads. The rows of x are made ready by the launch that aligns routes; the activated rows, for fp8,
by a launch of their own.
"""

import triton
import triton.language as tl

from minisgl.moe.kernels.dependent import start_next, wait_for_previous
from minisgl.moe.kernels.fragments import in_order


@triton.jit
def fp8_rows(values):
    """codes and scales [rows] of float32 values [rows, N]. The conversion saturates and keeps NaN; a clamp in front of it
    would turn NaN into 448."""
    amax = tl.max(tl.abs(values), 1)
    scale = tl.where(amax > 0, amax / 448.0, 1.0)
    return (values / scale[:, None]).to(tl.float8e4nv), scale


@triton.jit
def prepare_row(
    x, out, scale, row, N: tl.constexpr, BLOCK_N: tl.constexpr, MODE: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """One row of x [.., N] into out: MODE "fp8" (with its scale), "split" or "order"; or its sums over UNIT columns: "sums"."""
    row = row.to(tl.int64)
    if MODE == "sums":
        n = tl.arange(0, BLOCK_N)
        values = tl.load(x + row * N + n, mask=n < N, other=0.0).to(tl.float32)
        unit = tl.arange(0, BLOCK_N // UNIT)
        sums = tl.sum(values.reshape(BLOCK_N // UNIT, UNIT), 1)
        tl.store(scale + row * (N // UNIT) + unit, sums, mask=unit < N // UNIT)
        return
    if MODE == "order":
        n = tl.arange(0, BLOCK_N)
        tl.store(out + row * N + in_order(n), tl.load(x + row * N + n, mask=n < N), mask=n < N)
        return
    if MODE == "fp8":
        n = tl.arange(0, BLOCK_N)
        values = tl.load(x + row * N + n, mask=n < N, other=0.0).to(tl.float32)
        amax = tl.max(tl.abs(values), 0)  # as `fp8_rows`, whose single row would go through shared memory
        row_scale = tl.where(amax > 0, amax / 448.0, 1.0)
        tl.store(out + row * N + n, (values / row_scale).to(tl.float8e4nv), mask=n < N)
        tl.store(scale + row, row_scale)
    else:
        half = tl.arange(0, BLOCK_N // 2)
        inside = half < N // 2
        even = tl.load(x + row * N + 2 * half, mask=inside, other=0.0)
        odd = tl.load(x + row * N + 2 * half + 1, mask=inside, other=0.0)
        tl.store(out + row * N + half, even, mask=inside)
        tl.store(out + row * N + N // 2 + half, odd, mask=inside)


@triton.jit
def quantize_activated_kernel(
    x,  # [positions, N]
    codes,  # out float8_e4m3fn
    scale,  # out float32 [positions]
    num_blocks,  # int32 [1]: only the first num_blocks * BLOCK_M rows exist
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,  # rows a program; divides BLOCK_M
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    wait_for_previous(PDL)
    start_next(PDL)
    if tl.program_id(0) * ROWS >= tl.load(num_blocks) * BLOCK_M:
        return
    n = tl.arange(0, BLOCK_N)
    pointers = row[:, None] * N + n[None, :]
    mask = (n < N)[None, :]
    values = tl.load(x + pointers, mask=mask, other=0.0).to(tl.float32)
    row_codes, row_scale = fp8_rows(values)
    tl.store(codes + pointers, row_codes, mask=mask)
    tl.store(scale + row, row_scale)
