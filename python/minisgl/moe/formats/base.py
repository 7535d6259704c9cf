"""Contract of an expert weight format: how one weight is stored, and what its stored bytes mean.

A format knows bytes and values. It knows nothing of devices, slots, ranks or kernels. `dequantize` *defines* the format:
a kernel is right when it agrees with the float64 product of dequantized weights within `tolerance`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from minisgl.moe.base import ExpertShape, Part, RecordLayout

RECORD_ALIGNMENT = 256  # bytes; a record starts on a boundary that every copy engine and vector load likes
PART_ALIGNMENT = 16  # bytes; the width of one vector load


class ExpertFormat(Protocol):
    """One storage format of expert weights, e.g. "bf16", "fp8", "int4"."""

    name: str
    tolerance: float
    """Largest relative error (Frobenius norm) of a layer output against float64 on *dequantized* weights, bf16 activations."""

    def check(self, shape: ExpertShape) -> str | None:
        """Why this format cannot store experts of this shape, with the nearest thing that works; None if it can."""
        ...

    def layout(self, shape: ExpertShape) -> RecordLayout:
        """Places of all parts inside one record."""
        ...

    def quantize(self, name: str, weight_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        """Stored parts of one weight.

        name: "gate_up" or "down". weight_NK: [..., N, K] floating point, any device; leading dims are a batch of experts.
        Returns e.g. {"gate_up": ..., "gate_up_scale": ...} with the same leading dims.
        """
        ...

    def dequantize(self, name: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The float32 weight [..., N, K] that the stored parts mean."""
        ...


def pack_layout(parts: list[tuple[str, tuple[int, ...], torch.dtype]]) -> RecordLayout:
    """Lay parts one after the other, each on a PART_ALIGNMENT boundary; the record ends on RECORD_ALIGNMENT."""
    placed, offset = [], 0
    for name, shape, dtype in parts:
        placed.append(Part(name, shape, dtype, offset))
        size = dtype.itemsize
        for dim in shape:
            size *= dim
        offset = -(-(offset + size) // PART_ALIGNMENT) * PART_ALIGNMENT
    return RecordLayout(tuple(placed), -(-offset // RECORD_ALIGNMENT) * RECORD_ALIGNMENT)
