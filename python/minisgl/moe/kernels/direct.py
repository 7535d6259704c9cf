"""Decode: few tokens, so every route reads its own weights and nothing is sorted, padded or gathered.

    direct_gate_up_kernel   a program a (route, BLOCK_N hidden units): gate and up dot products, activation
    direct_down_kernel      a program a (token, BLOCK_N outputs): the dot products of all K experts at once

At this size the step is latency: the down kernel therefore takes all K experts in one tile (K tiles one after
the other would be K trips to memory), starts its weight loads before the previous kernel has finished, and
sums over k in registers, so no third launch, no atomics. Weights meet unquantized activations in fp32 on the
ordinary cores: with one row, tensor cores would be empty anyway. Routes are the fastest program index: routes
of one slot run at the same time and share its weights in L2.
"""

import triton
import triton.language as tl

from minisgl.moe.kernels.dependent import start_next, wait_for_previous
from minisgl.moe.kernels.grouped import activated

# Factor for activations that meet E2M1 bits placed into fp32, which are 2^-126 of their value: keeps products normal.
_MXFP4_LIFT = tl.constexpr(1.2676506002282294e30)  # 2^100


@triton.jit
def _nibble_as_float(words, BIT: tl.constexpr, ZERO: tl.constexpr, FORMAT: tl.constexpr):
    """The nibble at BIT of uint32 words as float32: code - ZERO for int4, value * 2^-126 for mxfp4.

    No conversion instruction: the bits are moved into place. Subtracting ZERO once from the sum of products would
    be one instruction a weight less, but then a channel of zeros would no longer give exactly zero.
    """
    if FORMAT == "mxfp4":
        sign = words << (28 - BIT)
        magnitude = words << (22 - BIT) if BIT <= 22 else words >> (BIT - 22)
        value = ((sign & 0x80000000) | (magnitude & 0x01C00000)).to(tl.float32, bitcast=True)
    else:
        moved = words << (19 - BIT) if BIT <= 19 else words >> (BIT - 19)
        value = ((moved & 0x00780000) | 0x41800000).to(tl.float32, bitcast=True)  # 16 + code
        value -= 16 + ZERO
    return value


@triton.jit
def _word_columns(word, I: tl.constexpr):
    """Column along K of nibble I (0..3 low nibbles of the word's bytes, 4..7 high ones) of each 32-bit word."""
    return word // 4 * 32 + word % 4 * 4 + (I % 4) + 16 * (I // 4)


@triton.jit
def _group_scale(scales, offset, FORMAT: tl.constexpr):
    """Scale of a group as float32; for mxfp4 without the lift and the misplaced exponent."""
    scale = tl.load(scales + offset)
    if FORMAT == "mxfp4":
        bits = (scale.to(tl.int32) + 26) << 23  # 2^(s - 127 + 126 - 100)
        return tl.where(scale == 255, float("nan"), bits.to(tl.float32, bitcast=True))
    else:
        return scale.to(tl.float32)


@triton.jit(do_not_specialize=["num_routes"])
def direct_gate_up_kernel(
    x_TD,
    weights,
    scales,
    zeros,
    bias,
    activated_RF,  # out
    slots_R,
    served_R,  # out int8 [R]
    num_routes,
    stride_s,  # in elements of weights (32-bit words where PACKED)
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
    BLOCK_K: tl.constexpr,  # columns a step
    PDL: tl.constexpr,
):
    route = tl.program_id(0) % num_routes
    pid_n = tl.program_id(0) // num_routes
    wait_for_previous(PDL)
    start_next(PDL)
    slot = tl.load(slots_R + route).to(tl.int64)
    if pid_n == 0:
        if FIRST_WAVE:
            tl.store(served_R + route, (slot >= 0).to(tl.int8))
        elif slot >= 0:
            tl.store(served_R + route, 1)
    if slot < 0:
        return
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    gate_n = tl.minimum(n, F - 1)
    up_n = F + gate_n
    x = x_TD + (route // TOP_K).to(tl.int64) * D
    weights += slot * stride_s
    scales += slot * stride_scale_s
    if (FORMAT == "int4") or (FORMAT == "mxfp4"):
        zeros += slot * stride_zero_s
        gate = _packed_row_sums(
            x, weights, scales, zeros, gate_n, stride_scale_n, D, FORMAT, GROUP, HAS_ZERO, BLOCK_N, BLOCK_K
        )
        up = _packed_row_sums(
            x, weights, scales, zeros, up_n, stride_scale_n, D, FORMAT, GROUP, HAS_ZERO, BLOCK_N, BLOCK_K
        )
    else:
        acc_gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        acc_up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for k0 in range(0, D, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            if D % BLOCK_K == 0:
                w_gate = tl.load(weights + gate_n[:, None] * D + k[None, :])
                w_up = tl.load(weights + up_n[:, None] * D + k[None, :])
                x_k = tl.load(x + k).to(tl.float32)
            else:
                w_gate = tl.load(weights + gate_n[:, None] * D + k[None, :], mask=(k < D)[None, :], other=0.0)
                w_up = tl.load(weights + up_n[:, None] * D + k[None, :], mask=(k < D)[None, :], other=0.0)
                x_k = tl.load(x + k, mask=k < D, other=0.0).to(tl.float32)
            part_gate = w_gate.to(tl.float32) * x_k[None, :]
            part_up = w_up.to(tl.float32) * x_k[None, :]
            if FORMAT == "fp8_block":  # BLOCK_K is at most 128 and a step lies in one block of columns
                column = k0 // 128
                part_gate *= tl.load(scales + gate_n // 128 * stride_scale_n + column)[:, None]
                part_up *= tl.load(scales + ((F + 127) // 128 + gate_n // 128) * stride_scale_n + column)[
                    :, None
                ]
            acc_gate += part_gate
            acc_up += part_up
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
def _packed_row_sums(
    x, words, scales, zeros, n, stride_scale_n, K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Dot products [BLOCK_N] of 4-bit rows n with x [K], 32-bit words at a time; four words (32 columns) share a scale."""
    WORDS: tl.constexpr = BLOCK_K // 8
    VECTORS: tl.constexpr = BLOCK_K // 32
    COLS: tl.constexpr = K // 8
    acc = tl.zeros((BLOCK_N, VECTORS), tl.float32)
    for word0 in range(0, COLS, WORDS):
        word = word0 + tl.arange(0, WORDS)
        inside = word < COLS
        if COLS % WORDS == 0:
            packed = tl.load(words + n[:, None] * COLS + word[None, :])
        else:
            packed = tl.load(words + n[:, None] * COLS + word[None, :], mask=inside[None, :], other=0.0)
        packed = packed.to(tl.uint32, bitcast=True)
        sums = tl.zeros((BLOCK_N, WORDS), tl.float32)
        x_sum = tl.zeros((WORDS,), tl.float32)
        for i in tl.static_range(8):
            column = _word_columns(word, i)
            if COLS % WORDS == 0:
                x_i = tl.load(x + column).to(tl.float32)
            else:
                x_i = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
            if FORMAT == "mxfp4":
                x_i *= _MXFP4_LIFT
            sums += (
                _nibble_as_float(packed, 8 * (i % 4) + 4 * (i // 4), 0 if HAS_ZERO else 8, FORMAT)
                * x_i[None, :]
            )
            x_sum += x_i
        vector_sums = tl.sum(sums.reshape(BLOCK_N, VECTORS, 4), 2)
        vector = word0 // 4 + tl.arange(0, VECTORS)
        offset = n[:, None] * stride_scale_n + tl.minimum(vector * 32, K - 32)[None, :] // GROUP
        scale = _group_scale(scales, offset, FORMAT)
        if HAS_ZERO:
            vector_x = tl.sum(x_sum.reshape(VECTORS, 4), 1)[None, :]
            vector_sums -= tl.load(zeros + offset).to(tl.float32) * vector_x
        acc += vector_sums * scale
    return tl.sum(acc, 1)


@triton.jit(do_not_specialize=["num_n"])
def direct_down_kernel(
    activated_RF,
    weights,
    scales,
    zeros,
    bias,
    out,  # y_TD if SUM, else rows_RD float32
    slots_R,
    weights_R,  # float32
    num_n,
    stride_s,
    stride_scale_s,
    stride_scale_n,
    stride_zero_s,
    stride_bias_s,
    D: tl.constexpr,
    F: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,  # power of two >= TOP_K
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SUM: tl.constexpr,  # add up over k here; else write rows for a later reduce
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0) // num_n
    pid_n = tl.program_id(0) % num_n
    k = tl.arange(0, CHOICES)
    route = t * TOP_K + k
    # Slots were written two launches ago: only activated_RF needs the wait, so weights start to travel before it.
    slot = tl.load(slots_R + route, mask=k < TOP_K, other=-1).to(tl.int64)
    here = slot >= 0
    slot = tl.where(here, slot, 0)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner_n = tl.minimum(n, D - 1)
    x = activated_RF + route.to(tl.int64)[:, None] * F
    w = (
        weights
        + (slot * stride_s)[:, None]
        + inner_n[None, :] * (F // 8 if (FORMAT == "int4") or (FORMAT == "mxfp4") else F)
    )
    s = scales + (slot * stride_scale_s)[:, None]
    if (FORMAT == "int4") or (FORMAT == "mxfp4"):
        z = zeros + (slot * stride_zero_s)[:, None] + inner_n[None, :] * stride_scale_n
        s += inner_n[None, :] * stride_scale_n
        rows = _packed_expert_sums(
            x, w, s, z, here, F, FORMAT, GROUP, HAS_ZERO, CHOICES, BLOCK_N, BLOCK_K, PDL
        )
    else:
        acc = tl.zeros((CHOICES, BLOCK_N, BLOCK_K), tl.float32)
        STEPS: tl.constexpr = (F + BLOCK_K - 1) // BLOCK_K
        for i in tl.static_range(STEPS):
            f = i * BLOCK_K + tl.arange(0, BLOCK_K)
            mask = here[:, None, None]
            if F % BLOCK_K != 0:
                mask = mask & (f < F)[None, None, :]
            tile = tl.load(w[:, :, None] + f[None, None, :], mask=mask, other=0.0)
            if i == 0:
                wait_for_previous(PDL)
                start_next(PDL)
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
    rows = tl.where(here[:, None], rows, 0.0)  # scales of an unused slot may be NaN
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


@triton.jit
def _packed_expert_sums(
    x, words, scales, zeros, here, K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr, CHOICES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Dot products [CHOICES, BLOCK_N] of each expert's 4-bit rows with its own row of x; pointers [CHOICES, BLOCK_N]."""
    WORDS: tl.constexpr = BLOCK_K // 8
    VECTORS: tl.constexpr = BLOCK_K // 32
    COLS: tl.constexpr = K // 8
    STEPS: tl.constexpr = (COLS + WORDS - 1) // WORDS
    acc = tl.zeros((CHOICES, BLOCK_N, VECTORS), tl.float32)
    for step in tl.static_range(STEPS):
        word = step * WORDS + tl.arange(0, WORDS)
        inside = here[:, None] & (word < COLS)[None, :]
        packed = tl.load(words[:, :, None] + word[None, None, :], mask=inside[:, None, :], other=0.0)
        packed = packed.to(tl.uint32, bitcast=True)
        vector = step * VECTORS + tl.arange(0, VECTORS)
        group = tl.minimum(vector * 32, K - 32) // GROUP
        scale = _group_scale(scales[:, :, None], group[None, None, :], FORMAT)
        if step == 0:
            wait_for_previous(PDL)
            start_next(PDL)
        sums = tl.zeros((CHOICES, BLOCK_N, WORDS), tl.float32)
        x_sum = tl.zeros((CHOICES, WORDS), tl.float32)
        for i in tl.static_range(8):
            x_i = tl.load(x + _word_columns(word, i)[None, :], mask=inside, other=0.0).to(tl.float32)
            if FORMAT == "mxfp4":
                x_i *= _MXFP4_LIFT
            sums += (
                _nibble_as_float(packed, 8 * (i % 4) + 4 * (i // 4), 0 if HAS_ZERO else 8, FORMAT)
                * x_i[:, None, :]
            )
            x_sum += x_i
        vector_sums = tl.sum(sums.reshape(CHOICES, BLOCK_N, VECTORS, 4), 3)
        if HAS_ZERO:
            vector_x = tl.sum(x_sum.reshape(CHOICES, VECTORS, 4), 2)[:, None, :]
            vector_sums -= tl.load(zeros[:, :, None] + group[None, None, :]).to(tl.float32) * vector_x
        acc += vector_sums * scale
    return tl.sum(acc, 2)
