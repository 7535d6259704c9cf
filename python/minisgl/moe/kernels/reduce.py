"""y[t] = sum over k, ascending, of weight[t, k] * row[t, k] in fp32; routes that no wave served add exactly zero."""

import triton
import triton.language as tl

from minisgl.moe.kernels.dependent import start_next, wait_for_previous


@triton.jit
def apart(rows, LEVELS: tl.constexpr):
    """The 2^LEVELS rows of [2^LEVELS, N] as a tuple of [N, 1], in order: so that they can be added up in that order."""
    parts = (tl.trans(rows),)
    N: tl.constexpr = rows.shape[1]
    for level in tl.static_range(LEVELS):  # parts[j] holds the rows that are j modulo 2^level
        evens, odds = (), ()
        for j in tl.static_range(2**level):
            even, odd = tl.split(parts[j].reshape(N, 2 ** (LEVELS - level - 1), 2))
            evens, odds = evens + (even,), odds + (odd,)  # noqa: RUF005
        parts = evens + odds
    return parts


@triton.jit
def load_route_weights(weights_R, slots_R, t, TOP_K: tl.constexpr):
    """The K weights of a token, zero where no slot is, as a tuple of scalars. Both were written before the kernel ahead."""
    weights = ()
    for k in tl.static_range(TOP_K):
        weight = tl.load(weights_R + t * TOP_K + k)
        weight = tl.where(tl.load(slots_R + t * TOP_K + k) >= 0, weight, 0.0)
        weights = weights + (weight,)  # noqa: RUF005
    return weights


@triton.jit
def add_up(rows, weights, TOP_K: tl.constexpr, LEVELS: tl.constexpr):
    """Float32 rows [2^LEVELS, N] of one token, added up in the order and with the rounding of `reduce_kernel`."""
    parts = apart(rows, LEVELS)
    total = tl.zeros((rows.shape[1],), tl.float32)
    for k in tl.static_range(TOP_K):
        total = tl.fma(parts[k].reshape(rows.shape[1]), weights[k], total)
    return total


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
    served, weights = (), ()  # not written by the kernel just ahead
    for k in tl.static_range(K):
        flag = tl.load(served_R + t * K + k).to(tl.int32)
        served = served + (flag,)  # noqa: RUF005
        weights = weights + (tl.where(flag > 0, tl.load(weights_R + t * K + k), 0.0),)  # noqa: RUF005
    wait_for_previous(PDL)
    start_next(PDL)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for k in tl.static_range(K):
        mask = d < tl.where(served[k] > 0, D, 0)
        row = tl.load(rows_RD + (t * K + k) * D + d, mask=mask, other=0.0).to(tl.float32)
        # Spelled out, since the direct kernels must round in the same places.
        total = tl.fma(row, weights[k], total)
    tl.store(y_TD + t * D + d, total.to(y_TD.dtype.element_ty), mask=d < D)
