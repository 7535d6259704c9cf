"""Decode on 32-bit words of weights: every route reads its own weights, see `words` for the arithmetic.

    words_gate_up_kernel   a program a (route, BLOCK_N hidden units)
    words_down_kernel      a program a (token, BLOCK_N outputs): all K experts at once, and their sum over k

Tiles are [experts, rows, words]. A program works on two of them that meet the same activations: gate and up rows, or
the first and the second half of its outputs. In this order of dims Triton gives the lanes of a warp to words, then to
experts, so a thread holds several rows that meet the same activations, and those once. With BLOCK_K as wide as a row
there is no loop over K: all that a program reads is in flight at once. PRELOAD says how many steps' weights are asked
for ahead; down does so before the previous kernel has finished. Routes are the fastest grid dim: those of one slot run
at the same time and share its weights in the L2.
"""

import triton
import triton.language as tl

from minisgl.moe.kernels.dependent import start_next, wait_for_previous
from minisgl.moe.kernels.fetch import await_chunks
from minisgl.moe.kernels.product import activated
from minisgl.moe.kernels.reduce import add_up, load_route_weights
from minisgl.moe.kernels.told import await_word, place_of_route, records_on_their_way, turn_of_route
from minisgl.moe.kernels.word_loads import (
    existing,
    lane_order,
    load_late,
    load_params,
    load_params_step,
    load_row_scales,
    load_rows,
    load_words,
    load_words_step,
    load_x_step,
    row_parameters,
    row_pointers,
)
from minisgl.moe.kernels.words import by_group, dot_two, prepared
from minisgl.moe.kernels.words_mxfp4 import dot_two_mxfp4


@triton.jit
def _add_step(
    acc_a, acc_b, words, params, x, FORMAT: tl.constexpr, GROUPS: tl.constexpr, FOURS: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """acc (None: zero) plus one step; with groups acc has a column a group, else (and of mxfp4) one a word or four words."""
    if FORMAT == "mxfp4":
        dot_a, dot_b = dot_two_mxfp4(words[0], words[1], params[0], params[1], x, FOURS)
    else:
        x, sums = prepared(x, FORMAT, FOURS, ASM)
        dot_a, dot_b = dot_two(words[0], words[1], x, sums, FORMAT, FOURS, ASM)
    if GROUPS > 0 and FORMAT != "mxfp4":
        dot_a, dot_b = by_group(dot_a, GROUPS), by_group(dot_b, GROUPS)
        if FORMAT == "int4":
            sums = by_group(sums, GROUPS)
            dot_a -= (128.0 + params[2]) * sums
            dot_b -= (128.0 + params[3]) * sums
        dot_a *= params[0]
        dot_b *= params[1]
    if acc_a is None:
        return dot_a, dot_b
    else:
        return acc_a + dot_a, acc_b + dot_b


@triton.jit
def multiply_rows(
    x, x_row, xs, words, params, rows, here, K: tl.constexpr,
    BLOCK_K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, ALL: tl.constexpr,
    FOURS: tl.constexpr, ASM: tl.constexpr, LANE_ORDER: tl.constexpr,
):  # fmt: skip
    """Float32 dot products [experts, rows] of two tiles with rows x_row of x. xs, words and params: the steps that were
    loaded before; the others are loaded here."""
    GROUPS: tl.constexpr = 0 if GROUP == 0 else BLOCK_K // GROUP
    acc_a, acc_b = None, None
    for i in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        if i < len(words):
            x_i, words_i, params_i = xs[i], words[i], params[i]
        else:
            words_i = load_words_step(rows, here, i, K, BLOCK_K, FORMAT, ALL)
            x_i = load_x_step(x, x_row, here, i, K, BLOCK_K, FORMAT, ALL, FOURS, ASM, LANE_ORDER)
            params_i = load_params_step(rows, here, i, K, BLOCK_K, GROUP, HAS_ZERO, ALL)
        acc_a, acc_b = _add_step(acc_a, acc_b, words_i, params_i, x_i, FORMAT, GROUPS, FOURS, ASM)
    return tl.sum(acc_a, 2), tl.sum(acc_b, 2)


@triton.jit
def _store_activated(
    gate, up, parameters, activated_RF, route, n, F: tl.constexpr, FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, LANE_ORDER: tl.constexpr,
):  # fmt: skip
    """gate, up: [1, N]. parameters: scales and biases, [N] (ignored where there are none)."""
    gate, up = gate.reshape(gate.shape[1]), up.reshape(up.shape[1])
    if (FORMAT == "int8") or (FORMAT == "fp8"):
        gate *= parameters[0]
        up *= parameters[1]
    if HAS_BIAS:
        gate += parameters[2]
        up += parameters[3]
    hidden = activated(gate, up, ACTIVATION).to(activated_RF.dtype.element_ty)
    column = lane_order(n) if LANE_ORDER else n
    tl.store(activated_RF + route.to(tl.int64) * F + column, hidden, mask=n < F)


@triton.jit
def words_gate_up_kernel(
    x_TD,
    weights,  # int32 words
    scales,
    zeros,
    bias,
    activated_RF,  # out
    slots_R,  # with CHUNKS told_3M, and as the next one: see `base.Arrival`
    arrived_S1,
    served_R,  # out int8 [R]
    stride_s,
    stride_scale_s,
    stride_scale_n: tl.constexpr,  # of rows in a line, whose addresses then differ by constants
    stride_zero_s,
    stride_bias_s,
    D: tl.constexpr,
    F: tl.constexpr,
    TOP_K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,  # columns a scale; 0: a scale a row
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FIRST_WAVE: tl.constexpr,
    LANE_ORDER: tl.constexpr,  # of activated rows, see `lane_order`
    CHUNKS: tl.constexpr,  # that a record on its way has of gate_up's parts; 0: all records are complete
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRELOAD: tl.constexpr,
    FOURS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    route, pid_n = tl.program_id(0), tl.program_id(1)
    n, here = pid_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.full((1, 1, 1), True, tl.int1)
    gate_n = existing(n, F, BLOCK_N, FORMAT)
    # Not for the kernels ahead, plan and copy: when they began, all before the router had ended.
    if CHUNKS > 0:
        word = await_word(slots_R + route, True)
        start_next(PDL)
        slot, turn = place_of_route(word), turn_of_route(word)
        if turn >= 0:
            await_chunks(arrived_S1 + 1 + turn, CHUNKS, 1000 if PDL else 0)
    else:
        wait_for_previous(PDL)
        start_next(PDL)
        slot = tl.load(slots_R + route)
    row = gate_n[None, :, None]
    held = tl.maximum(slot, 0).to(tl.int64)
    strides = (stride_s, stride_scale_s, stride_zero_s, stride_scale_n)
    block = (F + 127) // 128 + row // 128  # gate and up have blocks of their own
    rows = row_pointers(weights, scales, zeros, held, row, row + F, block, strides, D, FORMAT)
    # Loads are issued in this order, and threads wait in order: scales last, which change hands through shared memory.
    words = load_words(rows, here, PRELOAD, D, BLOCK_K, FORMAT, True)
    token = (route // TOP_K).to(tl.int64)
    xs = load_rows(x_TD, token, here, PRELOAD, D, BLOCK_K, FORMAT, True, FOURS, ASM, False)
    params = load_params(rows, here, PRELOAD, D, BLOCK_K, GROUP, HAS_ZERO, True)
    whole = row_parameters(
        scales + held * stride_scale_s, bias + held * stride_bias_s, gate_n, gate_n + F, FORMAT, HAS_BIAS
    )
    # Not earlier: store and branch keep the compiler from spreading the loads over the arithmetic.
    if pid_n == 0:
        if FIRST_WAVE:
            tl.store(served_R + route, (slot >= 0).to(tl.int8))
        elif slot >= 0:
            tl.store(served_R + route, 1)
    if slot < 0:
        return
    gate, up = multiply_rows(
        x_TD, token, xs, words, params, rows, here, D, BLOCK_K, FORMAT, GROUP, HAS_ZERO, True, FOURS, ASM,
        False,
    )  # fmt: skip
    _store_activated(gate, up, whole, activated_RF, route, n, F, FORMAT, HAS_BIAS, ACTIVATION, LANE_ORDER)


@triton.jit
def _store_rows(
    rows, out, weights, here, t, route, n, D: tl.constexpr, TOP_K: tl.constexpr, LEVELS: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    """Float32 rows [2^LEVELS, N] of one token's experts: added up over k in the order and rounding of `reduce_kernel` if
    SUM, else as they are."""
    if SUM:
        total = add_up(rows, weights, TOP_K, LEVELS)
        tl.store(out + t.to(tl.int64) * D + n, total.to(out.dtype.element_ty), mask=n < D)
    else:
        pointers = out + route.to(tl.int64)[:, None] * D + n[None, :]
        tl.store(pointers, rows, mask=here[:, None] & (n < D)[None, :])


@triton.jit
def words_down_kernel(
    activated_RF,
    weights,  # int32 words
    scales,
    zeros,
    bias,
    out,  # y_TD if SUM, else rows_RD float32
    slots_R,  # with CHUNKS told_3M, and as the next one: see `base.Arrival`
    arrived_S1,
    weights_R,  # float32
    stride_s,
    stride_scale_s,
    stride_scale_n: tl.constexpr,
    stride_zero_s,
    stride_bias_s,
    D: tl.constexpr,
    F: tl.constexpr,
    TOP_K: tl.constexpr,
    LEVELS: tl.constexpr,  # 2^LEVELS >= TOP_K
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SUM: tl.constexpr,
    LANE_ORDER: tl.constexpr,
    CHUNKS: tl.constexpr,  # that a record on its way has of down's parts; 0: all records are complete
    PROGRAMS: tl.constexpr,  # that are counted, too
    BLOCK_N: tl.constexpr,  # at least 2
    BLOCK_K: tl.constexpr,
    PRELOAD: tl.constexpr,
    FOURS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    CHOICES: tl.constexpr = 2**LEVELS
    HALF: tl.constexpr = BLOCK_N // 2
    t, pid_n = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, CHOICES)
    route = t * TOP_K + k
    # Slots and weights were written two launches ago: only activated_RF needs the wait.
    if CHUNKS > 0:
        told = tl.load(slots_R + route, mask=k < TOP_K, other=-1, volatile=True)
        slot, late_k = place_of_route(told).to(tl.int64), turn_of_route(told) >= 0
        expected = records_on_their_way(tl.load(slots_R + t * TOP_K, volatile=True)) * CHUNKS + PROGRAMS
    else:
        slot = tl.load(slots_R + route, mask=k < TOP_K, other=-1).to(tl.int64)
    here_k = slot >= 0
    here = here_k[:, None, None]
    slot = tl.where(here_k, slot, 0)
    n_a = pid_n * BLOCK_N + tl.arange(0, HALF)
    n_b = n_a + HALF
    first = existing(n_a, D, BLOCK_N, FORMAT)[None, :]
    second = existing(n_b, D, BLOCK_N, FORMAT)[None, :]
    strides = (stride_s, stride_scale_s, stride_zero_s, stride_scale_n)
    row_a, row_b = first[:, :, None], second[:, :, None]
    held = slot[:, None, None]
    rows = row_pointers(weights, scales, zeros, held, row_a, row_b, row_b // 128, strides, F, FORMAT)
    if CHUNKS > 0:  # what is complete
        at_once, s = here_k & (late_k == 0), scales + (slot * stride_scale_s)[:, None]
        words = load_words(rows, at_once[:, None, None], PRELOAD, F, BLOCK_K, FORMAT, False)
        by_row = load_row_scales(s, first, second, at_once, 0.0, 0.0, FORMAT)
    else:
        words = load_words(rows, here, PRELOAD, F, BLOCK_K, FORMAT, False)
        params = load_params(rows, here, PRELOAD, F, BLOCK_K, GROUP, HAS_ZERO, False)
    route_weights = ()
    if SUM:
        route_weights = load_route_weights(weights_R, slots_R, t, TOP_K)
    if CHUNKS > 0:  # what was on its way, when nothing else is left to ask for
        await_chunks(arrived_S1, expected, 250 if PDL else 0)
        words = load_late(words, rows, late_k[:, None, None], F, BLOCK_K, FORMAT)
        by_row = load_row_scales(s, first, second, late_k, by_row[0], by_row[1], FORMAT)
        params = load_params(rows, here, PRELOAD, F, BLOCK_K, GROUP, HAS_ZERO, False)
    wait_for_previous(PDL)
    start_next(PDL)
    x_row = route.to(tl.int64)[:, None, None]
    xs = load_rows(activated_RF, x_row, here, PRELOAD, F, BLOCK_K, FORMAT, False, FOURS, ASM, LANE_ORDER)
    rows_a, rows_b = multiply_rows(
        activated_RF, x_row, xs, words, params, rows, here, F, BLOCK_K, FORMAT, GROUP, HAS_ZERO, False,
        FOURS, ASM, LANE_ORDER,
    )  # fmt: skip
    if CHUNKS == 0:  # here and not above: a pointer that waits costs registers
        s = scales + (slot * stride_scale_s)[:, None]
        by_row = load_row_scales(s, first, second, here_k, 0.0, 0.0, FORMAT)
    if (FORMAT == "int8") or (FORMAT == "fp8"):
        rows_a *= by_row[0]
        rows_b *= by_row[1]
    if HAS_BIAS:
        s = bias + (slot * stride_bias_s)[:, None]
        rows_a += tl.load(s + first, mask=here_k[:, None], other=0.0).to(tl.float32)
        rows_b += tl.load(s + second, mask=here_k[:, None], other=0.0).to(tl.float32)
    _store_rows(rows_a, out, route_weights, here_k, t, route, n_a, D, TOP_K, LEVELS, SUM)
    _store_rows(rows_b, out, route_weights, here_k, t, route, n_b, D, TOP_K, LEVELS, SUM)
