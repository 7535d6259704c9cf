"""What the decode kernels on words load, step by step of K: rows of weights as words, their scales and zeros, rows of x."""

import triton
import triton.language as tl

from minisgl.moe.kernels.tiles import load_once
from minisgl.moe.kernels.words import high, low, per_word


@triton.jit
def within(here, i: tl.constexpr, WIDTH: tl.constexpr, LAST: tl.constexpr):
    """here, and columns i * WIDTH .. before LAST, unless all of them are."""
    inside = here
    if (i + 1) * WIDTH > LAST:
        inside = here & (i * WIDTH + tl.arange(0, WIDTH)[None, None, :] < LAST)
    return inside


@triton.jit
def load_even(pointers, inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside, other=0)


@triton.jit
def existing(n, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr):
    """Rows n, those past the end replaced by the last one. Not where there are none (4 bits): loads of rows in a line share
    one address, which leaves registers for more programs. (With 8-bit codes the compiler spilled for it.)"""
    if SIZE % BLOCK_N == 0 and ((FORMAT == "int4") or (FORMAT == "mxfp4")):
        return n
    else:
        return tl.minimum(n, SIZE - 1)


@triton.jit
def lane_order(n):
    """Where column n lies in a row that lanes read who have 32 columns of 4 bits each: the first 16 bytes of eight lanes side
    by side, then their second ones and so on. So a load of 16 bytes a lane meets no bank twice."""
    return n // 256 * 256 + n % 32 // 8 * 64 + n % 256 // 32 * 8 + n % 8


@triton.jit
def row_pointers(
    weights, scales, zeros, held, row_a, row_b, block_b, strides, K: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """Where rows row_a and row_b of slots `held` begin: pointers to words, scales and zeros, as a tuple.

    strides: of slots in words, scales and zeros, and of a row of scales. block_b: the row of block scales that row_b
    has (fp8_block). Rows and slots broadcast to [experts, rows, 1].
    """
    PER_WORD: tl.constexpr = per_word(FORMAT)
    w, s, z = weights + held * strides[0], scales + held * strides[1], zeros + held * strides[2]
    scale_a, scale_b = row_a, row_b
    if FORMAT == "fp8_block":
        scale_a, scale_b = row_a // 128, block_b
    return (
        w + row_a * (K // PER_WORD),
        w + row_b * (K // PER_WORD),
        s + scale_a * strides[3],
        s + scale_b * strides[3],
        z + row_a * strides[3],
        z + row_b * strides[3],
    )


@triton.jit
def load_words_step(
    rows,
    here,
    i: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    ALL: tl.constexpr,
):
    """Words of step i of two tiles. rows: see `row_pointers`; here: bool [experts, 1, 1], ignored if ALL."""
    WORDS: tl.constexpr = BLOCK_K // per_word(FORMAT)
    EVEN: tl.constexpr = ALL and K % BLOCK_K == 0
    inside = within(here, i, WORDS, K // per_word(FORMAT))
    word = i * WORDS + tl.arange(0, WORDS)[None, None, :]
    return load_once(rows[0] + word, inside, EVEN), load_once(rows[1] + word, inside, EVEN)


@triton.jit
def load_words(
    rows, here, COUNT: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr, ALL: tl.constexpr
):  # fmt: skip
    """Words of the first COUNT steps, as a tuple."""
    steps = ()  # tuples grow by +: Triton has no (*a, b)
    for i in tl.static_range(COUNT):
        steps = steps + (load_words_step(rows, here, i, K, BLOCK_K, FORMAT, ALL),)  # noqa: RUF005
    return steps


@triton.jit
def load_late(words, rows, late, K: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr):
    """The steps of `words`, with the rows `late`, bool [experts, 1, 1], loaded now."""
    WORDS: tl.constexpr = BLOCK_K // per_word(FORMAT)
    steps = ()
    for i in tl.static_range(len(words)):
        inside = within(late, i, WORDS, K // per_word(FORMAT))
        word = i * WORDS + tl.arange(0, WORDS)[None, None, :]
        a = tl.load(rows[0] + word, mask=inside, other=words[i][0])
        steps = steps + ((a, tl.load(rows[1] + word, mask=inside, other=words[i][1])),)  # noqa: RUF005
    return steps


@triton.jit
def load_params_step(
    rows, here, i: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr,
    ALL: tl.constexpr,
):  # fmt: skip
    """Scales and zeros of both tiles' groups of step i: four of float32 [experts, rows, groups], or numbers."""
    if GROUP == 0:
        return 0.0, 0.0, 0.0, 0.0
    else:
        GROUPS: tl.constexpr = BLOCK_K // GROUP
        EVEN: tl.constexpr = ALL and K % BLOCK_K == 0
        inside = within(here, i, GROUPS, (K + GROUP - 1) // GROUP)
        g = i * GROUPS + tl.arange(0, GROUPS)[None, None, :]
        scale_a, scale_b = load_even(rows[2] + g, inside, EVEN), load_even(rows[3] + g, inside, EVEN)
        if HAS_ZERO:
            zero_a, zero_b = load_even(rows[4] + g, inside, EVEN), load_even(rows[5] + g, inside, EVEN)
            return scale_a, scale_b, zero_a.to(tl.float32), zero_b.to(tl.float32)
        else:
            return scale_a, scale_b, 8.0, 8.0


@triton.jit
def load_params(
    rows, here, COUNT: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr,
    ALL: tl.constexpr,
):  # fmt: skip
    steps = ()
    for i in tl.static_range(COUNT):
        steps = steps + (load_params_step(rows, here, i, K, BLOCK_K, GROUP, HAS_ZERO, ALL),)  # noqa: RUF005
    return steps


@triton.jit
def row_parameters(scales, bias, row_a, row_b, FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Scales of whole rows, and biases, of one slot: a tuple of four."""
    scale_a, scale_b, bias_a, bias_b = 0.0, 0.0, 0.0, 0.0
    if (FORMAT == "int8") or (FORMAT == "fp8"):
        scale_a, scale_b = tl.load(scales + row_a), tl.load(scales + row_b)
    if HAS_BIAS:
        bias_a, bias_b = tl.load(bias + row_a).to(tl.float32), tl.load(bias + row_b).to(tl.float32)
    return scale_a, scale_b, bias_a, bias_b


@triton.jit
def load_row_scales(scales, row_a, row_b, there, other_a, other_b, FORMAT: tl.constexpr):
    """Scales of rows row_a and row_b, [1, rows], of the slots at `scales`, [experts, 1]; other_a and other_b where not `there`,
    bool [experts], and where a format has no scale a row."""
    if (FORMAT == "int8") or (FORMAT == "fp8"):
        other_a = tl.load(scales + row_a, mask=there[:, None], other=other_a)
        other_b = tl.load(scales + row_b, mask=there[:, None], other=other_b)
    return other_a, other_b


@triton.jit
def load_x(
    x, row, word, inside, K: tl.constexpr, FORMAT: tl.constexpr, EVEN: tl.constexpr, FOURS: tl.constexpr, ASM: tl.constexpr,
    LANE_ORDER: tl.constexpr,
):  # fmt: skip
    """What meets the words number `word` of row `row` (int64) of x, as a tuple of tiles: float32, one a code of the word;
    with FOURS four of int32, pairs of bf16. Zero where not inside. LANE_ORDER: see `lane_order`; 4 bits only."""
    if (FORMAT == "int4") or (FORMAT == "mxfp4"):
        at = word // 4 * 16 + word % 4
        if ASM:
            APART: tl.constexpr = 32 if LANE_ORDER else 4
            first = word // 32 * 128 + word % 32 if LANE_ORDER else at
            pairs = x.to(tl.pointer_type(tl.int32)) + (row * (K // 2) + first)
            a, b = load_even(pairs, inside, EVEN), load_even(pairs + APART, inside, EVEN)
            c, d = load_even(pairs + 2 * APART, inside, EVEN), load_even(pairs + 3 * APART, inside, EVEN)
            if FOURS:
                return a, b, c, d
            else:
                return low(a), high(a), low(b), high(b), low(c), high(c), low(d), high(d)
        else:
            parts = ()
            for i in tl.static_range(8):
                column = 2 * at + i // 2 * 8 + i % 2
                column = lane_order(column) if LANE_ORDER else column
                value = load_even(x + (row * K + column), inside, EVEN)
                parts = parts + (value.to(tl.float32),)  # noqa: RUF005
            return parts
    elif FORMAT == "bf16":
        pair = load_even(x.to(tl.pointer_type(tl.int32)) + (row * (K // 2) + word), inside, EVEN)
        return low(pair), high(pair)
    elif FOURS:
        pairs = x.to(tl.pointer_type(tl.int32)) + (row * (K // 2) + word // 4 * 8 + word % 4)
        return load_even(pairs, inside, EVEN), load_even(pairs + 4, inside, EVEN)
    elif ASM:
        four = load_even(x.to(tl.pointer_type(tl.int64)) + (row * (K // 4) + word), inside, EVEN)
        first, second = four.to(tl.int32), (four >> 32).to(tl.int32)
        return low(first), high(first), low(second), high(second)
    else:
        parts = ()
        for i in tl.static_range(4):
            value = load_even(x + (row * K + 4 * word + i), inside, EVEN)
            parts = parts + (value.to(tl.float32),)  # noqa: RUF005
        return parts


@triton.jit
def load_x_step(
    x, x_row, here, i: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr, ALL: tl.constexpr,
    FOURS: tl.constexpr, ASM: tl.constexpr, LANE_ORDER: tl.constexpr,
):  # fmt: skip
    WORDS: tl.constexpr = BLOCK_K // per_word(FORMAT)
    inside = within(here, i, WORDS, K // per_word(FORMAT))
    word = i * WORDS + tl.arange(0, WORDS)[None, None, :]
    return load_x(x, x_row, word, inside, K, FORMAT, ALL and K % BLOCK_K == 0, FOURS, ASM, LANE_ORDER)


@triton.jit
def load_rows(
    x, x_row, here, COUNT: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr, ALL: tl.constexpr,
    FOURS: tl.constexpr, ASM: tl.constexpr, LANE_ORDER: tl.constexpr,
):  # fmt: skip
    """The first COUNT steps of rows x_row (int64, [experts, 1, 1] or a scalar) of x, as a tuple."""
    steps = ()
    for i in tl.static_range(COUNT):
        steps = steps + (load_x_step(x, x_row, here, i, K, BLOCK_K, FORMAT, ALL, FOURS, ASM, LANE_ORDER),)  # noqa: RUF005
    return steps
