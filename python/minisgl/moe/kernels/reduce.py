"""y[t] = sum over k, ascending, of weight[t, k] * row[t, k] in fp32; routes that no wave served add exactly zero."""

import triton
import triton.language as tl

from minisgl.moe.kernels.dependent import start_next, wait_for_previous


@triton.jit
def reduce_kernel(
    rows_RD,
    weights_R,  # float32
    served_R,  # int8
    y_TD,  # out
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)  # t * K * D passes 2^31 at 131,072 tokens of Qwen3-30B-A3B
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    wait_for_previous(PDL)
    start_next(PDL)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for k in tl.static_range(K):
        route = t * K + k
        served = tl.load(served_R + route).to(tl.int32)
        mask = d < tl.where(served > 0, D, 0)
        row = tl.load(rows_RD + route * D + d, mask=mask, other=0.0).to(tl.float32)
        weight = tl.where(served > 0, tl.load(weights_R + route), 0.0)
        total = tl.fma(row, weight, total)  # spelled out: the direct kernel must round in the same places
    tl.store(y_TD + t * D + d, total.to(y_TD.dtype.element_ty), mask=d < D)
