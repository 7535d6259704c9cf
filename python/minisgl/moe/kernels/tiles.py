"""How a tile of stored weights becomes a tile of numbers: one branch a format, shared by the grouped kernels.

A tile is BLOCK_N rows of weights and BLOCK_K columns. Formats of four bits give two tiles of BLOCK_K / 2
columns, one from the low and one from the high nibbles (order: `formats.packing`), each multiplied with its
own columns of the activations; so nothing has to be interleaved.

Conversion is where weight-only formats lose their time: an int-to-float instruction a weight is slower than
reading the weight. On CUDA and bf16 the codes are therefore put into the mantissa of a constant: 0x4300 is
128.0 in bf16, whose last mantissa bit is worth one, so `0x4300 | code` is 128 + code, two weights an
instruction. ASM selects that; the plain path is for the interpreter and other dtypes.
"""

import triton
import triton.language as tl

# Four bytes -> four low and four high nibbles: spread to halfwords, or into 128.0, add -(128 + zero), times scale.
_INT4_ASM = tl.constexpr("""{
.reg .b32 a, b, one, nz;
mov.b32 one, 0x3F803F80;
mov.b32 nz, 0x80008000;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
lop3.b32 $0, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $1, b, 0x000F000F, 0x43004300, 0xEA;
shr.u32 a, a, 4;
shr.u32 b, b, 4;
lop3.b32 $2, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $3, b, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, $0, one, $7;
fma.rn.bf16x2 $1, $1, one, $7;
fma.rn.bf16x2 $2, $2, one, $7;
fma.rn.bf16x2 $3, $3, one, $7;
fma.rn.bf16x2 $0, $0, $5, nz;
fma.rn.bf16x2 $1, $1, $5, nz;
fma.rn.bf16x2 $2, $2, $5, nz;
fma.rn.bf16x2 $3, $3, $5, nz;
}""")

# E2M1 bits moved to where bf16 has its sign, two lowest exponent bits and highest mantissa bit; 2^126 (0x7E80) makes up
# for the different exponent bias, subnormals included.
_MXFP4_ASM = tl.constexpr("""{
.reg .b32 a, b, s, m, nz, lift;
mov.b32 nz, 0x80008000;
mov.b32 lift, 0x7E807E80;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shl.b32 s, a, 12;
shl.b32 m, a, 6;
and.b32 m, m, 0x01C001C0;
lop3.b32 $0, s, 0x80008000, m, 0xEA;
shl.b32 s, b, 12;
shl.b32 m, b, 6;
and.b32 m, m, 0x01C001C0;
lop3.b32 $1, s, 0x80008000, m, 0xEA;
shl.b32 s, a, 8;
shl.b32 m, a, 2;
and.b32 m, m, 0x01C001C0;
lop3.b32 $2, s, 0x80008000, m, 0xEA;
shl.b32 s, b, 8;
shl.b32 m, b, 2;
and.b32 m, m, 0x01C001C0;
lop3.b32 $3, s, 0x80008000, m, 0xEA;
fma.rn.bf16x2 $0, $0, lift, nz;
fma.rn.bf16x2 $1, $1, lift, nz;
fma.rn.bf16x2 $2, $2, lift, nz;
fma.rn.bf16x2 $3, $3, lift, nz;
fma.rn.bf16x2 $0, $0, $5, nz;
fma.rn.bf16x2 $1, $1, $5, nz;
fma.rn.bf16x2 $2, $2, $5, nz;
fma.rn.bf16x2 $3, $3, $5, nz;
}""")

# Eight bits don't fit the seven of bf16's mantissa: (128 + low seven bits) - (128 or 256, by the sign bit) is exact.
_INT8_ASM = tl.constexpr("""{
.reg .b32 a, b, s, t, minus;
mov.b32 minus, 0xBF80BF80;
prmt.b32 a, $2, 0, 0x4140;
prmt.b32 b, $2, 0, 0x4342;
lop3.b32 s, a, 0x00800080, 0x43004300, 0xEA;
lop3.b32 t, b, 0x00800080, 0x43004300, 0xEA;
lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 b, b, 0x007F007F, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, s, minus, a;
fma.rn.bf16x2 $1, t, minus, b;
}""")


@triton.jit
def widen_int8(codes, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """int8 codes as DTYPE, exact."""
    if ASM:
        return tl.inline_asm_elementwise(
            _INT8_ASM, "=&r,=&r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        return codes.to(DTYPE)


@triton.jit
def e2m1_value(codes):
    """float32 of E2M1 codes 0..15 (sign, two exponent bits, one mantissa bit)."""
    magnitude = codes & 7
    exponent, mantissa = magnitude >> 1, magnitude & 1
    small = mantissa.to(tl.float32) * 0.5
    large = (2 + mantissa).to(tl.float32) * (1 << exponent).to(tl.float32) * 0.25
    value = tl.where(exponent == 0, small, large)
    return tl.where(codes >= 8, -value, value)


@triton.jit
def unpack_int4(packed, scale, zero, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """(code - zero) * scale of the low and of the high nibbles; scale and zero float32, broadcastable to packed."""
    if ASM:
        scale = tl.broadcast_to(scale.to(tl.bfloat16), packed.shape)
        offset = tl.broadcast_to((-128.0 - zero).to(tl.bfloat16), packed.shape)
        return tl.inline_asm_elementwise(
            _INT4_ASM,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [packed, scale, offset],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low = ((packed & 15).to(tl.float32) - zero) * scale
        high = ((packed >> 4).to(tl.float32) - zero) * scale
        return low.to(DTYPE), high.to(DTYPE)


@triton.jit
def unpack_mxfp4(packed, exponent, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """E2M1 values times 2 ** (exponent - 127) of the low and of the high nibbles; exponent uint8, broadcastable."""
    if ASM:
        bits = tl.where(
            exponent == 0, 0x40, exponent.to(tl.int16) << 7
        )  # 2^-127 is subnormal; 255 is inf, times 0 NaN
        scale = tl.broadcast_to(bits.to(tl.int16).to(tl.bfloat16, bitcast=True), packed.shape)
        return tl.inline_asm_elementwise(
            _MXFP4_ASM,
            "=&r,=&r,=&r,=&r,r,r,r",
            [packed, scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        scale = tl.exp2(exponent.to(tl.float32) - 127.0)
        low = e2m1_value((packed & 15).to(tl.int32)) * scale
        high = e2m1_value((packed >> 4).to(tl.int32)) * scale
        return low.to(DTYPE), high.to(DTYPE)
