"""Triton kernels for dense weights that are stored otherwise: as fp8 codes, or, an embedding, in host memory.

Shape letters: M rows, N outputs, K inputs, G groups of columns, T tokens, D model dim. What a kernel may do before its wait
says `moe.kernels.dependent`.
"""

import triton
import triton.language as tl

from minisgl.moe.kernels.dependent import start_next, wait_for_previous
from minisgl.moe.kernels.rows import fp8_rows


@triton.jit
def fp8_linear_kernel(
    x_ptr,  # [M, K]
    codes_ptr,  # e4m3 [N, K]
    scale_ptr,  # float32 [N, G]
    bias_ptr,
    y_ptr,  # out [M, N]
    M,
    N,
    stride_x,
    K: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale, K where a row has one
    NUM_GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,  # 16: as many columns as a tensor core takes
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides GROUP where there are several
    PDL: tl.constexpr,
):
    """x @ (codes * scale).T for up to BLOCK_M rows on tensor cores: outputs are the tile's rows. Grid (blocks of N,).

    A code is exact in x's type, and its scale multiplies sums of products: nothing is rounded that the definition keeps. A
    row's sum does not depend on M.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m = tl.arange(0, BLOCK_M)
    row = tl.minimum(n, N - 1).to(tl.int64)
    codes_ptrs = codes_ptr + row[:, None] * K + k[None, :]
    x_ptrs = x_ptr + m[None, :] * stride_x + k[:, None]
    dtype = x_ptr.dtype.element_ty
    wait_for_previous(PDL)
    start_next(PDL)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            codes = tl.load(codes_ptrs + k0)
            x = tl.load(x_ptrs + k0, mask=(m < M)[None, :], other=0.0)
        else:
            codes = tl.load(codes_ptrs + k0, mask=(k0 + k < K)[None, :], other=0.0)
            x = tl.load(x_ptrs + k0, mask=(m < M)[None, :] & (k0 + k < K)[:, None], other=0.0)
        if NUM_GROUPS == 1:
            acc = tl.dot(codes.to(dtype), x, acc, input_precision="ieee")
        else:
            scale = tl.load(scale_ptr + row * NUM_GROUPS + k0 // GROUP)
            acc += tl.dot(codes.to(dtype), x, input_precision="ieee") * scale[:, None]
    if NUM_GROUPS == 1:
        acc *= tl.load(scale_ptr + row)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    inside = (n < N)[:, None] & (m < M)[None, :]
    tl.store(y_ptr + m[None, :].to(tl.int64) * N + n[:, None], acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def quantize_rows_kernel(
    x_ptr,  # [M, K]
    codes_ptr,  # out e4m3 [M, K]
    scale_ptr,  # out float32 [M]
    stride_x,
    K: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= K
    PDL: tl.constexpr,
):
    """fp8 codes of a row and their scale: its largest magnitude becomes 448. Grid (M,)."""
    m = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    start_next(PDL)
    x = tl.load(x_ptr + m * stride_x + k, mask=k < K, other=0.0).to(tl.float32)
    codes, scale = fp8_rows(x[None, :])
    tl.store(codes_ptr + m * K + k[None, :], codes, mask=(k < K)[None, :])
    tl.store(scale_ptr + m + tl.arange(0, 1), scale)


@triton.jit
def gather_rows_kernel(
    ids_ptr,  # [T]
    rows_ptr,  # [V, D], in pinned host memory: read over the link
    y_ptr,  # out [T, D]
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[t] = rows[ids[t]]. Grid (T, blocks of D)."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    start_next(PDL)
    row = tl.load(ids_ptr + t).to(tl.int64)
    tl.store(y_ptr + t * D + d, tl.load(rows_ptr + row * D + d, mask=d < D, other=0.0), mask=d < D)
