"""Nouns of Mixture-of-Experts execution, and the one place where routing is decided.

    expert   identity of a weight pair (gate_up, down)      slot   a place in a slab that can hold one expert
    route    one (token, k) pair                            wave   a set of routes served together
    slab     S slots of weights                             record all bytes of one expert, contiguous

Shape letters: T tokens, K top-k, R rows (R = T * K, row t * K + k belongs to route (t, k)), E experts, S slots, D model dim,
F expert hidden dim. Weights are gate_up [E, 2F, D] (gate rows first, then up rows) and down [E, D, F].

A kernel never sees experts, ranks, hosts or caches. It sees a slab of S slots and, for each route, a slot number or -1
("not here": another rank's expert, a padding row, a route of another wave).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

Scoring = Literal["softmax", "sigmoid", "softmax_of_topk"]
Activation = Literal["silu", "gelu", "gpt_oss"]


@dataclass(frozen=True)
class RoutingRule:
    """How expert ids and weights follow from router logits; one rule a model family.

    top_k: experts a token uses.
    scoring: "softmax" over all experts, then choose; "sigmoid" of each logit, then choose; "softmax_of_topk" chooses by
        logit, then normalises over the chosen ones.
    renormalize: divide the chosen weights by their sum.
    num_groups, top_groups: group-limited choice (DeepSeek); 1, 1 means none.
    group_score: a group's score is its "max" (DeepSeek-V2) or the sum of its "top2" (DeepSeek-V3).
    scaling_factor: multiplies the weights once, after renormalisation.
    """

    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    scaling_factor: float = 1.0


@dataclass(frozen=True)
class Routing:
    """Chosen experts: ids_TK int32 [T, K] (-1: no expert, contributes exactly zero), weights_TK float32 [T, K]."""

    ids_TK: torch.Tensor
    weights_TK: torch.Tensor


@dataclass(frozen=True)
class ExpertShape:
    """Dimensions of one expert: D model dim, F hidden dim, and whether it carries biases (gpt-oss)."""

    model_dim: int
    hidden_dim: int
    bias: bool = False


@dataclass(frozen=True)
class Part:
    """One tensor of an expert record: its shape for one expert, dtype, and byte offset inside the record."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int


@dataclass(frozen=True)
class RecordLayout:
    """Where every part of one expert lies inside its record of `nbytes` contiguous bytes (a multiple of 256)."""

    parts: tuple[Part, ...]
    nbytes: int

    def views(self, records_SB: torch.Tensor) -> dict[str, torch.Tensor]:
        """Typed views [S, *part.shape] into records_SB uint8 [S, nbytes]; no copy is made."""
        assert records_SB.dtype == torch.uint8 and records_SB.shape[1] == self.nbytes
        flat, out = records_SB.reshape(-1), {}
        for part in self.parts:
            size = part.dtype.itemsize
            strides = [1] * len(part.shape)
            for i in range(len(part.shape) - 2, -1, -1):
                strides[i] = strides[i + 1] * part.shape[i + 1]
            base = flat.view(part.dtype)
            out[part.name] = base.as_strided(
                (records_SB.shape[0], *part.shape), (self.nbytes // size, *strides), part.offset // size
            )
        return out


@dataclass(frozen=True)
class Slab:
    """S slots of weights in one format: `records_SB` uint8 [S, nbytes], and typed views of it by part name.

    Part names: gate_up, down; and where the format or model has them gate_up_scale, down_scale, gate_up_zero, down_zero,
    gate_up_bias, down_bias.
    """

    format: str
    shape: ExpertShape
    layout: RecordLayout
    records_SB: torch.Tensor
    parts: Mapping[str, torch.Tensor] = field(repr=False)

    @property
    def num_slots(self) -> int:
        return self.records_SB.shape[0]


@dataclass(frozen=True)
class Placement:
    """One wave: for each route the slot of `slab` that holds its expert, or -1. Valid until the next wave is asked for."""

    slab: Slab
    slots_TK: torch.Tensor


@dataclass(frozen=True)
class Problem:
    """What decides the kernel and its tiles: everything but the data.

    num_tokens is the T of this call; dtype is the activations' dtype.
    """

    num_tokens: int
    top_k: int
    num_slots: int
    shape: ExpertShape
    format: str
    dtype: torch.dtype
    activation: Activation = "silu"
