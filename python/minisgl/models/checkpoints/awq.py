"""AWQ, 4 bits, in the "gemm" layout that AutoAWQ writes.

    X.qweight  int32 [K, N / 8]   nibble i of word c is column 8 c + ORDER[i] (of the transposed weight)
    X.qzeros   int32 [G, N / 8]   zero points, packed alike
    X.scales   fp16  [G, N]

value = (code - zero) * scale.
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

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the columns in a word
BITS, A_WORD = 4, 8


class AwqEncoding(Encoding):
    """group_size -1: one group a row. symmetric: all zero points are 8."""

    label = "AWQ"
    pieces: Mapping[str, str] = {"codes": ".qweight", "zeros": ".qzeros", "scale": ".scales"}
    needed = frozenset(pieces)
    plain_suffix = ".weight"

    def __init__(self, group_size: int, symmetric: bool) -> None:
        self.group_size, self.symmetric = group_size, symmetric

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> AwqEncoding:
        """config: quantization_config. ValueError for a variant that isn't served."""
        bits, version = (
            config.get("bits", config.get("w_bit", BITS)),
            str(config.get("version", "gemm")).lower(),
        )
        if bits != BITS or version != "gemm":
            raise ValueError(
                f"AWQ with {bits} bits in the layout {version!r} is not served: use 4 bits and 'gemm'"
            )
        group_size = int(config.get("group_size", config.get("q_group_size", 128)))
        return cls(group_size, symmetric=not config.get("zero_point", True))

    def shape(self, headers: Mapping[str, Header]) -> tuple[int, ...]:
        codes = require_type(headers, "codes", "I32").shape
        require_type(headers, "zeros", "I32")
        require_type(headers, "scale", "F16", "BF16", "F32")
        if len(codes) != 2:
            raise ValueError(f"codes {list(codes)} must have two dims")
        shape = (codes[1] * A_WORD, codes[0])
        groups = 1 if self.group_size < 1 else -(-shape[1] // self.group_size)
        require_shape(headers, "scale", (groups, shape[0]))
        require_shape(headers, "zeros", (groups, codes[1]))
        return shape

    def parts(self, pieces: Pieces, target: ExpertFormat, part: str) -> dict[str, torch.Tensor] | str:
        return self._codes(pieces).parts(target)

    def dequantize(self, pieces: Pieces, part: str = "") -> torch.Tensor:
        return self._codes(pieces).dequantize()

    def expert_choice(self, shape: ExpertShape) -> ExpertChoice:
        return integer_choice(BITS, self.group_size, self.symmetric, shape)

    def _codes(self, pieces: Pieces) -> Codes:
        codes_NK, zero_NG = (_unpack(pieces[role]).T.contiguous() for role in ("codes", "zeros"))
        return Codes(BITS, codes_NK, pieces["scale"].T.float().contiguous(), self.group_size, zero_NG)


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, N / 8] -> uint8 [rows, N]."""
    nibbles = unpack_words(words, BITS, dim=1).unflatten(1, (-1, A_WORD))
    place = torch.tensor(ORDER, device=words.device).argsort()  # where in a word a column lies
    return nibbles[..., place].flatten(1)
