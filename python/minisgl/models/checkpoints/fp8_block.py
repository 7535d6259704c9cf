"""fp8 with scales of blocks (the Qwen3-*-FP8 and DeepSeek releases), of rows, or of a whole tensor.

`X.weight` e4m3 [N, K] and `X.weight_scale_inv`: value = code * scale, in spite of the name. [ceil(N / 128), ceil(K / 128)]
scales are our fp8_block as it stands, one number or [N, 1] our fp8; other block sizes are quantized anew. Scales come in any
float type, or as exponents of two (uint8, or e8m0). `X.input_scale` and the like are of activations, which we scale ourselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from minisgl.models.checkpoints.base import Encoding, ExpertChoice, Pieces, require_type
from minisgl.models.checkpoints.files import Header
from minisgl.moe.base import ExpertShape
from minisgl.moe.formats import ExpertFormat
from minisgl.moe.formats.fp8 import Fp8Format
from minisgl.moe.formats.fp8_block import BLOCK, Fp8BlockFormat, num_blocks

SCALE_TYPES = ("F32", "BF16", "F16", "F64", "U8", "F8_E8M0")


class Fp8Encoding(Encoding):
    """e4m3 codes and a grid of scales. block: rows and columns that share one, None where it is a row's or a tensor's."""

    label = "fp8"
    needed = frozenset({"codes", "scale"})

    def __init__(self, block: tuple[int, int] | None, scale_suffix: str = "_scale_inv") -> None:
        self.block = block
        self.pieces = {"codes": "", "scale": scale_suffix}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Fp8Encoding:
        """config: quantization_config."""
        block = config.get("weight_block_size")
        return cls(tuple(block) if block else None)  # type: ignore[arg-type]

    def shape(self, headers: Mapping[str, Header]) -> tuple[int, ...]:
        shape = require_type(headers, "codes", "F8_E4M3").shape
        scale = require_type(headers, "scale", *SCALE_TYPES).shape
        if len(shape) < 2:
            raise ValueError(f"a weight of shape {list(shape)} can't be fp8")
        grid = self._grid(shape)
        allowed = [(*shape[:-2], *grid)]
        if self.block is None:
            allowed += [(), (1,), (1, 1), shape[:-1], (*shape[:-2], 1, 1), shape[:-2]]
        if scale not in allowed:
            raise ValueError(f"scale has shape {list(scale)}, expected {list(allowed[0])}")
        return shape

    def parts(self, pieces: Pieces, target: ExpertFormat, part: str) -> dict[str, torch.Tensor] | str:
        codes, scale = pieces["codes"], self._scale(pieces)
        if self.block is None and isinstance(target, Fp8Format):
            return {"": codes, "_scale": scale.expand(*codes.shape[:-1], 1)[..., 0]}
        if self.block == (BLOCK, BLOCK) and isinstance(target, Fp8BlockFormat):
            if part == "gate_up" and codes.shape[-2] // 2 % BLOCK:
                return "a block of its scales covers rows of gate and of up"
            return {"": codes, "_scale": scale}
        grid = "rows" if self.block is None else f"blocks of {self.block[0]} x {self.block[1]}"
        return f"fp8 with scales of {grid} is not {target.name}"

    def dequantize(self, pieces: Pieces, part: str = "") -> torch.Tensor:
        codes, scale = pieces["codes"].float(), self._scale(pieces)
        if self.block is None:
            return codes * scale
        _, by_row, cols = self.grouped(pieces)
        return codes * by_row.repeat_interleave(cols, dim=-1)[..., : codes.shape[-1]]

    def grouped(self, pieces: Pieces) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(codes, scale float32 [..., N, G], columns that share a scale or 0 for a whole row): every bit kept.

        Rows of a block repeat its scale, so that rows can be taken apart.
        """
        codes, scale = pieces["codes"], self._scale(pieces)
        if self.block is None:
            return codes, scale.expand(*codes.shape[:-1], 1), 0
        rows, cols = self.block
        return codes, scale.repeat_interleave(rows, dim=-2)[..., : codes.shape[-2], :], cols

    def expert_choice(self, shape: ExpertShape) -> ExpertChoice:
        return ExpertChoice("fp8" if self.block is None else "fp8_block")

    def _grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
        if self.block is None:
            return shape[-2], 1
        return -(-shape[-2] // self.block[0]), -(-shape[-1] // self.block[1])

    def _scale(self, pieces: Pieces) -> torch.Tensor:
        """float32 [..., grid]; without blocks [..., N or 1, 1]."""
        codes, scale = pieces["codes"], pieces["scale"]
        if scale.dtype == torch.uint8:
            scale = torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.int() - 127)
        scale = scale.float()
        if self.block is not None:
            return scale
        if scale.ndim == codes.ndim and scale.shape[-1] == 1:
            return scale
        if scale.shape == codes.shape[:-1] and scale.ndim == codes.ndim - 1:
            return scale[..., None]
        return scale.reshape(*codes.shape[:-2], 1, 1) if scale.ndim == codes.ndim - 2 else scale.reshape(1, 1)


assert num_blocks(BLOCK + 1) == 2  # the grid above and our format count blocks alike
