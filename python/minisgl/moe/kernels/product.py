"""One K step of rows times weights on the tensor cores, for every format; and what follows the last step.

Shared by the grouped kernels and by the wide direct ones. A weight tile has ROWS rows (2 * BLOCK_N with gate
and up rows alternating, or BLOCK_N) and BLOCK_K columns, stored as BLOCK_K / P words (see `tiles`). Operands
come by pointers and asynchronous copies, or by tensor descriptors where TMA is set.
"""

import triton
import triton.language as tl

from minisgl.moe.kernels.tiles import (
    MXFP4_LIFT,
    mxfp4_scale,
    raw_int4,
    unpack_int4,
    unpack_int8,
    unpack_mxfp4,
)


@triton.jit
def dot(acc, x, w, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """acc + x w^T with x [BLOCK_M, k] and w [ROWS, k]; its transpose if SWAP, which makes the weights the tall operand."""
    if SWAP:
        return tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    else:
        return tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)


@triton.jit
def load_x(x_rows, columns, inside, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(x_rows + columns[None, :])
    else:
        return tl.load(x_rows + columns[None, :], mask=inside[None, :], other=0.0)


@triton.jit
def load_w(
    weights, slot, first_n, row_n, word, stride_s, WORDS: tl.constexpr, ROWS: tl.constexpr, HALVES: tl.constexpr,
    STEP: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A tile [ROWS, STEP] of a slot's words from word number `word` on. row_n are the rows' numbers; with TMA they follow
    from first_n, and rows past the edge are zero. Columns of the product past the edge are never stored."""
    if TMA:
        return weights.load([slot, first_n, 0, word]).reshape(ROWS, STEP)
    else:
        k = word + tl.arange(0, STEP)
        pointers = weights + slot.to(tl.int64) * stride_s + row_n[:, None] * WORDS + k[None, :]
        if EVEN_K:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(k < WORDS)[None, :], other=0.0)


@triton.jit
def group_params(params, row_n, k0, stride_n, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Per-group numbers [ROWS, GROUPS] of the tile that starts at column k0 (zero past the edge)."""
    g = k0 // GROUP + tl.arange(0, GROUPS)
    pointers = params + row_n[:, None] * stride_n + g[None, :]
    if K % (GROUP * GROUPS) == 0:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(g * GROUP < K)[None, :], other=0.0)


@triton.jit
def multiply_step(
    acc, x_rows, x_scale, weights, scales, zeros, slot, first_n, row_n, block_n, k0, stride_s, stride_scale_n,
    FORMAT: tl.constexpr, HAS_ZERO: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    HALVES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
    SPLIT_X: tl.constexpr, CODE_X: tl.constexpr, ASM: tl.constexpr, PRECISION: tl.constexpr, x_sums=None,
    UNIT: tl.constexpr = 0,
):  # fmt: skip
    """acc plus the product of columns k0 .. k0 + BLOCK_K.

    x_rows: pointers [BLOCK_M, 1] to rows. block_n: rows of block scales (fp8_block). SPLIT_X: rows of x hold
    their even columns first, then their odd ones (int8, see `rows`); else int8 reads every second column. CODE_X: rows
    of x become fp8 codes here, with x_scale [BLOCK_M]. UNIT: x_sums points to each row's sums over UNIT columns (int4).
    """
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    DTYPE: tl.constexpr = x_rows.dtype.element_ty
    if (FORMAT == "int4") or (FORMAT == "mxfp4"):
        STEP: tl.constexpr = BLOCK_K // 4
        GROUPS: tl.constexpr = BLOCK_K // GROUP if BLOCK_K > GROUP else 1
        j = tl.arange(0, STEP)
        inside = k0 // 4 + j < K // 4
        column = k0 + j // 8 * 32 + j % 8
        x0 = load_x(x_rows, column, inside, EVEN_K)
        x1 = load_x(x_rows, column + 8, inside, EVEN_K)
        x2 = load_x(x_rows, column + 16, inside, EVEN_K)
        x3 = load_x(x_rows, column + 24, inside, EVEN_K)
        words = load_w(
            weights, slot, first_n, row_n, k0 // 4, stride_s, K // 4, ROWS, HALVES, STEP, EVEN_K, TMA
        ).reshape(ROWS, GROUPS, STEP // GROUPS)
        params = group_params(scales, row_n, k0, stride_scale_n, K, GROUP, GROUPS)
        # With few rows a scale is cheaper to apply to the product of its group than to every weight.
        LATE_SCALE: tl.constexpr = (FORMAT == "int4") and (GROUPS == 1) and (BLOCK_M <= 32)
        # x (code - zero) = x (128 + code) - (128 + zero) sum(x): with the sums at hand nothing is subtracted from weights.
        SUMS: tl.constexpr = LATE_SCALE and UNIT > 0
        if SUMS:
            w0, w1, w2, w3 = raw_int4(words, DTYPE, ASM)
        elif FORMAT == "mxfp4":
            w0, w1, w2, w3 = unpack_mxfp4(words, mxfp4_scale(params, ASM)[:, :, None], DTYPE, ASM)
        else:
            scale = params.to(tl.float32)[:, :, None]
            zero = scale
            if HAS_ZERO:
                zero = group_params(zeros, row_n, k0, stride_scale_n, K, GROUP, GROUPS)
                zero = zero.to(tl.float32)[:, :, None]
            w0, w1, w2, w3 = unpack_int4(words, scale, zero, not LATE_SCALE, HAS_ZERO, DTYPE, ASM)
        if LATE_SCALE:
            part = dot(None, x0, w0.reshape(ROWS, STEP), SWAP, PRECISION)
        else:
            part = dot(acc, x0, w0.reshape(ROWS, STEP), SWAP, PRECISION)
        part = dot(part, x1, w1.reshape(ROWS, STEP), SWAP, PRECISION)
        part = dot(part, x2, w2.reshape(ROWS, STEP), SWAP, PRECISION)
        part = dot(part, x3, w3.reshape(ROWS, STEP), SWAP, PRECISION)
        if SUMS:
            x_sum = tl.load(x_sums + k0 // UNIT)
            for unit in tl.static_range(1, BLOCK_K // UNIT):
                x_sum += tl.load(x_sums + k0 // UNIT + unit)
            BASE: tl.constexpr = 128.0 if ASM else 0.0
            if HAS_ZERO:
                zeros_of_rows = group_params(zeros, row_n, k0, stride_scale_n, K, GROUP, GROUPS).to(
                    tl.float32
                )
                offset = BASE + tl.reshape(zeros_of_rows, (ROWS,))
                part -= offset[:, None] * x_sum[None, :] if SWAP else offset[None, :] * x_sum[:, None]
            else:
                lift = (BASE + 8.0) * x_sum
                part -= lift[None, :] if SWAP else lift[:, None]
        if LATE_SCALE:
            late = tl.reshape(params.to(tl.float32), (ROWS,))
            acc += part * (late[:, None] if SWAP else late[None, :])
        else:
            acc = part
    elif FORMAT == "int8":
        HALF_STEP: tl.constexpr = BLOCK_K // 2
        j = tl.arange(0, HALF_STEP)
        inside = k0 // 2 + j < K // 2
        if SPLIT_X:
            x0 = load_x(x_rows, k0 // 2 + j, inside, EVEN_K)
            x1 = load_x(x_rows, K // 2 + k0 // 2 + j, inside, EVEN_K)
        else:
            x0 = load_x(x_rows, k0 + 2 * j, inside, EVEN_K)
            x1 = load_x(x_rows, k0 + 2 * j + 1, inside, EVEN_K)
        words = load_w(
            weights, slot, first_n, row_n, k0 // 2, stride_s, K // 2, ROWS, HALVES, HALF_STEP, EVEN_K, TMA
        )
        w0, w1 = unpack_int8(words, DTYPE, ASM)
        acc = dot(acc, x0, w0, SWAP, PRECISION)
        acc = dot(acc, x1, w1, SWAP, PRECISION)
    else:
        k = k0 + tl.arange(0, BLOCK_K)
        x = load_x(x_rows, k, k < K, EVEN_K)
        if CODE_X:
            x = (x.to(tl.float32) / x_scale[:, None]).to(
                weights.dtype.element_ty if not TMA else weights.dtype
            )
        w = load_w(weights, slot, first_n, row_n, k0, stride_s, K, ROWS, HALVES, BLOCK_K, EVEN_K, TMA)
        if FORMAT == "fp8_block":
            scale = tl.load(scales + block_n * stride_scale_n + k0 // 128)
            part = dot(None, x, w, SWAP, PRECISION)
            acc += part * (scale[:, None] if SWAP else scale[None, :])
        else:
            acc = dot(acc, x, w, SWAP, PRECISION)
    return acc


@triton.jit
def scaled(acc, x_scale, scales, row_n, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """acc [BLOCK_M, ROWS] times the scales that cover a whole row of x or of the weights."""
    if (FORMAT == "fp8") or (FORMAT == "int8"):
        acc = acc * tl.load(scales + row_n)[None, :]
    if (FORMAT == "fp8") or (FORMAT == "fp8_block"):
        acc = acc * x_scale[:, None]
    if (FORMAT == "mxfp4") and ASM:
        acc = acc * MXFP4_LIFT
    return acc


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    """`moe.base.activate` on float32 tiles. (tl.minimum would make 7 of NaN.)"""
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    else:
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return (up + 1.0) * gate / (1.0 + tl.exp(-1.702 * gate))
