"""Rows to fp8 E4M3 with one scale a row: amax / 448, or 1 where the row is zero."""

import triton
import triton.language as tl

from minisgl.moe.kernels.dependent import start_next, wait_for_previous


@triton.jit
def quantize_rows_kernel(
    x,  # [rows, N]
    q,  # out float8_e4m3fn [rows, N]
    scale,  # out float32 [rows]
    num_blocks,  # int32 [1]: only the first num_blocks * BLOCK_M rows exist
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,  # 0: all rows of the grid exist
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wait_for_previous(PDL)
    start_next(PDL)
    if BLOCK_M > 0:  # noqa: SIM102 (decided at compile time)
        if row >= tl.load(num_blocks) * BLOCK_M:
            return
    n = tl.arange(0, BLOCK_N)
    values = tl.load(x + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(values), 0)
    row_scale = tl.where(amax > 0, amax / 448.0, 1.0)
    # The conversion saturates and keeps NaN; a clamp in front of it would turn NaN into 448.
    tl.store(q + row * N + n, (values / row_scale).to(tl.float8e4nv), mask=n < N)
    tl.store(scale + row, row_scale)
