"""How stored weights become numbers: 16-bit words that hold four 4-bit or two 8-bit codes, unpacked in registers.

A tile of weights is read as a tile of words. Each word gives P numbers (four for int4 and mxfp4, two for
int8), so a tile of words becomes P tiles of numbers, and each is multiplied with the columns of the
activations that belong to it. Nothing is interleaved, and since words are as wide as bf16 a tile of them
takes the path of a bf16 tile through shared memory into the tensor cores' registers.

Conversion is where weight-only formats lose their time: an int-to-float instruction a weight takes longer
than reading the weight. On CUDA and bf16 the codes are therefore put into the mantissa of a constant: 0x4300
is 128.0 in bf16, whose last mantissa bit is worth one, so `0x4300 | code` is 128 + code, two weights an
instruction. ASM selects that; the plain path serves the interpreter and other dtypes.
"""

import triton
import triton.language as tl

from minisgl.moe.formats.mxfp4 import MAGNITUDE_AT, SIGN_AT

_MAGNITUDE_AT, _SIGN_AT = tl.constexpr(MAGNITUDE_AT), tl.constexpr(SIGN_AT)
MXFP4_LIFT = tl.constexpr(9.223372036854775808e18)  # 2^63, see `mxfp4_scale`
# Of stores: what is read again soon stays in the L2 while weights, see `load_once`, pass through it.
KEPT = tl.constexpr("evict_last")


def _int4_asm(scaled: bool, has_zero: bool) -> str:
    """$4: two words. Then $5: two scales, and -(128 + zero) twice, as far as they are inputs."""
    offset = "o" if not has_zero else ("$6" if scaled else "$5")
    lines = ["{", ".reg .b32 t, one, o, nz;", "mov.b32 one, 0x3F803F80;", "mov.b32 nz, 0x80008000;"]
    lines.append("mov.b32 o, 0xC308C308;")  # -136
    for i in range(4):
        source = "$4" if i == 0 else "t"
        if i:
            lines.append(f"shr.u32 t, $4, {4 * i};")
        lines.append(f"lop3.b32 ${i}, {source}, 0x000F000F, 0x43004300, 0xEA;")
    lines += [f"fma.rn.bf16x2 ${i}, ${i}, one, {offset};" for i in range(4)]
    if scaled:
        lines += [f"fma.rn.bf16x2 ${i}, ${i}, $5, nz;" for i in range(4)]
    return "\n".join([*lines, "}"])


def _int4_raw_asm() -> str:
    """$4: two words; 128 + code, without the subtraction."""
    lines = ["{", ".reg .b32 t;"]
    for i in range(4):
        if i:
            lines.append(f"shr.u32 t, $4, {4 * i};")
        lines.append(f"lop3.b32 ${i}, {'t' if i else '$4'}, 0x000F000F, 0x43004300, 0xEA;")
    return "\n".join([*lines, "}"])


def e2m1_asm(out: str, source: str, number: int) -> list[str]:
    """Code `number` of each of two words in `source` to `out`: its bits where bf16 has sign, the exponent's last two bits and
    the mantissa's first, which is 2^-126 times what they mean. Changes registers s and m."""
    magnitude, sign = 6 - MAGNITUDE_AT[number], 15 - SIGN_AT[number]
    moved = f"shl.b32 m, {source}, {magnitude};" if magnitude >= 0 else f"shr.u32 m, {source}, {-magnitude};"
    if magnitude == sign:
        return [moved, f"and.b32 {out}, m, 0x81C081C0;"]
    return [
        moved,
        "and.b32 m, m, 0x01C001C0;",
        f"shl.b32 s, {source}, {sign};",
        f"lop3.b32 {out}, s, 0x80008000, m, 0xEA;",
    ]


def _mxfp4_asm() -> str:
    """$4: two words, $5: two scales."""
    lines = ["{", ".reg .b32 s, m, nz;", "mov.b32 nz, 0x80008000;"]
    for i in range(4):
        lines += e2m1_asm(f"${i}", "$4", i)
    lines += [f"fma.rn.bf16x2 ${i}, ${i}, $5, nz;" for i in range(4)]
    return "\n".join([*lines, "}"])


# Eight bits don't fit the seven of bf16's mantissa: (128 + low seven bits) - (128 or 256, by the sign bit) is exact.
_INT8_ASM = tl.constexpr("""{
.reg .b32 t, s, m, minus;
mov.b32 minus, 0xBF80BF80;
shr.u32 t, $2, 8;
lop3.b32 s, $2, 0x00800080, 0x43004300, 0xEA;
lop3.b32 m, $2, 0x007F007F, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, s, minus, m;
lop3.b32 s, t, 0x00800080, 0x43004300, 0xEA;
lop3.b32 m, t, 0x007F007F, 0x43004300, 0xEA;
fma.rn.bf16x2 $1, s, minus, m;
}""")
_INT4_PLAIN = tl.constexpr(_int4_asm(False, False))
_INT4_ZERO = tl.constexpr(_int4_asm(False, True))
_INT4_SCALED = tl.constexpr(_int4_asm(True, False))
_INT4_SCALED_ZERO = tl.constexpr(_int4_asm(True, True))
_INT4_RAW = tl.constexpr(_int4_raw_asm())
_MXFP4_ASM = tl.constexpr(_mxfp4_asm())


@triton.jit
def unpack_int8(words, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The even and the odd columns of int16 words that hold two int8 codes, exact."""
    if ASM:
        even, odd = tl.inline_asm_elementwise(
            _INT8_ASM, "=&r,=&r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        wide = words.to(tl.int32)
        even, odd = ((wide << 24) >> 24).to(DTYPE), (wide >> 8).to(DTYPE)
    return even, odd


@triton.jit
def unpack_int4(
    words, scale, zero, SCALED: tl.constexpr, HAS_ZERO: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """The four tiles (code - zero) * scale of int16 words; scale (if SCALED) and zero (if HAS_ZERO, else 8) are float32
    and broadcastable to words."""
    if ASM:
        if SCALED:
            scale = tl.broadcast_to(scale.to(tl.bfloat16), words.shape)
        if HAS_ZERO:
            zero = tl.broadcast_to((-128.0 - zero).to(tl.bfloat16), words.shape)
        if SCALED and HAS_ZERO:
            a, b, c, d = tl.inline_asm_elementwise(
                _INT4_SCALED_ZERO, "=&r,=&r,=&r,=&r,r,r,r", [words, scale, zero],
                (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2,
            )  # fmt: skip
        elif SCALED:
            a, b, c, d = tl.inline_asm_elementwise(
                _INT4_SCALED, "=&r,=&r,=&r,=&r,r,r", [words, scale],
                (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2,
            )  # fmt: skip
        elif HAS_ZERO:
            a, b, c, d = tl.inline_asm_elementwise(
                _INT4_ZERO, "=&r,=&r,=&r,=&r,r,r", [words, zero],
                (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2,
            )  # fmt: skip
        else:
            a, b, c, d = tl.inline_asm_elementwise(
                _INT4_PLAIN, "=&r,=&r,=&r,=&r,r", [words],
                (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2,
            )  # fmt: skip
    else:
        wide = words.to(tl.int32)
        offset = zero if HAS_ZERO else 8.0
        factor = scale if SCALED else 1.0
        a = (((wide & 15).to(tl.float32) - offset) * factor).to(DTYPE)
        b = (((wide >> 4 & 15).to(tl.float32) - offset) * factor).to(DTYPE)
        c = (((wide >> 8 & 15).to(tl.float32) - offset) * factor).to(DTYPE)
        d = (((wide >> 12 & 15).to(tl.float32) - offset) * factor).to(DTYPE)
    return a, b, c, d


@triton.jit
def raw_int4(words, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The four tiles of codes of int16 words, each 128 too large where ASM: two instructions a pair of weights."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            _INT4_RAW,
            "=&r,=&r,=&r,=&r,r",
            [words],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            True,
            2,
        )
    else:
        wide = words.to(tl.int32)
        a, b, c, d = (
            (wide & 15).to(DTYPE),
            (wide >> 4 & 15).to(DTYPE),
            (wide >> 8 & 15).to(DTYPE),
            (wide >> 12 & 15).to(DTYPE),
        )
    return a, b, c, d


@triton.jit
def mxfp4_scale(exponent, ASM: tl.constexpr):
    """What E2M1 bits of `unpack_mxfp4` are multiplied with; exponent uint8 is biased by 127, 255 is NaN.

    Bits of a bf16 whose exponent is too small by 126 would want a factor of 2^(exponent - 1), which overflows
    for blocks of large weights. So the factor is 2^(exponent - 64), and the sums are multiplied with
    MXFP4_LIFT, 2^63, at the end; the plain path needs neither.
    """
    if ASM:
        bits = tl.where(exponent == 255, 0x7FC0, (exponent.to(tl.int32) + 63) << 7)
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        scale = tl.exp2(exponent.to(tl.float32) - 127.0)
        return tl.where(exponent == 255, float("nan"), scale)


@triton.jit
def e2m1(words, magnitude_at, sign_at):
    """float32 of E2M1 codes (two exponent bits, one mantissa bit, and a sign) whose bits begin there in int32 words."""
    magnitude = words >> magnitude_at & 7
    exponent, mantissa = magnitude >> 1, magnitude & 1
    small = mantissa.to(tl.float32) * 0.5
    large = (2 + mantissa).to(tl.float32) * (1 << exponent).to(tl.float32) * 0.25
    value = tl.where(exponent == 0, small, large)
    return tl.where((words >> sign_at & 1) != 0, -value, value)


@triton.jit
def unpack_mxfp4(words, scale, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The four tiles of E2M1 values times scale (from `mxfp4_scale`, broadcastable) of int16 words."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            _MXFP4_ASM,
            "=&r,=&r,=&r,=&r,r,r",
            [words, tl.broadcast_to(scale, words.shape)],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            True,
            2,
        )
    else:
        wide = words.to(tl.int32)
        a = (e2m1(wide, _MAGNITUDE_AT[0], _SIGN_AT[0]) * scale).to(DTYPE)
        b = (e2m1(wide, _MAGNITUDE_AT[1], _SIGN_AT[1]) * scale).to(DTYPE)
        c = (e2m1(wide, _MAGNITUDE_AT[2], _SIGN_AT[2]) * scale).to(DTYPE)
        d = (e2m1(wide, _MAGNITUDE_AT[3], _SIGN_AT[3]) * scale).to(DTYPE)
    return a, b, c, d


@triton.jit
def load_once(pointers, inside, EVEN: tl.constexpr):
    """Weights that one program reads once: they don't push out of the L1 what many programs read. EVEN: all are inside."""
    if EVEN:
        return tl.load(pointers, eviction_policy="evict_first")
    else:
        return tl.load(pointers, mask=inside, other=0, eviction_policy="evict_first")
