"""mxfp4: E2M1 values in blocks of 32 along K that share a power-of-two scale (E8M0), as gpt-oss has it.
Weight-only.

value = TABLE[code] * 2 ** (scale - 127). Codes are packed four a 16-bit word, see below (a checkpoint's own order
differs and is translated while it loads); scales are uint8 [N, K / 32], 255 means NaN.
Encoding follows the OCP Microscaling specification 1.0: exponent floor(log2(largest magnitude)) - 2, round to
nearest even, saturate at 6.

Which values a word holds is as in `formats.packing`: value 8 i + j of 32 is number i of word j. Their bits are where
kernels want them. A code has a sign and three bits that are the end of bf16's exponent and the beginning of its
mantissa: bits 15 and 8 .. 6 of a bf16. Number 0 lies there, number 2 six bits lower, and of the other two the
three bits are together and the sign is where they left room, so that four numbers take 6 masks and 5 shifts, not
8 and 7.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from minisgl.moe.base import ExpertShape
from minisgl.moe.formats.base import ANY_SHAPE, ExpertFormat, PartSpec, require_finite
from minisgl.moe.formats.packing import pack_nibbles, unpack_nibbles

BLOCK = 32
SCALE_BIAS = 127
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TABLE = (*MAGNITUDES, *(-value for value in MAGNITUDES))
MAGNITUDE_AT = (6, 3, 0, 10)  # the first bit of number i of a word; two more follow
SIGN_AT = (15, 13, 9, 14)
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


class Mxfp4Format(ExpertFormat):
    name = "mxfp4"
    tolerance = 6e-3
    group_size = BLOCK

    def check(self, shape: ExpertShape) -> str | None:
        for letter, size in (("D", shape.model_dim), ("F", shape.hidden_dim)):
            if size % BLOCK:
                return f"mxfp4 needs {letter}={size} to be a multiple of {BLOCK}: {ANY_SHAPE}"
        return None

    def weight_parts(self, num_rows: int, num_cols: int) -> list[PartSpec]:
        return [
            ("", (num_rows, num_cols // 2), torch.uint8),
            ("_scale", (num_rows, num_cols // BLOCK), torch.uint8),
        ]

    def quantize(self, name: str, weight_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        blocks = weight_NK.float().unflatten(-1, (-1, BLOCK))
        amax = blocks.abs().amax(dim=-1)
        require_finite(name, amax)
        # frexp has its mantissa in [0.5, 1), so floor(log2) is one less; 2 is the exponent of the codes 4 and 6
        exponent = torch.frexp(amax).exponent - 1 - 2
        exponent = exponent.where(amax > 0, 0).clamp(-SCALE_BIAS, SCALE_BIAS)
        codes = _encode(blocks * _power_of_two(-exponent)[..., None]).flatten(-2)
        scale = (exponent + SCALE_BIAS).to(torch.uint8)
        return {name: pack_codes(codes), f"{name}_scale": scale}

    def dequantize(self, name: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        scale = parts[f"{name}_scale"].int()
        table = torch.tensor(TABLE, dtype=torch.float32, device=scale.device)
        values = table[unpack_codes(parts[name]).int()].unflatten(-1, (scale.shape[-1], BLOCK))
        values = values * _power_of_two(scale - SCALE_BIAS)[..., None]
        return values.masked_fill((scale == 255)[..., None], torch.nan).flatten(-2)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes uint8 [..., N, K] (each 0..15) into uint8 [..., N, K / 2]. ValueError as in `formats.packing`."""
    words = pack_nibbles(codes).view(torch.int16)
    packed = torch.zeros_like(words)
    for number, (magnitude, sign) in enumerate(zip(MAGNITUDE_AT, SIGN_AT, strict=True)):
        packed |= (words >> 4 * number & 7) << magnitude | (words >> 4 * number + 3 & 1) << sign
    return packed.view(torch.uint8)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """The codes uint8 [..., N, K] of packed uint8 [..., N, K / 2]; inverse of `pack_codes`."""
    words = packed.contiguous().view(torch.int16)
    nibbles = torch.zeros_like(words)
    for number, (magnitude, sign) in enumerate(zip(MAGNITUDE_AT, SIGN_AT, strict=True)):
        nibbles |= (words >> magnitude & 7) << 4 * number | (words >> sign & 1) << 4 * number + 3
    return unpack_nibbles(nibbles.view(torch.uint8))


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


def _encode(x: torch.Tensor) -> torch.Tensor:
    """Nearest code of E2M1, ties to the even code, the sign in bit 3. (torch.bucketize takes four times as long.)"""
    magnitude, codes = x.abs(), torch.zeros_like(x, dtype=torch.uint8)
    for code, midpoint in enumerate(_MIDPOINTS):  # between code and code + 1
        codes += magnitude > midpoint if code % 2 == 0 else magnitude >= midpoint
    negative = x.signbit() & (codes > 0)
    return codes | (negative.to(torch.uint8) << 3)
