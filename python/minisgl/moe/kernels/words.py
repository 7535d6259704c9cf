"""Dot products of stored weights with one row, on 32-bit words: four 8-bit or eight 4-bit codes each.

The decode kernels of `direct_words` read weights as int32 words, four of them (16 bytes) a thread at a time, and
never leave registers: no shared memory, no K loop that waits. What is left to be cheap is arithmetic. Instructions a
weight, counting what a thread issues:

    int8    1 byte permute, 1 FMA: the byte goes into the mantissa of 32768.0, whose bit 8 is worth one
    fp8     1/2 conversion of two codes to two float16, 1 to float32, 1 FMA
    int4    1.9 for shift and mask, 1 FMA: `0x4300 | code` is 128 + code in the upper half of a float32
    int4 through the tensor cores ("quads")   7/8 for shift and mask of two codes at once, 1/8 product

Constants such as 32768 + 128 come off again through the sum of the activations that met the word.

Quads. A product m16n8k16 has 16 rows of weights, 8 columns of activations. Four neighbouring lanes (a quad) hold two
of those rows and one of the columns; the product of quad q's rows with its own column stands on the diagonal. So if
every quad brings its own activations, the instruction is eight independent pairs of dot products, of 16 columns each,
and nothing has to be rearranged among lanes. Seven eighths of the tensor cores' work is thrown away; they have it to
spare. What it needs of the layout: the four lanes of a quad hold one row of the tile, i.e. lanes run along K first
and a row has at least 16 words. Triton lays out coalesced tiles that way, `tests/unit/moe` checks that it does.

Without ASM (interpreter, activations other than bf16) codes are converted one by one.
"""

import itertools

import triton
import triton.language as tl

_BYTE_OFFSET = tl.constexpr(32768.0 + 128.0)


def _int8_words(outputs: list[str], words: list[str], x: list[str], starts: list[str]) -> str:
    """outputs = starts + dots of words with four of x each, every code raised by 32768 + 128."""
    lines = ["{", ".reg .b32 u, f;", ".reg .f32 s;"]
    for j, word in enumerate(words):
        lines += [f"xor.b32 u, {word}, 0x80808080;", f"mov.f32 s, {starts[j]};"]
        for i in range(4):
            lines += [f"prmt.b32 f, u, 0x47000000, 0x74{i}4;", f"fma.rn.f32 s, f, {x[4 * j + i]}, s;"]
        lines.append(f"mov.f32 {outputs[j]}, s;")
    return "\n".join([*lines, "}"])


def _fp8_words(outputs: list[str], words: list[str], x: list[str]) -> str:
    """outputs = dots of words of E4M3 codes with four of x each."""
    lines = ["{", ".reg .b16 low, high, a, b, c, d;", ".reg .b32 p, q;", ".reg .f32 f, s;"]
    for j, word in enumerate(words):
        lines += [f"mov.b32 {{low, high}}, {word};"]
        lines += ["cvt.rn.f16x2.e4m3x2 p, low;", "cvt.rn.f16x2.e4m3x2 q, high;"]
        lines += ["mov.b32 {a, b}, p;", "mov.b32 {c, d}, q;"]
        lines += ["cvt.f32.f16 f, a;", f"mul.rn.f32 s, f, {x[4 * j]};"]
        for i, half in enumerate("bcd"):
            lines += [f"cvt.f32.f16 f, {half};", f"fma.rn.f32 s, f, {x[4 * j + 1 + i]}, s;"]
        lines.append(f"mov.f32 {outputs[j]}, s;")
    return "\n".join([*lines, "}"])


def _operands(first: int, count: int) -> list[str]:
    return [f"${i}" for i in range(first, first + count)]


def _x_of_four_words(first: int) -> list[str]:
    """Operands of the 16 x of four words, that come as four tiles: low and high halves of pairs 0 .. 3, then of 4 .. 7."""
    return [f"${first + 8 * (pair // 4) + 4 * half + pair % 4}" for pair in range(8) for half in range(2)]


def _int4_asm() -> str:
    """$0 = dot of the eight codes of $1, each raised by 128, with $2 .. $9: nibble i of both halves is pair i."""
    lines = ["{", ".reg .b32 t, f;", ".reg .f32 s;", "mov.f32 s, 0f00000000;"]
    for nibble in range(4):
        for half in range(2):
            shift = 4 * nibble + 16 * half - 16  # to bit 16, the last mantissa bit of 128.0 in bf16
            move = "shl.b32 t, $1, " if shift < 0 else "shr.u32 t, $1, "
            lines.append(f"{move}{abs(shift)};")
            lines.append("lop3.b32 f, t, 0x000F0000, 0x43000000, 0xEA;")
            lines.append(f"fma.rn.f32 s, f, ${2 + 2 * nibble + half}, s;")
    return "\n".join([*lines, "mov.f32 $0, s;", "}"])


_DIAGONAL = [  # on: this lane has the element of the diagonal; odd: it is the second of the lane's two columns
    ".reg .b32 lane, column, row, bit;",
    ".reg .pred on, odd;",
    "mov.u32 lane, %laneid;",
    "and.b32 column, lane, 3;",
    "shr.u32 row, lane, 3;",
    "setp.eq.u32 on, column, row;",
    "and.b32 bit, lane, 4;",
    "setp.ne.u32 odd, bit, 0;",
]
_PRODUCT = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{d0, d1, d2, d3}}, {{{}}}, {{{}, {}}}, {{d0, d1, d2, d3}};"
_ZEROS = [f"mov.f32 d{i}, 0f00000000;" for i in range(4)]


def _quad_asm() -> str:
    """Words $8 .. $11 of one tile and $12 .. $15 of another, pairs $16 .. $31 of bf16: sums $0 and $4 of the quad's rows."""
    lines = ["{", ".reg .b32 t, a0, a1, a2, a3;", ".reg .f32 d0, d1, d2, d3;", *_ZEROS]
    for word, nibble in itertools.product((0, 2), range(4)):
        for i in range(4):  # a0 and a2 are columns of the first tile's row, a1 and a3 of the second's
            source = f"${8 + 4 * (i % 2) + word + i // 2}"
            if nibble:
                lines.append(f"shr.u32 t, {source}, {4 * nibble};")
                source = "t"
            lines.append(f"lop3.b32 a{i}, {source}, 0x000F000F, 0x43004300, 0xEA;")
        pair = 16 + 4 * nibble + word  # neighbouring registers of one load, so nothing has to be moved
        lines.append(_PRODUCT.format("a0, a1, a2, a3", f"${pair}", f"${pair + 1}"))
    lines += [*_DIAGONAL, "selp.f32 d0, d1, d0, odd;", "selp.f32 d2, d3, d2, odd;"]
    lines += ["selp.f32 $0, d0, 0f00000000, on;", "selp.f32 $4, d2, 0f00000000, on;"]
    lines += [f"mov.f32 ${i}, 0f00000000;" for i in (1, 2, 3, 5, 6, 7)]
    return "\n".join([*lines, "}"])


def _quad_sum_asm() -> str:
    """$0 = sum of the quad's activations, pairs $4 .. $19 of bf16; $1 .. $3 = 0."""
    lines = ["{", ".reg .b32 one;", ".reg .f32 d0, d1, d2, d3;", "mov.b32 one, 0x3F803F80;", *_ZEROS]
    for pair in range(4, 20, 2):
        lines.append(_PRODUCT.format("one, one, one, one", f"${pair}", f"${pair + 1}"))
    lines += [*_DIAGONAL, "selp.f32 d0, d1, d0, odd;", "selp.f32 $0, d0, 0f00000000, on;"]
    return "\n".join([*lines, *(f"mov.f32 ${i}, 0f00000000;" for i in (1, 2, 3)), "}"])


_INT8 = tl.constexpr(_int8_words(["$0"], ["$1"], _operands(2, 4), ["$6"]))
_FP8 = tl.constexpr(_fp8_words(["$0"], ["$1"], _operands(2, 4)))
_INT8_FOUR = tl.constexpr(
    _int8_words(_operands(0, 4), _operands(4, 4), _x_of_four_words(8), _operands(24, 4))
)
_FP8_FOUR = tl.constexpr(_fp8_words(_operands(0, 4), _operands(4, 4), _x_of_four_words(8)))
_FOUR = tl.constexpr(",".join(["=&f"] * 4 + ["r"] * 4 + ["f"] * 16))
_FOUR_WITH_START = tl.constexpr(",".join(["=&f"] * 4 + ["r"] * 4 + ["f"] * 20))
_INT4 = tl.constexpr(_int4_asm())
_QUAD = tl.constexpr(_quad_asm())
_QUAD_SUM = tl.constexpr(_quad_sum_asm())
_QUAD_CONSTRAINTS = tl.constexpr(",".join(["=&f"] * 8 + ["r"] * 24))
_QUAD_SUM_CONSTRAINTS = tl.constexpr(",".join(["=&f"] * 4 + ["r"] * 16))


@triton.constexpr_function
def per_word(format_name):
    """Weights a word."""
    return {"int4": 8, "bf16": 2}.get(format_name, 4)


@triton.jit
def _low(pair):
    """float32 of the lower bf16 of an int32."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(pair):
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def load_even(pointers, inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside, other=0)


@triton.jit
def load_x(
    x, row, word, inside, K: tl.constexpr, FORMAT: tl.constexpr, EVEN: tl.constexpr, FOURS: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """What meets the words number `word` of row `row` (int64) of x, as a tuple of tiles: float32, one a code of the word;
    with FOURS four of int32, pairs of bf16. Zero where not inside."""
    if FORMAT == "int4":
        at = word // 4 * 16 + word % 4
        if ASM:
            pairs = x.to(tl.pointer_type(tl.int32)) + (row * (K // 2) + at)
            a, b = load_even(pairs, inside, EVEN), load_even(pairs + 4, inside, EVEN)
            c, d = load_even(pairs + 8, inside, EVEN), load_even(pairs + 12, inside, EVEN)
            if FOURS:
                return a, b, c, d
            else:
                return _low(a), _high(a), _low(b), _high(b), _low(c), _high(c), _low(d), _high(d)
        else:
            parts = ()
            for i in tl.static_range(8):
                value = load_even(x + (row * K + 2 * at + i // 2 * 8 + i % 2), inside, EVEN)
                parts = parts + (value.to(tl.float32),)  # noqa: RUF005
            return parts
    elif FORMAT == "bf16":
        pair = load_even(x.to(tl.pointer_type(tl.int32)) + (row * (K // 2) + word), inside, EVEN)
        return _low(pair), _high(pair)
    elif FOURS:
        pairs = x.to(tl.pointer_type(tl.int32)) + (row * (K // 2) + word // 4 * 8 + word % 4)
        a, b = load_even(pairs, inside, EVEN), load_even(pairs + 4, inside, EVEN)
        return _low(a), _high(a), _low(b), _high(b)
    elif ASM:
        four = load_even(x.to(tl.pointer_type(tl.int64)) + (row * (K // 4) + word), inside, EVEN)
        first, second = four.to(tl.int32), (four >> 32).to(tl.int32)
        return _low(first), _high(first), _low(second), _high(second)
    else:
        parts = ()
        for i in tl.static_range(4):
            value = load_even(x + (row * K + 4 * word + i), inside, EVEN)
            parts = parts + (value.to(tl.float32),)  # noqa: RUF005
        return parts


@triton.jit
def _e4m3(code):
    """float32 of E4M3 codes 0..255; 0x7f and 0xff are NaN."""
    magnitude = code & 127
    exponent, mantissa = magnitude >> 3, (magnitude & 7).to(tl.float32)
    small = mantissa * 0.001953125
    large = (8.0 + mantissa) * tl.exp2(exponent.to(tl.float32) - 10.0)
    value = tl.where(exponent == 0, small, large)
    value = tl.where(magnitude == 127, float("nan"), value)
    return tl.where(code >= 128, -value, value)


@triton.jit
def _dot(words, x, offset, FORMAT: tl.constexpr, FOURS: tl.constexpr, ASM: tl.constexpr):
    """Float32 like words: the dot product of each word's codes; offset: of int8, see `x_sums`."""
    if FORMAT == "bf16":
        return tl.fma(_low(words), x[0], _high(words) * x[1])
    elif FOURS:
        if FORMAT == "int8":
            return tl.inline_asm_elementwise(
                _INT8_FOUR, _FOUR_WITH_START, [words, x[0], x[1], x[2], x[3], offset], tl.float32, True, 4
            )
        else:
            return tl.inline_asm_elementwise(
                _FP8_FOUR, _FOUR, [words, x[0], x[1], x[2], x[3]], tl.float32, True, 4
            )
    elif ASM:
        if FORMAT == "int8":
            return tl.inline_asm_elementwise(
                _INT8, "=&f,r,f,f,f,f,f", [words, x[0], x[1], x[2], x[3], offset], tl.float32, True, 1
            )
        elif FORMAT == "int4":
            return tl.inline_asm_elementwise(
                _INT4, "=&f,r,f,f,f,f,f,f,f,f", [words, x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]],
                tl.float32, True, 1,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                _FP8, "=&f,r,f,f,f,f", [words, x[0], x[1], x[2], x[3]], tl.float32, True, 1
            )
    else:
        total = tl.zeros(words.shape, tl.float32)
        for i in tl.static_range(8 if FORMAT == "int4" else 4):
            if FORMAT == "int4":
                value = 128.0 + (words >> (4 * (i // 2) + 16 * (i % 2)) & 15).to(tl.float32)
            elif FORMAT == "int8":
                value = (words << (24 - 8 * i) >> 24).to(tl.float32)
            else:
                value = _e4m3(words >> (8 * i) & 255)
            total += value * x[i]
        return total


@triton.jit
def dot_two(a, b, x, offset, FORMAT: tl.constexpr, FOURS: tl.constexpr, ASM: tl.constexpr):
    """Dot products, float32 a word, of two tiles of words with the same x. int4 codes count as 128 + code. With FOURS
    only the sum over the four lanes of a quad means something."""
    if FOURS and FORMAT == "int4":
        dot_a, dot_b = tl.inline_asm_elementwise(
            _QUAD, _QUAD_CONSTRAINTS, [a, b, x[0], x[1], x[2], x[3]], (tl.float32, tl.float32), True, 4
        )
    else:
        dot_a, dot_b = _dot(a, x, offset, FORMAT, FOURS, ASM), _dot(b, x, offset, FORMAT, FOURS, ASM)
    return dot_a, dot_b


@triton.jit
def x_sums(x, FORMAT: tl.constexpr, FOURS: tl.constexpr, ASM: tl.constexpr):
    """What must come off a word's dot product for its codes' offset: int4: the sum of its x, to be multiplied with the
    offset; int8: minus offset times sum, where the dot product starts. 0 for fp8, whose codes have none."""
    if FOURS and FORMAT == "int4":
        return tl.inline_asm_elementwise(
            _QUAD_SUM, _QUAD_SUM_CONSTRAINTS, [x[0], x[1], x[2], x[3]], tl.float32, True, 4
        )
    elif FORMAT == "int4":
        return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]))
    elif (FORMAT == "int8") and ASM:
        return ((x[0] + x[1]) + (x[2] + x[3])) * -_BYTE_OFFSET
    else:
        return 0.0
