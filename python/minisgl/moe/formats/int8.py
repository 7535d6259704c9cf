"""int8: symmetric, one float32 scale an output channel, weight-only. value = code * scale, codes
-127..127."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from minisgl.moe.formats.base import ExpertFormat, PartSpec, require_finite, scale_for


class Int8Format(ExpertFormat):
    name = "int8"
    tolerance = 6e-3

    def weight_parts(self, num_rows: int, num_cols: int) -> list[PartSpec]:
        return [("", (num_rows, num_cols), torch.int8), ("_scale", (num_rows,), torch.float32)]

    def quantize(self, name: str, weight_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        weight_NK = weight_NK.float()
        amax_N = weight_NK.abs().amax(dim=-1)
        require_finite(name, amax_N)
        scale_N = scale_for(amax_N, 127.0)
        codes_NK = (weight_NK / scale_N[..., None]).round().clamp(-127, 127).to(torch.int8)
        return {name: codes_NK, f"{name}_scale": scale_N}

    def dequantize(self, name: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return parts[name].float() * parts[f"{name}_scale"][..., None]
