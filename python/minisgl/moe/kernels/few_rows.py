"""GEMMs for few rows a slot with int4 weights, bound by memory: weights go from where they were loaded into products.
Groups of 128 only: smaller ones gave wrong numbers on the device when tried, see `fragments`.

    few_rows_gate_up_kernel   x rows (gathered by route) -> activated rows, in sorted order
    few_rows_down_kernel      activated rows -> rows_RD, each at its own route

A program is (a block of routes of one slot, some hidden units or outputs). It works on PAIRS pairs of tiles, see
`fragments`: gate and up rows of the same units, or two neighbouring runs of eight outputs. A warp meets eight rows of
weights a tile, so a pair's activation happens in the thread that has its sums.

What limits these kernels is how often they ask the L1, not how many bytes: a load that meets eight rows takes eight
cycles, whatever it brings from each. So
- words are asked for CHUNK steps at a time, whole lines of a row back to back; in down before the previous kernel has
  finished; and EARLY: those of the next chunk before this one is multiplied (or else registers for more warps);
- scales come for four steps at once, each lane of a quad holding one step's;
- activations are stored in the order of their use (`in_order`), and not loaded for rows that are padding.

A block has up to BLOCK_M rows, in columns of eight; as many columns as it really has are multiplied.
"""

import triton
import triton.language as tl

from minisgl.moe.kernels.dependent import start_next, wait_for_previous
from minisgl.moe.kernels.fragments import (
    add_sums,
    halves,
    in_order,
    load_nibble,
    multiply,
    spread,
)
from minisgl.moe.kernels.product import activated
from minisgl.moe.kernels.tiles import KEPT

# A scale's stride of 1 (K is one group) would be a constant, and a scale tile's lanes then lie down the rows, not along them.
_NOT_SPECIALIZED = ("num_routes", "stride_scale_n")


@triton.jit
def _row_pointers(weights, scales, zeros, slot, rows, strides, K: tl.constexpr):
    """Where rows (a tuple of [ROWS, 1], two a pair) of a slot begin: words, scales and zeros, a tuple of each.
    strides: of slots in words, scales and zeros, and of a row of scales."""
    w, s, z = weights + slot * strides[0], scales + slot * strides[1], zeros + slot * strides[2]
    words_at, scales_at, zeros_at = (), (), ()
    for i in tl.static_range(len(rows)):  # tuples grow by +: Triton has no (*a, b)
        words_at = words_at + (w + rows[i] * (K // 8),)  # noqa: RUF005
        scales_at = scales_at + (s + rows[i] * strides[3],)  # noqa: RUF005
        zeros_at = zeros_at + (z + rows[i] * strides[3],)  # noqa: RUF005
    return words_at, scales_at, zeros_at


@triton.jit
def _load_words(rows, first, K: tl.constexpr, CHUNK: tl.constexpr):
    """Words of CHUNK steps from `first` on: a tuple of tiles a step. Past the end of rows they mean nothing."""
    steps = ()
    for j in tl.static_range(CHUNK):
        word = (first + j) * 16 + tl.arange(0, 16)[None, :]
        words = ()
        for i in tl.static_range(len(rows)):
            # Read once, they must not push x and scales out of the L1.
            loaded = tl.load(rows[i] + word, mask=word < K // 8, eviction_policy="evict_first")
            words = words + (loaded,)  # noqa: RUF005
        steps = steps + (words,)  # noqa: RUF005
    return steps


@triton.jit
def _load_params(rows, first, K: tl.constexpr):
    """Scales (or zeros) of four steps from `first` on: [ROWS, 4], one a tile. 0 past the end."""
    step = first + tl.arange(0, 4)[None, :]
    params = ()
    for i in tl.static_range(len(rows)):
        params = params + (tl.load(rows[i] + step, mask=step < K // 128, other=0),)  # noqa: RUF005
    return params


@triton.jit
def _load_all_params(pointers, first, K: tl.constexpr, HAS_ZERO: tl.constexpr):
    scales = _load_params(pointers[1], first, K)
    if HAS_ZERO:
        return scales, _load_params(pointers[2], first, K)
    else:
        return scales, scales


@triton.jit
def _of_step(params, j: tl.constexpr, ASM: tl.constexpr):
    """Scales (or zeros) of the j-th of four steps, laid out like results: one a pair."""
    half = (tl.arange(0, 16) // 2 % 2)[None, :]
    found = ()
    for i in tl.static_range(len(params) // 2):
        a = spread(params[2 * i].to(tl.float32), j, ASM)
        b = spread(params[2 * i + 1].to(tl.float32), j, ASM)
        found = found + (tl.where(half == 0, a, b),)  # noqa: RUF005
    return found


@triton.jit
def _add_step(
    acc, words, scales, zeros, x, rows, here, step, K: tl.constexpr, HAS_ZERO: tl.constexpr, EVEN: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """acc, a result a pair and column, plus one step."""
    COLUMNS: tl.constexpr = len(rows)
    PAIRS: tl.constexpr = len(words) // 2
    sums, dots = (), ()
    for _i in tl.static_range(COLUMNS):
        sums = sums + (tl.zeros(acc[0].shape, tl.float32),)  # noqa: RUF005
    for _j in tl.static_range(PAIRS):
        dots = dots + (sums,)  # noqa: RUF005
    for nibble in tl.static_range(4):
        xs, new_sums, new_dots = (), (), ()
        for i in tl.static_range(COLUMNS):
            xs = xs + (load_nibble(x, rows[i], step, here[i], nibble, K, EVEN, ASM),)  # noqa: RUF005
        for i in tl.static_range(COLUMNS):
            new_sums = new_sums + (add_sums(sums[i], xs[i], ASM),)  # noqa: RUF005
        for j in tl.static_range(PAIRS):
            new_dots = new_dots + (multiply(words[2 * j], words[2 * j + 1], xs, dots[j], nibble, ASM),)  # noqa: RUF005
        sums, dots = new_sums, new_dots
    new = ()
    for j in tl.static_range(PAIRS):
        offset = -136.0
        if HAS_ZERO:
            offset = -128.0 - zeros[j]
        for i in tl.static_range(COLUMNS):
            new = new + (acc[j * COLUMNS + i] + scales[j] * (dots[j][i] + offset * sums[i]),)  # noqa: RUF005
    return new


@triton.jit
def _multiply_rows(
    x, x_rows, here, pointers, words, params, K: tl.constexpr, HAS_ZERO: tl.constexpr,
    CHUNK: tl.constexpr, EARLY: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Results, one a pair and column. x_rows: int64 [ROWS, 1] a column; here: which of them exist. words and params:
    the first chunk's, loaded before."""
    EVEN: tl.constexpr = K % (128 * CHUNK) == 0
    acc = ()
    for _i in tl.static_range(len(pointers[0]) // 2 * len(x_rows)):
        acc = acc + (tl.zeros((x_rows[0].shape[0], 16), tl.float32),)  # noqa: RUF005
    for first in range(0, (K + 127) // 128, CHUNK):
        chunk, chunk_params = words, params
        if EARLY:
            words = _load_words(pointers[0], first + CHUNK, K, CHUNK)
        params = _load_all_params(pointers, first + CHUNK, K, HAS_ZERO)
        for j in tl.static_range(CHUNK):
            scales = _of_step(chunk_params[0], j, ASM)
            zeros = scales
            if HAS_ZERO:
                zeros = _of_step(chunk_params[1], j, ASM)
            acc = _add_step(acc, chunk[j], scales, zeros, x, x_rows, here, first + j, K, HAS_ZERO, EVEN, ASM)
        if not EARLY:
            words = _load_words(pointers[0], first + CHUNK, K, CHUNK)
    return acc


@triton.jit
def _gate_up_columns(
    x_TD, pointers, bias, activated_PF, sorted_R, num_routes, first, unit, D: tl.constexpr, F: tl.constexpr,
    TOP_K: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One block with COLUMNS columns. unit: hidden units [ROWS, 1] of the first pair."""
    ROWS: tl.constexpr = unit.shape[0]
    words = _load_words(pointers[0], 0, D, CHUNK)
    x_rows, here = (), ()
    for i in tl.static_range(COLUMNS):
        route = tl.load(sorted_R + first + 8 * i + tl.arange(0, ROWS)[:, None] % 8)
        x_rows = x_rows + ((route // TOP_K).to(tl.int64),)  # noqa: RUF005
        here = here + (route < num_routes,)  # noqa: RUF005
    params = _load_all_params(pointers, 0, D, HAS_ZERO)
    acc = _multiply_rows(x_TD, x_rows, here, pointers, words, params, D, HAS_ZERO, CHUNK, EARLY, ASM)
    row = 2 * tl.arange(0, 4)[None, :, None] + tl.arange(0, 2)[None, None, :]
    for j in tl.static_range(len(acc) // COLUMNS):
        n = (unit + j * ROWS)[:, :, None]
        for i in tl.static_range(COLUMNS):
            gate, up = halves(acc[j * COLUMNS + i])
            if HAS_BIAS:
                gate += tl.load(bias + tl.minimum(n, F - 1)).to(tl.float32)
                up += tl.load(bias + F + tl.minimum(n, F - 1)).to(tl.float32)
            hidden = activated(gate, up, ACTIVATION).to(activated_PF.dtype.element_ty)
            m = first + 8 * i + row
            real = tl.load(sorted_R + m) < num_routes
            out = activated_PF + m.to(tl.int64) * F + in_order(n)
            tl.store(out, hidden, mask=real & (n < F), eviction_policy=KEPT)


@triton.jit
def _rows_in_block(sorted_R, first, num_routes, BLOCK_M: tl.constexpr):
    route = tl.load(sorted_R + first + tl.arange(0, BLOCK_M))
    return tl.sum((route < num_routes).to(tl.int32), 0)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def few_rows_gate_up_kernel(
    x_TD,  # columns in order
    weights,  # int32 words
    scales,
    zeros,
    bias,
    activated_PF,  # out, columns in order
    sorted_R,
    block_slots,
    num_blocks,
    num_routes,
    stride_s,
    stride_scale_s,
    stride_scale_n,
    stride_zero_s,
    stride_bias_s,
    D: tl.constexpr,
    F: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,  # 8, 16 or 32
    PAIRS: tl.constexpr,
    WARPS: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCK_N: tl.constexpr = 8 * WARPS * PAIRS
    NUM_N: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    pid_m, pid_n = tl.program_id(0) // NUM_N, tl.program_id(0) % NUM_N
    wait_for_previous(PDL)
    start_next(PDL)
    slot = tl.load(block_slots + pid_m).to(tl.int64)  # before the branch: it needn't wait for num_blocks
    first = pid_m * BLOCK_M
    if pid_m >= tl.load(num_blocks):
        return
    unit = pid_n * BLOCK_N + tl.arange(0, 8 * WARPS)[:, None]
    rows = ()
    for j in tl.static_range(2 * PAIRS):
        n = unit + j // 2 * 8 * WARPS
        if F % BLOCK_N != 0:
            n = tl.minimum(n, F - 1)
        rows = rows + (n + j % 2 * F,)  # noqa: RUF005
    strides = (stride_s, stride_scale_s, stride_zero_s, stride_scale_n)
    pointers = _row_pointers(weights, scales, zeros, slot, rows, strides, D)
    bias += slot * stride_bias_s
    if BLOCK_M == 8:
        _gate_up_columns(
            x_TD, pointers, bias, activated_PF, sorted_R, num_routes, first, unit, D, F, TOP_K, HAS_ZERO,
            HAS_BIAS, ACTIVATION, 1, CHUNK, EARLY, ASM,
        )  # fmt: skip
    else:
        count = _rows_in_block(sorted_R, first, num_routes, BLOCK_M)
        for i in tl.static_range(BLOCK_M // 8):
            if (count > 8 * i) & (count <= 8 * i + 8):
                _gate_up_columns(
                    x_TD, pointers, bias, activated_PF, sorted_R, num_routes, first, unit, D, F, TOP_K,
                    HAS_ZERO, HAS_BIAS, ACTIVATION, i + 1, CHUNK, EARLY, ASM,
                )  # fmt: skip


@triton.jit
def _down_columns(
    activated_PF, pointers, words, params, bias, rows_RD, sorted_R, num_routes, first, unit, D: tl.constexpr,
    F: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr, EARLY: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One block with COLUMNS columns. unit: outputs [ROWS, 1] of the first pair's first tile."""
    ROWS: tl.constexpr = unit.shape[0]
    x_rows, here = (), ()
    for i in tl.static_range(COLUMNS):
        m = first + 8 * i + tl.arange(0, ROWS)[:, None] % 8
        x_rows = x_rows + (m.to(tl.int64),)  # noqa: RUF005
        here = here + (tl.load(sorted_R + m) < num_routes,)  # noqa: RUF005
    acc = _multiply_rows(activated_PF, x_rows, here, pointers, words, params, F, HAS_ZERO, CHUNK, EARLY, ASM)
    row = 2 * tl.arange(0, 4)[None, :, None] + tl.arange(0, 2)[None, None, :]
    for i in tl.static_range(COLUMNS):
        route = tl.load(sorted_R + first + 8 * i + row)
        real = route < num_routes
        for j in tl.static_range(len(acc) // COLUMNS):
            n = (unit + 2 * j * ROWS)[:, :, None]
            a, b = halves(acc[j * COLUMNS + i])
            if HAS_BIAS:
                a += tl.load(bias + tl.minimum(n, D - 1)).to(tl.float32)
                b += tl.load(bias + tl.minimum(n + 8, D - 1)).to(tl.float32)
            out = rows_RD + route.to(tl.int64) * D + n
            a, b = a.to(rows_RD.dtype.element_ty), b.to(rows_RD.dtype.element_ty)
            tl.store(out, a, mask=real & (n < D), eviction_policy=KEPT)
            tl.store(out + 8, b, mask=real & (n + 8 < D), eviction_policy=KEPT)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def few_rows_down_kernel(
    activated_PF,  # columns in order
    weights,  # int32 words
    scales,
    zeros,
    bias,
    rows_RD,  # out
    sorted_R,
    block_slots,
    num_blocks,
    num_routes,
    stride_s,
    stride_scale_s,
    stride_scale_n,
    stride_zero_s,
    stride_bias_s,
    D: tl.constexpr,
    F: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PAIRS: tl.constexpr,
    WARPS: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCK_N: tl.constexpr = 16 * WARPS * PAIRS
    NUM_N: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    pid_m, pid_n = tl.program_id(0) // NUM_N, tl.program_id(0) % NUM_N
    # What `align` wrote, two launches ago, needs no wait; only activated_PF does.
    slot = tl.load(block_slots + pid_m).to(tl.int64)
    first = pid_m * BLOCK_M
    if pid_m >= tl.load(num_blocks):
        wait_for_previous(PDL)
        start_next(PDL)
        return
    r = tl.arange(0, 8 * WARPS)[:, None]
    unit = pid_n * BLOCK_N + r // 8 * 16 + r % 8
    rows = ()
    for j in tl.static_range(2 * PAIRS):
        n = unit + j // 2 * 16 * WARPS + j % 2 * 8
        if D % BLOCK_N != 0:
            n = tl.minimum(n, D - 1)
        rows = rows + (n,)  # noqa: RUF005
    strides = (stride_s, stride_scale_s, stride_zero_s, stride_scale_n)
    pointers = _row_pointers(weights, scales, zeros, slot, rows, strides, F)
    bias += slot * stride_bias_s
    words = _load_words(pointers[0], 0, F, CHUNK)
    params = _load_all_params(pointers, 0, F, HAS_ZERO)
    count = _rows_in_block(sorted_R, first, num_routes, BLOCK_M)
    wait_for_previous(PDL)
    start_next(PDL)
    if BLOCK_M == 8:
        _down_columns(
            activated_PF, pointers, words, params, bias, rows_RD, sorted_R, num_routes, first, unit, D, F,
            HAS_ZERO, HAS_BIAS, 1, CHUNK, EARLY, ASM,
        )  # fmt: skip
    else:
        for i in tl.static_range(BLOCK_M // 8):
            if (count > 8 * i) & (count <= 8 * i + 8):
                _down_columns(
                    activated_PF, pointers, words, params, bias, rows_RD, sorted_R, num_routes, first, unit, D, F,
                    HAS_ZERO, HAS_BIAS, i + 1, CHUNK, EARLY, ASM,
                )  # fmt: skip
