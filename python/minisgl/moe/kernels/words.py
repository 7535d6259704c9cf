"""Dot products of stored weights with one row, on 32-bit words: four 8-bit or eight 4-bit codes each.

The decode kernels of `direct_words` read weights as int32 words, four of them (16 bytes) a thread at a time, and
never leave registers: no shared memory, no K loop that waits. What is left to be cheap is arithmetic. Instructions a
weight, counting what a thread issues, on the ordinary cores and on the tensor cores ("quads", wherever a thread holds
four words of a row):

    int8    1 byte permute, 1 FMA: the byte goes into the mantissa of 32768.0, whose bit 8 is worth one
    fp8     1/2 conversion of two codes to two float16, 1 to float32, 1 FMA
    int4    1.9 for shift and mask, 1 FMA: `0x4300 | code` is 128 + code in the upper half of a float32
    int8, quads   1/2 byte permute into the mantissas of two float16 of 1024, 1/4 to flip signs, 1/8 product
    fp8, quads    1/2 conversion of two codes to two float16, 1/8 product
    int4, quads   7/8 for shift and mask of two codes at once, 1/8 product

Constants such as 1024 + 128 come off again through the sum of the activations that met the word.

Quads. A product m16n8k16 has 16 rows of weights, 8 columns of activations. Four neighbouring lanes (a quad) hold two
of those rows and one of the columns; the product of quad q's rows with its own column stands on the diagonal. So if
every quad brings its own activations, the instruction is eight independent pairs of dot products, of 16 columns each,
and nothing has to be rearranged among lanes. Seven eighths of the tensor cores' work is thrown away; they have it to
spare. What it needs of the layout: the four lanes of a quad hold one row of the tile, i.e. lanes run along K first
and a row has at least 16 words. Triton lays out coalesced tiles that way, `tests/unit/moe` checks that it does.

With 8-bit codes that product is one of float16, whose exponents don't reach as far as bf16's. So a quad scales its
activations by the power of two that puts the largest of them just below 2^15, which is exact, and the sum back: what
that rounds away is 2^-38 of the largest. A thread does so once for all rows of weights that it holds.

Without ASM (interpreter, activations other than bf16) codes are converted one by one.
"""

import itertools

import triton
import triton.language as tl

_BYTE_OFFSET = tl.constexpr(32768.0 + 128.0)


def _int8_asm() -> str:
    """$0 = $6 + dot of the four codes of $1, each raised by 32768 + 128, with $2 .. $5."""
    lines = ["{", ".reg .b32 u, f;", ".reg .f32 s;", "xor.b32 u, $1, 0x80808080;", "mov.f32 s, $6;"]
    for i in range(4):
        lines += [f"prmt.b32 f, u, 0x47000000, 0x74{i}4;", f"fma.rn.f32 s, f, ${2 + i}, s;"]
    return "\n".join([*lines, "mov.f32 $0, s;", "}"])


def _fp8_asm() -> str:
    """$0 = dot of the four E4M3 codes of $1 with $2 .. $5."""
    lines = ["{", ".reg .b16 low, high, a, b, c, d;", ".reg .b32 p, q;", ".reg .f32 f, s;"]
    lines += ["mov.b32 {low, high}, $1;", "cvt.rn.f16x2.e4m3x2 p, low;", "cvt.rn.f16x2.e4m3x2 q, high;"]
    lines += ["mov.b32 {a, b}, p;", "mov.b32 {c, d}, q;", "cvt.f32.f16 f, a;", "mul.rn.f32 s, f, $2;"]
    for i, half in enumerate("bcd"):
        lines += [f"cvt.f32.f16 f, {half};", f"fma.rn.f32 s, f, ${3 + i}, s;"]
    return "\n".join([*lines, "mov.f32 $0, s;", "}"])


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


DIAGONAL = [  # on: this lane has the element of the diagonal; odd: it is the second of the lane's two columns
    ".reg .b32 lane, column, row, bit;",
    ".reg .pred on, odd;",
    "mov.u32 lane, %laneid;",
    "and.b32 column, lane, 3;",
    "shr.u32 row, lane, 3;",
    "setp.eq.u32 on, column, row;",
    "and.b32 bit, lane, 4;",
    "setp.ne.u32 odd, bit, 0;",
]
PRODUCT = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{d0, d1, d2, d3}}, {{{}}}, {{{}, {}}}, {{d0, d1, d2, d3}};"
_HALF_PRODUCT = PRODUCT.replace(".bf16.bf16.", ".f16.f16.")
ZEROS = [f"mov.f32 d{i}, 0f00000000;" for i in range(4)]


def _quad_asm() -> str:
    """Words $8 .. $11 of one tile and $12 .. $15 of another, pairs $16 .. $31 of bf16: sums $0 and $4 of the quad's rows."""
    lines = ["{", ".reg .b32 t, a0, a1, a2, a3;", ".reg .f32 d0, d1, d2, d3;", *ZEROS]
    for word, nibble in itertools.product((0, 2), range(4)):
        for i in range(4):  # a0 and a2 are columns of the first tile's row, a1 and a3 of the second's
            source = f"${8 + 4 * (i % 2) + word + i // 2}"
            if nibble:
                lines.append(f"shr.u32 t, {source}, {4 * nibble};")
                source = "t"
            lines.append(f"lop3.b32 a{i}, {source}, 0x000F000F, 0x43004300, 0xEA;")
        pair = 16 + 4 * nibble + word  # neighbouring registers of one load, so nothing has to be moved
        lines.append(PRODUCT.format("a0, a1, a2, a3", f"${pair}", f"${pair + 1}"))
    lines += [*DIAGONAL, "selp.f32 d0, d1, d0, odd;", "selp.f32 d2, d3, d2, odd;"]
    lines += ["selp.f32 $0, d0, 0f00000000, on;", "selp.f32 $4, d2, 0f00000000, on;"]
    lines += [f"mov.f32 ${i}, 0f00000000;" for i in (1, 2, 3, 5, 6, 7)]
    return "\n".join([*lines, "}"])


def _quad_sum_asm() -> str:
    """$0 = sum of the quad's activations, pairs $4 .. $19 of bf16; $1 .. $3 = 0."""
    lines = ["{", ".reg .b32 one;", ".reg .f32 d0, d1, d2, d3;", "mov.b32 one, 0x3F803F80;", *ZEROS]
    for pair in range(4, 20, 2):
        lines.append(PRODUCT.format("one, one, one, one", f"${pair}", f"${pair + 1}"))
    lines += [*DIAGONAL, "selp.f32 d0, d1, d0, odd;", "selp.f32 $0, d0, 0f00000000, on;"]
    return "\n".join([*lines, *(f"mov.f32 ${i}, 0f00000000;" for i in (1, 2, 3)), "}"])


def _float16_asm(int8: bool) -> str:
    """Pairs of bf16 $16 .. $23, times a power of two, as float16 $0 .. $7; $8: what undoes it on the diagonal, 0 elsewhere.
    int8: $12 is minus the sum of the quad's activations times the offset of codes, on the diagonal."""
    lines = ["{", ".reg .b32 m, t, e, s, low, high, one, nz;", ".reg .f32 d0, d1, d2, d3, back;", *DIAGONAL]
    lines.append("mov.b32 nz, 0x80008000;")
    lines.append("abs.bf16x2 m, $16;")
    for i in range(17, 24):
        lines += [f"abs.bf16x2 t, ${i};", "max.bf16x2 m, m, t;"]
    lines += ["prmt.b32 t, m, m, 0x1032;", "max.bf16x2 m, m, t;"]
    for lane in (1, 2):
        lines += [f"shfl.sync.bfly.b32 t, m, {lane}, 31, -1;", "max.bf16x2 m, m, t;"]
    # The largest is 2^(e - 127) or more. Times 2^(141 - e), whose own exponent has to fit its 8 bits.
    lines += ["shr.u32 e, m, 7;", "and.b32 e, e, 255;", "max.u32 e, e, 15;"]
    lines += ["sub.u32 s, 268, e;", "shl.b32 s, s, 7;", "prmt.b32 s, s, s, 0x1010;"]
    lines += ["sub.u32 e, e, 14;", "shl.b32 e, e, 23;", "selp.b32 e, e, 0, on;", "mov.b32 back, e;"]
    for i in range(8):
        lines.append(f"fma.rn.bf16x2 t, ${16 + i}, s, nz;")  # a product alone needs compute capability 9.0
        lines += ["shl.b32 low, t, 16;", "and.b32 high, t, 0xFFFF0000;"]
        lines.append(f"cvt.rn.f16x2.f32 ${i}, high, low;")
    lines += ["mov.f32 $8, back;", *(f"mov.f32 ${i}, 0f00000000;" for i in (9, 10, 11, 13, 14, 15))]
    if int8:
        lines += ["mov.b32 one, 0x3C003C00;", *ZEROS]
        lines += [_HALF_PRODUCT.format("one, one, one, one", f"${i}", f"${i + 1}") for i in range(0, 8, 2)]
        lines += ["selp.f32 d0, d1, d0, odd;", "mul.rn.f32 d0, d0, back;"]
        lines.append("mul.rn.f32 $12, d0, 0fC4900000;")  # -(1024 + 128)
    else:
        lines.append("mov.f32 $12, 0f00000000;")
    return "\n".join([*lines, "}"])


def _byte_quad_asm(int8: bool) -> str:
    """Words $8 .. $11 of one tile and $12 .. $15 of another, pairs of float16 $16 .. $23: sums $0 and $4 of the quad's rows
    times $24, plus (int8, whose codes count as 1024 + 128 + code) $28."""
    lines = [
        "{",
        ".reg .b16 low, high;",
        ".reg .b32 u, a0, a1, a2, a3;",
        ".reg .f32 d0, d1, d2, d3;",
        *ZEROS,
    ]
    for word in range(4):
        for tile in range(2):  # a0 and a2 are columns of the first tile's row, a1 and a3 of the second's
            source = f"${8 + 4 * tile + word}"
            if int8:
                lines.append(f"xor.b32 u, {source}, 0x80808080;")
                lines.append(f"prmt.b32 a{tile}, u, 0x64646464, 0x4140;")
                lines.append(f"prmt.b32 a{2 + tile}, u, 0x64646464, 0x4342;")
            else:
                lines.append(f"mov.b32 {{low, high}}, {source};")
                lines.append(f"cvt.rn.f16x2.e4m3x2 a{tile}, low;")
                lines.append(f"cvt.rn.f16x2.e4m3x2 a{2 + tile}, high;")
        pair = 16 + 2 * word
        lines.append(_HALF_PRODUCT.format("a0, a1, a2, a3", f"${pair}", f"${pair + 1}"))
    lines += [*DIAGONAL, "selp.f32 d0, d1, d0, odd;", "selp.f32 d2, d3, d2, odd;"]
    for output, d in ((0, "d0"), (4, "d2")):
        lines.append(f"fma.rn.f32 ${output}, {d}, $24, $28;" if int8 else f"mul.rn.f32 ${output}, {d}, $24;")
    lines += [f"mov.f32 ${i}, 0f00000000;" for i in (1, 2, 3, 5, 6, 7)]
    return "\n".join([*lines, "}"])


_INT8 = tl.constexpr(_int8_asm())
_FP8 = tl.constexpr(_fp8_asm())
_FLOAT16 = tl.constexpr(_float16_asm(False))
_FLOAT16_SUM = tl.constexpr(_float16_asm(True))
_FLOAT16_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * 8 + ["=&f"] * 8 + ["r"] * 8))
_FP8_QUAD = tl.constexpr(_byte_quad_asm(False))
_INT8_QUAD = tl.constexpr(_byte_quad_asm(True))
_BYTE_QUAD_CONSTRAINTS = tl.constexpr(",".join(["=&f"] * 8 + ["r"] * 16 + ["f"] * 8))
_INT4 = tl.constexpr(_int4_asm())
_QUAD = tl.constexpr(_quad_asm())
_QUAD_SUM = tl.constexpr(_quad_sum_asm())
_QUAD_CONSTRAINTS = tl.constexpr(",".join(["=&f"] * 8 + ["r"] * 24))
_QUAD_SUM_CONSTRAINTS = tl.constexpr(",".join(["=&f"] * 4 + ["r"] * 16))


@triton.constexpr_function
def per_word(format_name):
    """Weights a word."""
    return {"int4": 8, "mxfp4": 8, "bf16": 2}.get(format_name, 4)


@triton.jit
def low(pair):
    """float32 of the lower bf16 of an int32."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def high(pair):
    return (pair & -65536).to(tl.float32, bitcast=True)


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
def _dot(words, x, offset, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """Float32 like words: the dot product of each word's codes; offset: of int8, see `prepared`."""
    if FORMAT == "bf16":
        return tl.fma(low(words), x[0], high(words) * x[1])
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
    """Dot products of two tiles of words with the same x (from `prepared`): float32 a word, or with FOURS a float32 for four
    words, of which only the sum over the four lanes of a quad means something (bf16: a word). int4 codes count as
    128 + code."""
    if FOURS and FORMAT != "bf16":
        if FORMAT == "int4":
            dot_a, dot_b = tl.inline_asm_elementwise(
                _QUAD, _QUAD_CONSTRAINTS, [a, b, x[0], x[1], x[2], x[3]], (tl.float32, tl.float32), True, 4
            )
        elif FORMAT == "int8":
            dot_a, dot_b = tl.inline_asm_elementwise(
                _INT8_QUAD,
                _BYTE_QUAD_CONSTRAINTS,
                [a, b, x[0], x[1], x[2], x[3]],
                (tl.float32, tl.float32),
                True,
                4,
            )
        else:
            dot_a, dot_b = tl.inline_asm_elementwise(
                _FP8_QUAD,
                _BYTE_QUAD_CONSTRAINTS,
                [a, b, x[0], x[1], x[2], x[3]],
                (tl.float32, tl.float32),
                True,
                4,
            )
        return first_of_four(dot_a), first_of_four(dot_b)
    else:
        return _dot(a, x, offset, FORMAT, ASM), _dot(b, x, offset, FORMAT, ASM)


@triton.jit
def first_of_four(tile):
    """Every fourth column of [experts, rows, words]: of four neighbours, which one thread holds, the others are zero."""
    quads = tile.reshape(tile.shape[0], tile.shape[1], tile.shape[2] // 4, 2, 2)
    return tl.split(tl.split(quads)[0])[0]


@triton.jit
def prepared(x, FORMAT: tl.constexpr, FOURS: tl.constexpr, ASM: tl.constexpr):
    """x as `dot_two` takes it, and what must come off a word's dot product for its codes' offset. int4: the sum of its x, to be
    multiplied with the offset. int8: minus offset times sum, where the dot product starts. 0 where there is no offset, or it
    is part of x."""
    if FOURS and FORMAT == "int4":
        sums = tl.inline_asm_elementwise(
            _QUAD_SUM, _QUAD_SUM_CONSTRAINTS, [x[0], x[1], x[2], x[3]], tl.float32, True, 4
        )
        return x, first_of_four(sums)
    elif FORMAT == "int4":
        return x, ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]))
    elif FOURS and FORMAT != "bf16":
        if FORMAT == "int8":
            ready = tl.inline_asm_elementwise(
                _FLOAT16_SUM, _FLOAT16_CONSTRAINTS, [x[0], x[1]], (tl.int32, tl.int32, tl.float32, tl.float32), True, 4
            )  # fmt: skip
        else:
            ready = tl.inline_asm_elementwise(
                _FLOAT16, _FLOAT16_CONSTRAINTS, [x[0], x[1]], (tl.int32, tl.int32, tl.float32, tl.float32), True, 4
            )  # fmt: skip
        return ready, 0.0
    elif (FORMAT == "int8") and ASM:
        return x, ((x[0] + x[1]) + (x[2] + x[3])) * -_BYTE_OFFSET
    else:
        return x, 0.0


@triton.jit
def by_group(tile, GROUPS: tl.constexpr):
    """[experts, rows, words] summed by group: [experts, rows, GROUPS]."""
    WORDS: tl.constexpr = tile.shape[2] // GROUPS
    return tl.sum(tile.reshape(tile.shape[0], tile.shape[1], GROUPS, WORDS), 3)
