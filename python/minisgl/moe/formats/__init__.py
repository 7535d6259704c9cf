"""How an expert's weights are stored: one small file a format, and `get_format` to name one.

bf16, fp16, fp32   as they are                               native.py
int8, fp8          one scale an output channel               int8.py, fp8.py
fp8_block          one scale a block of 128 x 128            fp8_block.py
int4, mxfp4        one scale a group of weights along K      int4.py, mxfp4.py
"""

from __future__ import annotations

from functools import lru_cache

import torch

from minisgl.moe.formats.base import ExpertFormat
from minisgl.moe.formats.fp8 import Fp8Format
from minisgl.moe.formats.fp8_block import Fp8BlockFormat
from minisgl.moe.formats.int4 import Int4Format
from minisgl.moe.formats.int8 import Int8Format
from minisgl.moe.formats.mxfp4 import Mxfp4Format
from minisgl.moe.formats.native import NATIVE_NAMES, NativeFormat

moe_quantization_choices = ("none", "int8", "fp8", "int4", "fp8_block", "mxfp4")

__all__ = ["ExpertFormat", "get_format", "moe_quantization_choices"]


@lru_cache
def get_format(
    name: str, dtype: torch.dtype = torch.bfloat16, group_size: int = 128, symmetric: bool = True
) -> ExpertFormat:
    """The format called `name`: a quantization choice, or a slab's format name.

    dtype: what "none" stores. group_size, symmetric: of int4, ignored by the others; "int4_asym" is int4 with
    zero points, in one word. To dequantize they aren't needed, since a slab's parts say it by their shapes and
    names. Raises ValueError for an unknown name.
    """
    if name == "none":
        return NativeFormat(dtype)
    if name in NATIVE_NAMES:
        return NativeFormat(NATIVE_NAMES[name])
    if name == "int4":
        return Int4Format(group_size, symmetric)
    if name == "int4_asym":
        return Int4Format(group_size, symmetric=False)
    formats = {"int8": Int8Format, "fp8": Fp8Format, "fp8_block": Fp8BlockFormat, "mxfp4": Mxfp4Format}
    if name not in formats:
        raise ValueError(
            f"unknown expert format {name!r}: choose one of {', '.join(moe_quantization_choices)}"
        )
    return formats[name]()
