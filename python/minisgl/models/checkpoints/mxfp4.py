"""mxfp4 experts of gpt-oss: E2M1 codes in blocks of 32 that share a power of two.

    X_blocks  uint8 [E, N, K / 32, 16]   byte j of a block holds value 2 j in its low nibble, 2 j + 1 in its high one
    X_scales  uint8 [E, N, K / 32]       exponent + 127

Our mxfp4 has the same codes and scales with the nibbles in another order. Rows of gate and up alternate on disk.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from minisgl.models.checkpoints.base import Encoding, ExpertChoice, Pieces, require_shape, require_type
from minisgl.models.checkpoints.files import Header
from minisgl.moe.base import ExpertShape
from minisgl.moe.formats import ExpertFormat
from minisgl.moe.formats.mxfp4 import BLOCK, Mxfp4Format, pack_codes

_FORMAT = Mxfp4Format()


class Mxfp4Encoding(Encoding):
    """interleaved: gate and up rows of a gate_up alternate, as gpt-oss has them."""

    label = "mxfp4"
    pieces: Mapping[str, str] = {"codes": "_blocks", "scale": "_scales"}
    needed = frozenset(pieces)

    def __init__(self, interleaved: bool = True) -> None:
        self.interleaved = interleaved

    def shape(self, headers: Mapping[str, Header]) -> tuple[int, ...]:
        codes = require_type(headers, "codes", "U8").shape
        require_type(headers, "scale", "U8")
        if len(codes) < 3 or codes[-1] != BLOCK // 2:
            raise ValueError(f"codes of shape {list(codes)} are no blocks of {BLOCK // 2} bytes")
        require_shape(headers, "scale", codes[:-1])
        return (*codes[:-2], codes[-2] * BLOCK)

    def parts(self, pieces: Pieces, target: ExpertFormat, part: str) -> dict[str, torch.Tensor] | str:
        if not isinstance(target, Mxfp4Format):
            return f"mxfp4 is not {target.name}"
        bytes_NBj = pieces["codes"]
        codes_NK = torch.stack((bytes_NBj & 15, bytes_NBj >> 4), dim=-1).flatten(-3)
        parts = {"": pack_codes(codes_NK), "_scale": pieces["scale"]}
        if part == "gate_up" and self.interleaved:
            parts = {suffix: separated(tensor, -2) for suffix, tensor in parts.items()}
        return parts

    def dequantize(self, pieces: Pieces, part: str = "") -> torch.Tensor:
        parts = self.parts(pieces, _FORMAT, part)
        assert not isinstance(parts, str)
        return _FORMAT.dequantize("down", {f"down{suffix}": tensor for suffix, tensor in parts.items()})

    def expert_choice(self, shape: ExpertShape) -> ExpertChoice:
        return ExpertChoice("mxfp4")


def separated(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Rows 0, 2, 4 … then rows 1, 3, 5 … along dim."""
    num = tensor.shape[dim]
    order = torch.cat((torch.arange(0, num, 2), torch.arange(1, num, 2))).to(tensor.device)
    return tensor.index_select(dim, order)
