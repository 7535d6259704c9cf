"""Grouped integer codes, which GPTQ, AWQ and compressed-tensors all mean once their packing is undone.

    value[n, k] = (code[n, k] - zero[n, k // group]) * scale[n, k // group]

A group that is a multiple of one of int4's own group sizes is stored exactly by repeating its scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl.models.checkpoints.base import ExpertChoice
from minisgl.moe.base import ExpertShape
from minisgl.moe.formats import ExpertFormat
from minisgl.moe.formats.int4 import GROUP_SIZES, SYMMETRIC_ZERO, Int4Format
from minisgl.moe.formats.int8 import Int8Format
from minisgl.moe.formats.packing import pack_nibbles


@dataclass(frozen=True)
class Codes:
    """codes_NK uint8 [N, K] of 4 or 8 bits, scale_NG float32 and zero_NG uint8 [N, G]; zero None: the middle of the codes.

    group_size: columns that share a scale, the last group may have fewer; -1 for a whole row. group_of_K int64 [K]: the
    group of every column where that is not its place (act-order), else None.
    """

    bits: int
    codes_NK: torch.Tensor
    scale_NG: torch.Tensor
    group_size: int
    zero_NG: torch.Tensor | None = None
    group_of_K: torch.Tensor | None = None

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def columns(self) -> int:
        """Columns of a group that isn't the last."""
        return self.group_size if self.group_size > 0 else self.codes_NK.shape[-1]

    def dequantize(self) -> torch.Tensor:
        """float32 [N, K]."""
        group_of_K = self.group_of_K
        if group_of_K is None:
            group_of_K = torch.arange(self.codes_NK.shape[-1], device=self.codes_NK.device) // self.columns
        zero_NK = self.middle if self.zero_NG is None else self.zero_NG.float()[:, group_of_K]
        return (self.codes_NK.float() - zero_NK) * self.scale_NG.float()[:, group_of_K]

    def parts(self, target: ExpertFormat) -> dict[str, torch.Tensor] | str:
        """See `Encoding.parts`."""
        if self.group_of_K is not None:
            return "its columns are grouped in another order than they are stored (act-order)"
        if isinstance(target, Int4Format) and self.bits == 4:
            return self._int4(target)
        if isinstance(target, Int8Format) and self.bits == 8:
            return self._int8()
        return f"{self.bits}-bit codes are not {target.name}"

    def _int4(self, target: Int4Format) -> dict[str, torch.Tensor] | str:
        if self.columns % target.group_size:
            return f"groups of {self.columns} are no multiple of {target.group_size}"
        repeat, zero_NG = self.columns // target.group_size, self.zero_NG
        num_groups = self.codes_NK.shape[-1] // target.group_size
        scale_NG = _repeated(self.scale_NG.float(), repeat, num_groups)
        parts = {"": pack_nibbles(self.codes_NK), "_scale": scale_NG}
        if target.symmetric:
            uneven = zero_NG is not None and not bool((zero_NG == SYMMETRIC_ZERO).all())
            return "its zero points are not all 8" if uneven else parts
        if zero_NG is None:
            zero_NG = torch.full_like(self.scale_NG, SYMMETRIC_ZERO, dtype=torch.uint8)
        return {**parts, "_zero": _repeated(zero_NG, repeat, num_groups)}

    def _int8(self) -> dict[str, torch.Tensor] | str:
        if self.scale_NG.shape[-1] != 1:
            return f"int8 has one scale a row, this has {self.scale_NG.shape[-1]}"
        if self.zero_NG is not None and not bool((self.zero_NG == self.middle).all()):
            return "int8 has no zero points"
        codes_NK = (self.codes_NK.to(torch.int16) - self.middle).to(torch.int8)
        return {"": codes_NK, "_scale": self.scale_NG[..., 0].float()}


def _repeated(values_NG: torch.Tensor, times: int, num_groups: int) -> torch.Tensor:
    return values_NG.repeat_interleave(times, dim=-1)[..., :num_groups] if times > 1 else values_NG


def unpack_words(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """int32 words -> uint8 codes, lowest bits first, each word giving 32 / bits neighbours along dim (0 or more)."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    codes = (words.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (words.ndim - dim - 1))) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(dim, dim + 1)


def integer_choice(bits: int, group_size: int, symmetric: bool, shape: ExpertShape) -> ExpertChoice:
    """The format for integer codes in groups of group_size along K, -1 for whole rows."""
    if bits == 8:
        return ExpertChoice("int8")
    fitting = [g for g in GROUP_SIZES if shape.model_dim % g == 0 and shape.hidden_dim % g == 0]
    exact = [g for g in fitting if group_size < 1 or group_size % g == 0]
    if not fitting:
        return ExpertChoice("int8")
    group = exact[0] if exact else fitting[-1]
    return ExpertChoice("int4" if symmetric else "int4_asym", group)
