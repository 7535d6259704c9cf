"""fp8: E4M3 with one float32 scale an output channel. value = code * scale; the largest magnitude of a row
becomes 448.

A kernel may quantize activations per row too and multiply fp8 by fp8; `tolerance` allows for that. A row of
zeros has scale 1 and stays exactly zero. Rows with NaN or inf are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from minisgl.moe.formats.base import ExpertFormat, PartSpec, require_finite, scale_for

E4M3_MAX = 448.0


class Fp8Format(ExpertFormat):
    name = "fp8"
    tolerance = 6e-2

    def weight_parts(self, num_rows: int, num_cols: int) -> list[PartSpec]:
        return [("", (num_rows, num_cols), torch.float8_e4m3fn), ("_scale", (num_rows,), torch.float32)]

    def quantize(self, name: str, weight_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        weight_NK = weight_NK.float()
        amax_N = weight_NK.abs().amax(dim=-1)
        require_finite(name, amax_N)
        scale_N = scale_for(amax_N, E4M3_MAX)
        codes_NK = (weight_NK / scale_N[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return {name: codes_NK, f"{name}_scale": scale_N}

    def dequantize(self, name: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return parts[name].float() * parts[f"{name}_scale"][..., None]
