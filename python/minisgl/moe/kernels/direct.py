"""Decode on the ordinary cores: every route reads its own weights, and nothing is sorted, padded or gathered.

    direct_gate_up_kernel   a program a (route, BLOCK_N hidden units): gate and up dot products, activation
    direct_down_kernel      a program a (token, BLOCK_N outputs): the dot products of all K experts at once

At this size the step is latency: the down kernel therefore takes all K experts in one tile (K tiles one after
the other would be K trips to memory), asks for its weights before the previous kernel has finished, so that
memory doesn't idle between the two, and sums over k in registers, so no third launch, no atomics. Weights meet
unquantized activations in fp32. Routes are the fastest program index: routes of one slot run at the same time
and share its weights in L2. Activations in bf16 take `direct_words` instead wherever rows are made of whole 32-bit
words, which is everywhere but in odd shapes; formats of four bits take it or the tensor cores, see `wide`.
"""

import triton
import triton.language as tl

from minisgl.moe.kernels.dependent import start_next, wait_for_previous
from minisgl.moe.kernels.product import activated


@triton.jit
def _row_tile(w, n, k0, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns k0 .. k0 + BLOCK_K of rows n: [BLOCK_N, BLOCK_K], zero past the edge."""
    k = k0 + tl.arange(0, BLOCK_K)
    pointers = w + n[:, None] * K + k[None, :]
    if K % BLOCK_K == 0:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(k < K)[None, :], other=0.0)


@triton.jit
def _row_x(x, k0, K: tl.constexpr, BLOCK_K: tl.constexpr):
    k = k0 + tl.arange(0, BLOCK_K)
    return tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _block_scales(scales, n, k0, stride_n, F: tl.constexpr, FORMAT: tl.constexpr):
    """fp8_block: scales of gate and up rows n, [BLOCK_N, 1], for a step that lies in one block of columns; else 1."""
    if FORMAT == "fp8_block":
        row, column = n // 128, k0 // 128
        gate = tl.load(scales + row * stride_n + column)[:, None]
        return gate, tl.load(scales + ((F + 127) // 128 + row) * stride_n + column)[:, None]
    else:
        return 1.0, 1.0


@triton.jit(do_not_specialize=["num_routes"])
def direct_gate_up_kernel(
    x_TD,
    weights,
    scales,
    bias,
    activated_RF,  # out
    slots_R,
    served_R,  # out int8 [R]
    num_routes,
    stride_s,
    stride_scale_s,
    stride_scale_n,
    stride_bias_s,
    D: tl.constexpr,
    F: tl.constexpr,
    TOP_K: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FIRST_WAVE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # columns a step
    PRELOAD: tl.constexpr,  # steps whose weights are asked for at once, before the first is used
    PDL: tl.constexpr,
):
    route = tl.program_id(0) % num_routes
    pid_n = tl.program_id(0) // num_routes
    wait_for_previous(PDL)
    start_next(PDL)
    slot = tl.load(slots_R + route).to(tl.int64)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    gate_n = tl.minimum(n, F - 1)
    up_n = F + gate_n
    x = x_TD + (route // TOP_K).to(tl.int64) * D
    w = weights + tl.maximum(slot, 0) * stride_s
    gates, ups = (), ()
    for i in tl.static_range(PRELOAD):  # tuples grow by +: Triton has no (*a, b)
        gates = gates + (_row_tile(w, gate_n, i * BLOCK_K, D, BLOCK_K),)  # noqa: RUF005
        ups = ups + (_row_tile(w, up_n, i * BLOCK_K, D, BLOCK_K),)  # noqa: RUF005
    if pid_n == 0:
        if FIRST_WAVE:
            tl.store(served_R + route, (slot >= 0).to(tl.int8))
        elif slot >= 0:
            tl.store(served_R + route, 1)
    if slot < 0:
        return
    scales += slot * stride_scale_s
    acc_gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for i in tl.static_range(PRELOAD):
        x_k = _row_x(x, i * BLOCK_K, D, BLOCK_K)
        gate_scale, up_scale = _block_scales(scales, gate_n, i * BLOCK_K, stride_scale_n, F, FORMAT)
        acc_gate += gates[i].to(tl.float32) * x_k * gate_scale
        acc_up += ups[i].to(tl.float32) * x_k * up_scale
    for k0 in range(PRELOAD * BLOCK_K, D, BLOCK_K):
        w_gate = _row_tile(w, gate_n, k0, D, BLOCK_K)
        w_up = _row_tile(w, up_n, k0, D, BLOCK_K)
        x_k = _row_x(x, k0, D, BLOCK_K)
        gate_scale, up_scale = _block_scales(scales, gate_n, k0, stride_scale_n, F, FORMAT)
        acc_gate += w_gate.to(tl.float32) * x_k * gate_scale
        acc_up += w_up.to(tl.float32) * x_k * up_scale
    gate = tl.sum(acc_gate, 1)
    up = tl.sum(acc_up, 1)
    if (FORMAT == "fp8") or (FORMAT == "int8"):
        gate *= tl.load(scales + gate_n)
        up *= tl.load(scales + up_n)
    if HAS_BIAS:
        bias += slot * stride_bias_s
        gate += tl.load(bias + gate_n).to(tl.float32)
        up += tl.load(bias + up_n).to(tl.float32)
    row = activated(gate, up, ACTIVATION).to(activated_RF.dtype.element_ty)
    tl.store(activated_RF + route.to(tl.int64) * F + n, row, mask=n < F)


@triton.jit
def _expert_tile(w, here, first, F: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns first .. first + BLOCK_K of each expert's rows: [CHOICES, BLOCK_N, BLOCK_K], zero where no expert is."""
    f = first + tl.arange(0, BLOCK_K)
    mask = here[:, None, None]
    if F % BLOCK_K != 0:
        mask = mask & (f < F)[None, None, :]
    return tl.load(w[:, :, None] + f[None, None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_n"])
def direct_down_kernel(
    activated_RF,
    weights,
    scales,
    bias,
    out,  # y_TD if SUM, else rows_RD float32
    slots_R,
    weights_R,  # float32
    num_n,
    stride_s,
    stride_scale_s,
    stride_scale_n,
    stride_bias_s,
    D: tl.constexpr,
    F: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,  # power of two >= TOP_K
    FORMAT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SUM: tl.constexpr,  # add up over k here; else write rows for a later reduce
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRELOAD: tl.constexpr,  # steps whose weights are asked for before the previous kernel has finished
    PDL: tl.constexpr,
):
    t = tl.program_id(0) // num_n
    pid_n = tl.program_id(0) % num_n
    k = tl.arange(0, CHOICES)
    route = t * TOP_K + k
    # Slots were written two launches ago: only activated_RF needs the wait.
    slot = tl.load(slots_R + route, mask=k < TOP_K, other=-1).to(tl.int64)
    here = slot >= 0
    slot = tl.where(here, slot, 0)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner_n = tl.minimum(n, D - 1)
    x = activated_RF + route.to(tl.int64)[:, None] * F
    w = weights + (slot * stride_s)[:, None] + inner_n[None, :] * F
    s = scales + (slot * stride_scale_s)[:, None]
    STEPS: tl.constexpr = (F + BLOCK_K - 1) // BLOCK_K
    tiles = ()
    for i in tl.static_range(PRELOAD):
        tiles = tiles + (_expert_tile(w, here, i * BLOCK_K, F, BLOCK_K),)  # noqa: RUF005
    wait_for_previous(PDL)
    start_next(PDL)
    acc = tl.zeros((CHOICES, BLOCK_N, BLOCK_K), tl.float32)
    for i in tl.static_range(STEPS):
        if i < PRELOAD:
            tile = tiles[i]
        else:
            tile = _expert_tile(w, here, i * BLOCK_K, F, BLOCK_K)
        f = i * BLOCK_K + tl.arange(0, BLOCK_K)
        x_f = tl.load(x + f[None, :], mask=here[:, None] & (f < F)[None, :], other=0.0).to(tl.float32)
        part = tile.to(tl.float32) * x_f[:, None, :]
        if FORMAT == "fp8_block":
            offset = (inner_n // 128 * stride_scale_n + i * BLOCK_K // 128)[None, :]
            part *= tl.load(s + offset, mask=here[:, None], other=0.0)[:, :, None]
        acc += part
    rows = tl.sum(acc, 2)
    if (FORMAT == "fp8") or (FORMAT == "int8"):
        rows *= tl.load(s + inner_n[None, :], mask=here[:, None], other=0.0)
    if HAS_BIAS:
        pointers = bias + (slot * stride_bias_s)[:, None] + inner_n[None, :]
        rows += tl.load(pointers, mask=here[:, None], other=0.0).to(tl.float32)
    if SUM:
        total = tl.zeros((BLOCK_N,), tl.float32)
        for i in tl.static_range(TOP_K):  # the order and the rounding of `reduce_kernel`
            weight = tl.load(weights_R + t * TOP_K + i)
            weight = tl.where(tl.load(slots_R + t * TOP_K + i) >= 0, weight, 0.0)
            row = tl.sum(tl.where((k == i)[:, None], rows, 0.0), 0)
            total = tl.fma(row, weight, total)
        tl.store(out + t.to(tl.int64) * D + n, total.to(out.dtype.element_ty), mask=n < D)
    else:
        pointers = out + route.to(tl.int64)[:, None] * D + n[None, :]
        tl.store(pointers, rows, mask=here[:, None] & (n < D)[None, :])
