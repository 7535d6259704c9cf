"""GPTQ, 4 and 8 bits, as AutoGPTQ, GPTQModel and transformers' optimum write it.

    X.qweight  int32 [K / 8, N]   nibble i of word r is row 8 r + i (of the transposed weight), lowest first
    X.qzeros   int32 [G, N / 8]   zero points, packed along N; minus one in the first version ("gptq"), not in "gptq_v2"
    X.scales   fp16  [G, N]
    X.g_idx    int32 [K]          the group of every column: k // group unless the columns were reordered (act-order)

With 8 bits a word holds four codes. value = (code - zero) * scale. Symmetric models have all zeros in the middle. Act-order
gives every expert its own order of columns, which no record format of ours holds: such experts are quantized anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from minisgl.models.checkpoints.base import Encoding, ExpertChoice, Pieces, require_shape, require_type
from minisgl.models.checkpoints.files import Header
from minisgl.models.checkpoints.integers import Codes, integer_choice, unpack_words
from minisgl.moe.base import ExpertShape
from minisgl.moe.formats import ExpertFormat


class GptqEncoding(Encoding):
    """bits 4 or 8; group_size -1: one group a row. zero_offset: what a stored zero point lacks."""

    label = "GPTQ"
    pieces: Mapping[str, str] = {
        "codes": ".qweight",
        "zeros": ".qzeros",
        "scale": ".scales",
        "group": ".g_idx",
    }
    needed = frozenset({"codes", "zeros", "scale"})
    plain_suffix = ".weight"

    def __init__(self, bits: int, group_size: int, symmetric: bool, zero_offset: int) -> None:
        self.bits, self.group_size = bits, group_size
        self.symmetric, self.zero_offset = symmetric, zero_offset

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> GptqEncoding:
        """config: quantization_config. ValueError for a width that isn't served."""
        bits = config.get("bits")
        if bits not in (4, 8):
            raise ValueError(f"GPTQ with {bits} bits is not served: use a checkpoint of 4 or 8 bits")
        version = str(config.get("checkpoint_format") or "gptq")
        if version not in ("gptq", "gptq_v2"):
            raise ValueError(f"GPTQ in the layout {version!r} is not served: export it as 'gptq'")
        group_size, symmetric = int(config.get("group_size", -1)), bool(config.get("sym", True))
        return cls(bits, group_size, symmetric, zero_offset=int(version == "gptq"))

    def shape(self, headers: Mapping[str, Header]) -> tuple[int, ...]:
        codes = require_type(headers, "codes", "I32").shape
        require_type(headers, "zeros", "I32")
        scale = require_type(headers, "scale", "F16", "BF16", "F32").shape
        if len(codes) != 2 or len(scale) != 2:
            raise ValueError(f"codes {list(codes)} and scale {list(scale)} must have two dims")
        a_word = 32 // self.bits
        shape = (codes[1], codes[0] * a_word)
        groups = 1 if self.group_size < 1 else -(-shape[1] // self.group_size)
        require_shape(headers, "scale", (groups, shape[0]))
        require_shape(headers, "zeros", (groups, -(-shape[0] // a_word)))
        if "group" in headers:
            require_shape(headers, "group", (shape[1],))
            require_type(headers, "group", "I32")
        return shape

    def parts(self, pieces: Pieces, target: ExpertFormat, part: str) -> dict[str, torch.Tensor] | str:
        return self._codes(pieces).parts(target)

    def dequantize(self, pieces: Pieces, part: str = "") -> torch.Tensor:
        return self._codes(pieces).dequantize()

    def expert_choice(self, shape: ExpertShape) -> ExpertChoice:
        return integer_choice(self.bits, self.group_size, self.symmetric, shape)

    def _codes(self, pieces: Pieces) -> Codes:
        codes_NK = unpack_words(pieces["codes"], self.bits, dim=0).T.contiguous()
        zero_GN = unpack_words(pieces["zeros"], self.bits, dim=1)[:, : len(codes_NK)]
        largest = (1 << self.bits) - 1
        zero_GN = (zero_GN + self.zero_offset) & largest  # uint8: an 8-bit 255 wraps to 0 by itself
        scale_NG = pieces["scale"].T.float().contiguous()
        return Codes(
            self.bits,
            codes_NK,
            scale_NG,
            self.group_size,
            zero_GN.T.contiguous(),
            self._order(pieces, codes_NK),
        )

    def _order(self, pieces: Pieces, codes_NK: torch.Tensor) -> torch.Tensor | None:
        """g_idx where it says something. ValueError if it names groups that don't exist."""
        if "group" not in pieces:
            return None
        group_of_K, num_groups = pieces["group"].long(), len(pieces["scale"])
        if bool(((group_of_K < 0) | (group_of_K >= num_groups)).any()):
            raise ValueError(f"g_idx names groups outside of 0..{num_groups - 1}")
        size = codes_NK.shape[1] if self.group_size < 1 else self.group_size
        places = torch.arange(codes_NK.shape[1], device=group_of_K.device) // size
        return None if torch.equal(group_of_K, places) else group_of_K
