"""Weights as they are: bfloat16, float16 or float32, without scales. The default, named after its dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from minisgl.moe.formats.base import ExpertFormat, PartSpec

NATIVE_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOLERANCES = {"bf16": 6e-3, "fp16": 1e-3, "fp32": 1e-5}


class NativeFormat(ExpertFormat):
    """NaN and inf are kept: they stay inside the rows of the expert that has them."""

    def __init__(self, dtype: torch.dtype) -> None:
        names = [name for name, native in NATIVE_NAMES.items() if native == dtype]
        if not names:
            raise ValueError(f"expert weights can be stored as bfloat16, float16 or float32, not {dtype}")
        self.dtype, self.name = dtype, names[0]
        self.tolerance = TOLERANCES[self.name]

    def weight_parts(self, num_rows: int, num_cols: int) -> list[PartSpec]:
        return [("", (num_rows, num_cols), self.dtype)]

    def quantize(self, name: str, weight_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: weight_NK.to(self.dtype)}

    def dequantize(self, name: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return parts[name].float()
