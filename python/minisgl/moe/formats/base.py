"""Contract of an expert weight format: how one weight is stored, and what its stored bytes mean.

A format knows bytes and values. It knows nothing of devices, slots, ranks or kernels. `dequantize` *defines*
the format: a kernel is right when it agrees with the float64 product of dequantized weights within
`tolerance`.

Stored parts of a weight called `name` ("gate_up" or "down"): `name` itself holds the values or codes,
`name_scale` and `name_zero` what the format adds, `name_bias` float32 [N] a bias. The first dim of every part
runs along N, and a part of gate_up is the part of gate followed by the part of up. So gate and up, which most
checkpoints hold as two tensors, are quantized one by one and written into the two halves of one record.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from minisgl.moe.base import ExpertShape, Part, RecordLayout

RECORD_ALIGNMENT = 256  # bytes; a record starts on a boundary that every copy engine and vector load likes
PART_ALIGNMENT = 16  # bytes; the width of one vector load

PartSpec = tuple[str, tuple[int, ...], torch.dtype]  # suffix ("" or "_scale" or "_zero"), shape, dtype


class ExpertFormat(ABC):
    """One storage format of expert weights, e.g. "bf16", "fp8", "int4"."""

    name: str
    tolerance: float
    """Largest relative error (Frobenius norm) of a layer's output against float64 on *dequantized* weights,
    with bf16 activations (fp16 and fp32: with activations in that dtype)."""
    group_size: int = 0
    """Weights along K that share a scale; 0 where a scale covers a whole row or none exists."""

    def check(self, shape: ExpertShape) -> str | None:
        """Why this format can't store experts of this shape, and the nearest thing that works; None if it can."""
        return None

    @abstractmethod
    def weight_parts(self, num_rows: int, num_cols: int) -> list[PartSpec]:
        """Parts that store one weight [N, K]: (suffix, shape, dtype)."""

    @abstractmethod
    def quantize(self, name: str, weight_NK: torch.Tensor) -> dict[str, torch.Tensor]:
        """Stored parts of one weight.

        name: prefix of the parts' names. weight_NK: [..., N, K] floating point, any device; leading dims are
        a batch of experts. Returns e.g. {"down": ..., "down_scale": ...} with the same leading dims. gate_up
        may be given whole or as "gate" and "up". Raises ValueError for NaN or inf, which no scale can hold
        (native formats keep them).
        """

    @abstractmethod
    def dequantize(self, name: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The float32 weight [..., N, K] that the parts mean; names, shapes and dtypes say all it needs."""

    def layout(self, shape: ExpertShape) -> RecordLayout:
        """Places of all parts inside one record. Raises ValueError if `check` has a reason not to."""
        if reason := self.check(shape):
            raise ValueError(reason)
        hidden, model = shape.hidden_dim, shape.model_dim
        half = self.weight_parts(hidden, model)
        gate_up = [(suffix, (2 * dims[0], *dims[1:]), dtype) for suffix, dims, dtype in half]
        parts: list[PartSpec] = []
        for name, num_rows, specs in (
            ("gate_up", 2 * hidden, gate_up),
            ("down", model, self.weight_parts(model, hidden)),
        ):
            parts += [(name + suffix, dims, dtype) for suffix, dims, dtype in specs]
            if shape.bias:
                parts.append((f"{name}_bias", (num_rows,), torch.float32))
        return pack_layout(parts)

    def bytes_per_expert(self, shape: ExpertShape) -> int:
        """Bytes of one record, with its padding to RECORD_ALIGNMENT."""
        return self.layout(shape).nbytes


def pack_layout(parts: list[PartSpec]) -> RecordLayout:
    """Lay parts one after the other, each on a PART_ALIGNMENT boundary; the record ends on RECORD_ALIGNMENT."""
    placed, offset = [], 0
    for name, shape, dtype in parts:
        placed.append(Part(name, shape, dtype, offset))
        size = dtype.itemsize
        for dim in shape:
            size *= dim
        offset = -(-(offset + size) // PART_ALIGNMENT) * PART_ALIGNMENT
    return RecordLayout(tuple(placed), -(-offset // RECORD_ALIGNMENT) * RECORD_ALIGNMENT)


def require_finite(name: str, amax: torch.Tensor) -> None:
    """ValueError if the largest magnitudes `amax` of a weight's rows, blocks or groups hold NaN or inf."""
    if not bool(amax.isfinite().all()):
        raise ValueError(
            f"weight {name!r} holds NaN or inf, which can't be quantized: "
            "check the checkpoint, or store it as it is"
        )


def scale_for(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """float32 scale that maps amax to the largest code; 1 where amax is 0, so that zeros stay exact zeros."""
    tiny = torch.finfo(torch.float32).tiny
    return torch.where(amax > 0, (amax / largest).clamp(min=tiny), 1.0)


ANY_SHAPE = "int8, fp8 and fp8_block take any shape"  # the nearest thing that works, in words
