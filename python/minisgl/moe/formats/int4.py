"""int4: four-bit codes 0..15, one float32 scale a group of 128, 64 or 32 weights along K, weight-only.

symmetric:   value = (code - 8) * scale
asymmetric:  value = (code - zero) * scale, with `name_zero` uint8 [N, K / group], as AWQ and GPTQ checkpoints
have it Codes are packed two a byte, in the order of `formats.packing`; scales are [N, K / group].

Symmetric scales carry a sign: the weight of largest magnitude in a group becomes code 0 (-8 * scale), so all
sixteen codes are used. Dividing by 7 instead leaves one code idle and makes the error about 8/7 as large.
Scales are float32, not half: weights may be as small as 1e-6, and 2.51 against 2.43 MB an expert of
Qwen3-30B-A3B is what it costs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from minisgl.moe.base import ExpertShape
from minisgl.moe.formats.base import ANY_SHAPE, ExpertFormat, PartSpec, require_finite, scale_for
from minisgl.moe.formats.packing import pack_nibbles, unpack_nibbles

GROUP_SIZES = (128, 64, 32)
SYMMETRIC_ZERO = 8


class Int4Format(ExpertFormat):
    name = "int4"
    tolerance = 6e-3

    def __init__(self, group_size: int = 128, symmetric: bool = True) -> None:
        if group_size not in GROUP_SIZES:
            raise ValueError(f"int4 group size must be 128, 64 or 32, not {group_size}")
        self.group_size, self.symmetric = group_size, symmetric

    def check(self, shape: ExpertShape) -> str | None:
        for letter, size in (("D", shape.model_dim), ("F", shape.hidden_dim)):
            if size % self.group_size:
                reason = f"int4 needs {letter}={size} to be a multiple of its group size {self.group_size}"
                return f"{reason}: {_nearest(shape)}"
        return None

    def weight_parts(self, num_rows: int, num_cols: int) -> list[PartSpec]:
        groups = (num_rows, num_cols // self.group_size)
        parts = [("", (num_rows, num_cols // 2), torch.uint8), ("_scale", groups, torch.float32)]
        return parts if self.symmetric else [*parts, ("_zero", groups, torch.uint8)]

    def quantize(self, name: str, weight_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        groups = weight_NK.float().unflatten(-1, (-1, self.group_size))  # [..., N, K/group, group]
        codes, scale, zero = _symmetric(name, groups) if self.symmetric else _asymmetric(name, groups)
        parts = {name: pack_nibbles(codes.flatten(-2)), f"{name}_scale": scale}
        return parts if zero is None else {**parts, f"{name}_zero": zero}

    def dequantize(self, name: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        scale, zero = parts[f"{name}_scale"], parts.get(f"{name}_zero")
        codes = unpack_nibbles(parts[name]).float()
        groups = codes.unflatten(-1, (scale.shape[-1], -1))
        groups = groups - (SYMMETRIC_ZERO if zero is None else zero.float()[..., None])
        return (groups * scale[..., None]).flatten(-2)


def _nearest(shape: ExpertShape) -> str:
    for group_size in GROUP_SIZES:
        if shape.model_dim % group_size == 0 and shape.hidden_dim % group_size == 0:
            return f"group size {group_size} works"
    return ANY_SHAPE


def _symmetric(name: str, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    largest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True)).squeeze(-1)
    require_finite(name, largest)
    scale = torch.where(largest > 0, -1.0, 1.0) * scale_for(largest.abs(), 8.0)
    codes = (groups / scale[..., None]).round() + SYMMETRIC_ZERO
    return codes.clamp(0, 15).to(torch.uint8), scale, None


def _asymmetric(name: str, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    low, high = groups.amin(dim=-1).clamp(max=0.0), groups.amax(dim=-1).clamp(min=0.0)
    require_finite(name, high - low)
    scale = scale_for(high - low, 15.0)
    zero = (-low / scale).round().clamp(0, 15)
    codes = (groups / scale[..., None]).round() + zero[..., None]
    return codes.clamp(0, 15).to(torch.uint8), scale, zero.to(torch.uint8)
