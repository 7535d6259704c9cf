"""Dot products of mxfp4 weights with one row, on 32-bit words of eight E2M1 codes: what `words` does for other formats.

A thread's four words are 32 neighbouring weights: one block, one scale. A product adds up over the four lanes of a quad, which
have four blocks, so scales go on weights. E2M1 bits are moved to where bf16 has its sign, the exponent's last two bits and the
mantissa's first, which makes them 2^-126 times what they mean; multiplied by 2^126 and then by their scale (together they can
pass the exponents of bf16) they are exact. 20 instructions for eight weights, where int4 takes 7.
"""

import itertools

import triton
import triton.language as tl

from minisgl.moe.formats.mxfp4 import MAGNITUDE_AT, SIGN_AT
from minisgl.moe.kernels.tiles import e2m1, e2m1_asm
from minisgl.moe.kernels.words import DIAGONAL, PRODUCT, ZEROS, first_of_four


def _quad_asm() -> str:
    """Words $8 .. $11 of one tile and $12 .. $15 of another, pairs $16 .. $31 of bf16, scales (twice, bf16) in $32 and $36:
    sums $0 and $4 of the quad's rows."""
    lines = ["{", ".reg .b32 s, m, lift, nz, a0, a1, a2, a3;", ".reg .f32 d0, d1, d2, d3;", *ZEROS]
    lines += ["mov.b32 lift, 0x7E807E80;", "mov.b32 nz, 0x80008000;"]
    for word, nibble in itertools.product((0, 2), range(4)):
        for i in range(4):  # a0 and a2 are columns of the first tile's row, a1 and a3 of the second's
            source = f"${8 + 4 * (i % 2) + word + i // 2}"
            lines += e2m1_asm(f"a{i}", source, nibble)
            # As a sum: products alone need compute capability 9.0.
            lines += [f"fma.rn.bf16x2 a{i}, a{i}, {factor}, nz;" for factor in ("lift", f"${32 + i % 2 * 4}")]
        pair = 16 + 4 * nibble + word
        lines.append(PRODUCT.format("a0, a1, a2, a3", f"${pair}", f"${pair + 1}"))
    lines += [*DIAGONAL, "selp.f32 d0, d1, d0, odd;", "selp.f32 d2, d3, d2, odd;"]
    lines += ["selp.f32 $0, d0, 0f00000000, on;", "selp.f32 $4, d2, 0f00000000, on;"]
    lines += [f"mov.f32 ${i}, 0f00000000;" for i in (1, 2, 3, 5, 6, 7)]
    return "\n".join([*lines, "}"])


_MAGNITUDE_AT, _SIGN_AT = tl.constexpr(MAGNITUDE_AT), tl.constexpr(SIGN_AT)
_QUAD = tl.constexpr(_quad_asm())
_CONSTRAINTS = tl.constexpr(",".join(["=&f"] * 8 + ["r"] * 32))


@triton.jit
def _pair_of_scales(exponent):
    """uint8, biased by 127, 255 is NaN -> the bf16 2^(exponent - 127) twice in an int32. (2^-127, below what bf16 holds exactly
    without a mantissa, counts as zero.)"""
    bits = tl.where(exponent == 255, 0x7FC0, exponent.to(tl.int32) << 7)
    return bits | bits << 16


@triton.jit
def _by_word(tile, words):
    """[experts, rows, blocks] like `words`, each for its four words."""
    fours = tl.broadcast_to(tile[:, :, :, None], tile.shape[0], tile.shape[1], tile.shape[2], 4)
    return tl.broadcast_to(fours.reshape(tile.shape[0], tile.shape[1], words.shape[2]), words.shape)


@triton.jit
def _dot(words, scale, x):
    """Float32 like words, by ordinary arithmetic."""
    total = tl.zeros(words.shape, tl.float32)
    for i in tl.static_range(8):
        half = words >> 16 * (i % 2)
        total += e2m1(half, _MAGNITUDE_AT[i // 2], _SIGN_AT[i // 2]) * x[i]
    exponent = _by_word(scale, words)
    factor = tl.exp2(exponent.to(tl.float32) - 127.0)
    return total * tl.where(exponent == 255, float("nan"), factor)


@triton.jit
def dot_two_mxfp4(a, b, scale_a, scale_b, x, FOURS: tl.constexpr):
    """Dot products of two tiles of words, with scales uint8 [experts, rows, blocks], with the same x (from `words.load_x`): a
    float32 a word, or with FOURS a float32 for four words, of which only the sum over the four lanes of a quad means
    something."""
    if FOURS:
        scales_a, scales_b = _by_word(_pair_of_scales(scale_a), a), _by_word(_pair_of_scales(scale_b), b)
        dot_a, dot_b = tl.inline_asm_elementwise(
            _QUAD, _CONSTRAINTS, [a, b, x[0], x[1], x[2], x[3], scales_a, scales_b], (tl.float32, tl.float32), True, 4
        )  # fmt: skip
        return first_of_four(dot_a), first_of_four(dot_b)
    else:
        return _dot(a, scale_a, x), _dot(b, scale_b, x)
