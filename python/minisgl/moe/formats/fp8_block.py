"""fp8_block: E4M3 with one float32 scale a block of 128 x 128, as published FP8 checkpoints have it.

value[n, k] = code[n, k] * scale[n // 128, k // 128]. Blocks at the edge are smaller where 128 doesn't divide
N or K.
gate and up have their own rows of blocks, as they do on disk: the scales of gate_up are [2 * ceil(F / 128),
ceil(D / 128)], and row n of up (row F + n of gate_up) uses scale row ceil(F / 128) + n // 128, also where F %
128 != 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from minisgl.moe.formats.base import ExpertFormat, PartSpec, require_finite, scale_for
from minisgl.moe.formats.fp8 import E4M3_MAX

BLOCK = 128


def num_blocks(size: int) -> int:
    return -(-size // BLOCK)


class Fp8BlockFormat(ExpertFormat):
    name = "fp8_block"
    tolerance = 6e-2
    group_size = BLOCK

    def weight_parts(self, num_rows: int, num_cols: int) -> list[PartSpec]:
        return [
            ("", (num_rows, num_cols), torch.float8_e4m3fn),
            ("_scale", (num_blocks(num_rows), num_blocks(num_cols)), torch.float32),
        ]

    def quantize(self, name: str, weight_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        if name != "gate_up":
            return _quantize(name, weight_NK)
        halves = [_quantize(name, half) for half in weight_NK.chunk(2, dim=-2)]
        return {part: torch.cat([half[part] for half in halves], dim=-2) for part in halves[0]}

    def dequantize(self, name: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        codes_NK, scale = parts[name].float(), parts[f"{name}_scale"]
        if name != "gate_up":
            return codes_NK * _expand(scale, codes_NK.shape)
        halves = zip(codes_NK.chunk(2, dim=-2), scale.chunk(2, dim=-2), strict=True)
        return torch.cat([codes * _expand(half, codes.shape) for codes, half in halves], dim=-2)


def _quantize(name: str, weight_NK: torch.Tensor) -> dict[str, torch.Tensor]:
    weight_NK = weight_NK.float()
    amax = _block_amax(weight_NK)
    require_finite(name, amax)
    scale = scale_for(amax, E4M3_MAX)
    codes_NK = (weight_NK / _expand(scale, weight_NK.shape)).clamp(-E4M3_MAX, E4M3_MAX)
    return {name: codes_NK.to(torch.float8_e4m3fn), f"{name}_scale": scale}


def _block_amax(weight_NK: torch.Tensor) -> torch.Tensor:
    num_rows, num_cols = weight_NK.shape[-2:]
    padded = F.pad(weight_NK, (0, -num_cols % BLOCK, 0, -num_rows % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., N/128, 128, K/128, 128]
    return blocks.abs().amax(dim=(-3, -1))


def _expand(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """One scale a weight: [..., N, K]."""
    by_row = scale.repeat_interleave(BLOCK, dim=-2)[..., : shape[-2], :]
    return by_row.repeat_interleave(BLOCK, dim=-1)[..., : shape[-1]]
