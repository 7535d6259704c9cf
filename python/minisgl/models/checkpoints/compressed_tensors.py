"""compressed-tensors, as llm-compressor writes it: one name, several layouts, chosen by `format` and `config_groups`.

pack-quantized         X.weight_packed int32 [N, K / 8], X.weight_scale [N, G]. If asymmetric X.weight_zero_point int32
                       [N / 8, G], packed along N; with act-order X.weight_g_idx [K]. Codes are stored plus 8 (8 bits: 128)
int-quantized          X.weight int8 [N, K], X.weight_scale [N, 1]
float-quantized        X.weight e4m3 [N, K], X.weight_scale: [N, 1], one number, or a block's
mxfp4-pack-quantized   X.weight_packed uint8 [N, K / 2], X.weight_scale uint8 [N, K / 32]
naive-quantized        int- or float-quantized
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from minisgl.models.checkpoints.base import Encoding, ExpertChoice, Pieces, require_shape, require_type
from minisgl.models.checkpoints.files import Header
from minisgl.models.checkpoints.fp8_block import Fp8Encoding
from minisgl.models.checkpoints.integers import Codes, integer_choice, unpack_words
from minisgl.models.checkpoints.mxfp4 import Mxfp4Encoding
from minisgl.moe.base import ExpertShape
from minisgl.moe.formats import ExpertFormat
from minisgl.moe.formats.mxfp4 import BLOCK

FLOATS = ("F16", "BF16", "F32")


def read_groups(config: Mapping[str, Any]) -> tuple[Encoding, ...]:
    """One encoding a layout that quantization_config names. ValueError for a layout that isn't served."""
    encodings: dict[str, Encoding] = {}
    for group in (config.get("config_groups") or {}).values():
        weights = group.get("weights")
        if not weights:
            continue
        kind, encoding = _read_group(str(group.get("format") or config.get("format")), weights)
        if kind in encodings and vars(encodings[kind]) != vars(encoding):
            raise ValueError(
                f"compressed-tensors with two kinds of {kind} weights in one model is not served: export with one"
            )
        encodings[kind] = encoding
    if {"int-quantized", "float-quantized"} <= encodings.keys():
        raise ValueError("compressed-tensors that mixes int8 and fp8 weights is not served: export with one")
    return tuple(encodings.values())


def _read_group(layout: str, weights: Mapping[str, Any]) -> tuple[str, Encoding]:
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    strategy, symmetric = weights.get("strategy"), bool(weights.get("symmetric", True))
    group_size = int(weights.get("group_size") or -1) if strategy == "group" else -1
    if layout == "pack-quantized" and bits in (4, 8) and kind == "int" and strategy in ("group", "channel"):
        return layout, PackedEncoding(bits, group_size, symmetric)
    if kind == "float" and bits == 4 and group_size == BLOCK:
        return "mxfp4-pack-quantized", PackedMxfp4Encoding()
    if layout in ("int-quantized", "naive-quantized") and bits == 8 and kind == "int" and symmetric:
        return "int-quantized", Int8Encoding(group_size)
    if layout in ("float-quantized", "naive-quantized") and bits == 8 and kind == "float":
        block = weights.get("block_structure") if strategy == "block" else None
        if isinstance(block, str):
            block = [int(number) for number in block.split("x")]
        if strategy == "group":
            block = [1, group_size]
        rows, cols = block or (0, 0)
        return "float-quantized", Fp8Encoding((rows, cols) if block else None, scale_suffix="_scale")
    raise ValueError(
        f"compressed-tensors {layout!r} with {bits}-bit {kind} weights, strategy {strategy!r}, is not served: use "
        "pack-quantized (4 or 8 bits), int-quantized, float-quantized or mxfp4-pack-quantized"
    )


class PackedEncoding(Encoding):
    """pack-quantized. group_size -1: one group a row."""

    label = "compressed-tensors"
    pieces: Mapping[str, str] = {
        "codes": "_packed", "scale": "_scale", "shape": "_shape", "zeros": "_zero_point", "group": "_g_idx",
    }  # fmt: skip

    def __init__(self, bits: int, group_size: int, symmetric: bool) -> None:
        self.bits, self.group_size, self.symmetric = bits, group_size, symmetric
        self.needed = frozenset({"codes", "scale"} if symmetric else {"codes", "scale", "zeros"})

    def shape(self, headers: Mapping[str, Header]) -> tuple[int, ...]:
        codes = require_type(headers, "codes", "I32").shape
        require_type(headers, "scale", *FLOATS)
        if len(codes) != 2:
            raise ValueError(f"codes {list(codes)} must have two dims")
        shape = (codes[0], codes[1] * 32 // self.bits)
        groups = 1 if self.group_size < 1 else -(-shape[1] // self.group_size)
        require_shape(headers, "scale", (shape[0], groups))
        if "zeros" in headers:
            require_type(headers, "zeros", "I32")
            require_shape(headers, "zeros", (-(-shape[0] * self.bits // 32), groups))
        return shape

    def parts(self, pieces: Pieces, target: ExpertFormat, part: str) -> dict[str, torch.Tensor] | str:
        return self._codes(pieces).parts(target)

    def dequantize(self, pieces: Pieces, part: str = "") -> torch.Tensor:
        return self._codes(pieces).dequantize()

    def expert_choice(self, shape: ExpertShape) -> ExpertChoice:
        return integer_choice(self.bits, self.group_size, self.symmetric, shape)

    def _codes(self, pieces: Pieces) -> Codes:
        codes_NK = unpack_words(pieces["codes"], self.bits, dim=1)
        if "shape" in pieces and pieces["shape"].tolist() != list(codes_NK.shape):
            raise ValueError(f"weight_shape says {pieces['shape'].tolist()}, found {list(codes_NK.shape)}")
        zero_NG, group_of_K = None, None
        if "zeros" in pieces:
            zero_NG = unpack_words(pieces["zeros"], self.bits, dim=0)[: len(codes_NK)].contiguous()
        if "group" in pieces and bool((pieces["group"] >= 0).all()):
            group_of_K = pieces["group"].long()
            places = torch.arange(codes_NK.shape[1], device=group_of_K.device) // max(self.group_size, 1)
            if self.group_size < 1 or torch.equal(group_of_K, places):
                group_of_K = None
        return Codes(self.bits, codes_NK, pieces["scale"].float(), self.group_size, zero_NG, group_of_K)


class Int8Encoding(Encoding):
    """int-quantized: symmetric int8 with one scale a row, or a group of columns."""

    label = "compressed-tensors"
    pieces: Mapping[str, str] = {"codes": "", "scale": "_scale"}
    needed = frozenset(pieces)

    def __init__(self, group_size: int = -1) -> None:
        self.group_size = group_size

    def shape(self, headers: Mapping[str, Header]) -> tuple[int, ...]:
        shape = require_type(headers, "codes", "I8").shape
        require_type(headers, "scale", *FLOATS)
        groups = 1 if self.group_size < 1 else -(-shape[-1] // self.group_size)
        require_shape(headers, "scale", (*shape[:-1], groups), (1,), ())
        return shape

    def parts(self, pieces: Pieces, target: ExpertFormat, part: str) -> dict[str, torch.Tensor] | str:
        return self._codes(pieces).parts(target)

    def dequantize(self, pieces: Pieces, part: str = "") -> torch.Tensor:
        return self._codes(pieces).dequantize()

    def expert_choice(self, shape: ExpertShape) -> ExpertChoice:
        return ExpertChoice("int8")

    def _codes(self, pieces: Pieces) -> Codes:
        codes_NK, scale = pieces["codes"], pieces["scale"].float()
        if scale.ndim < 2:  # one number for the whole tensor
            scale = scale.reshape(1, 1).expand(len(codes_NK), 1)
        return Codes(8, (codes_NK.to(torch.int16) + 128).to(torch.uint8), scale, self.group_size)


class PackedMxfp4Encoding(Mxfp4Encoding):
    """mxfp4-pack-quantized: the blocks of a row side by side, gate and up apart."""

    label = "compressed-tensors"
    pieces: Mapping[str, str] = {"codes": "_packed", "scale": "_scale"}
    needed = frozenset(pieces)

    def __init__(self) -> None:
        super().__init__(interleaved=False)

    def shape(self, headers: Mapping[str, Header]) -> tuple[int, ...]:
        codes = require_type(headers, "codes", "U8").shape
        require_type(headers, "scale", "U8")
        require_shape(headers, "scale", (*codes[:-1], codes[-1] * 2 // BLOCK))
        return (*codes[:-1], codes[-1] * 2)

    def parts(self, pieces: Pieces, target: ExpertFormat, part: str) -> dict[str, torch.Tensor] | str:
        blocks = pieces["codes"].unflatten(-1, (-1, BLOCK // 2))
        return super().parts({**pieces, "codes": blocks}, target, part)
