"""Nouns of Mixture-of-Experts execution, and the one place where routing is decided.

    expert   identity of a weight pair (gate_up, down)      slot   a place in a slab that can hold one expert
    route    one (token, k) pair                            wave   a set of routes served together
    slab     S slots of weights                             record all bytes of one expert, contiguous

Shape letters: T tokens, K top-k, R rows (R = T * K, row t * K + k belongs to route (t, k)), E experts, S
slots, D model dim, F expert hidden dim. Weights are gate_up [E, 2F, D] (gate rows first, then up rows) and
down [E, D, F].

A kernel never sees experts, ranks, hosts or caches. It sees a slab of S slots and, for each route, a slot
number or -1 ("not here": another rank's expert, a padding row, a route of another wave).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F

Scoring = Literal["softmax", "sigmoid", "softmax_of_topk"]
Activation = Literal["silu", "gelu", "gpt_oss"]


@dataclass(frozen=True)
class RoutingRule:
    """How expert ids and weights follow from router logits; one rule a model family.

    top_k: experts a token uses.
    scoring: "softmax" over all experts, then choose; "sigmoid" of each logit, then choose; "softmax_of_topk"
    chooses by
        logit, then normalises over the chosen ones.
    renormalize: divide the chosen weights by their sum.
    num_groups, top_groups: group-limited choice (DeepSeek); 1, 1 means none.
    group_score: a group's score is its "max" (DeepSeek-V2) or the sum of its "top2" (DeepSeek-V3).
    scaling_factor: multiplies the weights once, after renormalisation.

    Raises ValueError for numbers that can't be a rule, whatever the number of experts.
    """

    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: a token needs at least one expert")
        if self.scoring not in ("softmax", "sigmoid", "softmax_of_topk"):
            raise ValueError(f"scoring={self.scoring!r}: use softmax, sigmoid or softmax_of_topk")
        if self.group_score not in ("max", "top2"):
            raise ValueError(f"group_score={self.group_score!r}: use max or top2")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(f"top_groups={self.top_groups} must lie in 1..num_groups={self.num_groups}")


@dataclass(frozen=True)
class Routing:
    """Chosen experts: ids_TK int32 [T, K] (-1: no expert, adds exactly zero), weights_TK float32 [T, K]."""

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
    """Where every part of one expert lies inside its record of `nbytes` bytes (a multiple of 256)."""

    parts: tuple[Part, ...]
    nbytes: int

    def views(self, records_SB: torch.Tensor) -> dict[str, torch.Tensor]:
        """Typed views [S, *part.shape] into records_SB uint8 [S, nbytes]; no copy is made."""
        assert records_SB.dtype == torch.uint8
        assert records_SB.shape[1] == self.nbytes
        assert records_SB.is_contiguous()
        flat, out = records_SB.reshape(-1), {}
        for part in self.parts:
            size = part.dtype.itemsize
            strides = [1] * len(part.shape)
            for i in range(len(part.shape) - 2, -1, -1):
                strides[i] = strides[i + 1] * part.shape[i + 1]
            base = flat.view(part.dtype)
            first = base.storage_offset() + part.offset // size  # as_strided counts from the storage's start
            out[part.name] = base.as_strided(
                (records_SB.shape[0], *part.shape), (self.nbytes // size, *strides), first
            )
        return out


@dataclass(frozen=True)
class Slab:
    """S slots of weights in one format: `records_SB` uint8 [S, nbytes], and typed views of it by part name.

    Part names: gate_up, down; and where the format or model has them gate_up_scale, down_scale, gate_up_zero,
    down_zero, gate_up_bias, down_bias.
    """

    format: str
    shape: ExpertShape
    layout: RecordLayout
    records_SB: torch.Tensor
    parts: Mapping[str, torch.Tensor] = field(repr=False)

    @property
    def num_slots(self) -> int:
        return self.records_SB.shape[0]

    @staticmethod
    def of_records(format: str, shape: ExpertShape, layout: RecordLayout, records_SB: torch.Tensor) -> Slab:
        """A slab whose parts are views into its records."""
        return Slab(format, shape, layout, records_SB, layout.views(records_SB))

    @staticmethod
    def of_tensors(format: str, shape: ExpertShape, parts: Mapping[str, torch.Tensor]) -> Slab:
        """A slab over tensors that live apart, e.g. plain gate_up [E, 2F, D] and down [E, D, F], without a copy.

        Its records are empty (nbytes 0): it can be multiplied with, not moved as records.
        """
        down = parts["down"]
        empty = torch.empty((down.shape[0], 0), dtype=torch.uint8, device=down.device)
        return Slab(format, shape, RecordLayout((), 0), empty, dict(parts))


@dataclass(frozen=True)
class Arrival:
    """How a kernel sees what has come of the records that are on their way into a placement's slots.

    told_3M: int32, words that say what a route needs, once that is known (`kernels.told`). arrived_S1: int32, chunks that have
    come: [1 + turn] of gate_up's parts of the record that is copied in that turn, [0] of down's parts of all, and one for each
    program that plans or copies and has ended. chunks: how many gate_up's parts and down's parts of a record have. programs:
    how many of those there are. They were launched directly before what is launched next, which may begin when all of them run.
    """

    told_3M: torch.Tensor
    arrived_S1: torch.Tensor
    chunks: tuple[int, int]
    programs: int


def _complete() -> None:
    pass


@dataclass(frozen=True)
class Placement:
    """One wave: for each route the slot of `slab` that holds its expert, or -1. Valid until the next is asked for.

    arrival: of the only wave of a step while its slots are being filled, for kernels that wait by themselves. before_down: must
    be called before anything that reads the parts of down is launched, since they may arrive after those of gate_up do.
    """

    slab: Slab
    slots_TK: torch.Tensor
    before_down: Callable[[], None] = _complete
    arrival: Arrival | None = None

    @property
    def in_two_parts(self) -> bool:
        """Whether the parts of down may arrive later than those of gate_up."""
        return self.before_down is not _complete


@dataclass(frozen=True)
class Problem:
    """What decides the kernel and its tiles: everything but the data.

    num_tokens is the T of this call. num_slots is how many slots the layer has when all of its experts are resident;
    a store with fewer says the same number, so that kernels, tiles and therefore bits are those of the resident layer.
    num_experts is how many experts routes may name, where other ranks hold some of them; 0: as many as there are slots.
    dtype is the activations' dtype. group_size is how many weights along K share a scale (int4, mxfp4, fp8_block), 0
    where a scale covers a whole row or none exists.
    """

    num_tokens: int
    top_k: int
    num_slots: int
    shape: ExpertShape
    format: str
    dtype: torch.dtype
    activation: Activation = "silu"
    group_size: int = 0
    num_experts: int = 0

    @property
    def rows_per_slot(self) -> float:
        """Expected, if routes go to all experts alike: what decides how high a block of rows is."""
        return self.num_tokens * self.top_k / (self.num_experts or self.num_slots)


def select_experts(
    gating_output: torch.Tensor, topk: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, then the topk largest: (weights float32 [T, K], ids int32 [T, K]).

    gating_output: router logits [T, E]. This is the common rule; `apply_rule` has the others.
    """
    routing = apply_rule(gating_output, RoutingRule(topk, renormalize=renormalize))
    return routing.weights_TK, routing.ids_TK


def apply_rule(
    logits_TE: torch.Tensor,
    rule: RoutingRule,
    bias_E: torch.Tensor | None = None,
    num_valid: torch.Tensor | None = None,
) -> Routing:
    """Every routing rule: score, choose, weigh. The only place of renormalisation, bias, groups and scaling.

    logits_TE: router logits [T, E], any float type; all arithmetic is float32.
    bias_E: added to the scores for the choice only, never to the weights (DeepSeek-V3, ERNIE-4.5).
    num_valid: int32 [1] on the logits' device; rows from this number on are padding and get id -1, weight 0.

    A tie goes to the lower index. NaN counts as the lowest logit and infinities as the largest finite ones,
    so ids are distinct and in range and weights finite whatever comes in. Raises ValueError if the rule
    doesn't fit E experts.
    """
    _check_fit(logits_TE, rule, bias_E)
    logits_TE = _finite(logits_TE.float())
    scores_TE = _scores(logits_TE, rule)
    choice_TE = _choice(logits_TE, scores_TE, rule, bias_E)
    if rule.num_groups > 1:
        choice_TE = _keep_top_groups(choice_TE, rule)
    ids_TK = _top_indices(choice_TE, rule.top_k)
    weights_TK = scores_TE.gather(1, ids_TK)
    if rule.scoring == "softmax_of_topk":
        weights_TK = F.softmax(weights_TK, dim=-1)
    if rule.renormalize:
        weights_TK = _renormalized(weights_TK)
    weights_TK = weights_TK * rule.scaling_factor
    if num_valid is not None:
        padding_T1 = torch.arange(len(ids_TK), device=ids_TK.device)[:, None] >= num_valid
        ids_TK, weights_TK = ids_TK.masked_fill(padding_T1, -1), weights_TK.masked_fill(padding_T1, 0.0)
    return Routing(ids_TK.int(), weights_TK)


def _check_fit(logits_TE: torch.Tensor, rule: RoutingRule, bias_E: torch.Tensor | None) -> None:
    if logits_TE.ndim != 2 or not logits_TE.is_floating_point():
        raise ValueError(
            f"router logits must be a float tensor [T, E], not {logits_TE.dtype} {list(logits_TE.shape)}"
        )
    num_experts = logits_TE.shape[1]
    if num_experts % rule.num_groups:
        raise ValueError(f"{num_experts} experts can't be divided into {rule.num_groups} groups")
    candidates = num_experts // rule.num_groups * rule.top_groups
    if rule.top_k > candidates:
        raise ValueError(f"top_k={rule.top_k} but only {candidates} of {num_experts} experts can be chosen")
    if bias_E is not None and bias_E.shape != (num_experts,):
        raise ValueError(f"routing bias must be [{num_experts}], not {list(bias_E.shape)}")


def _finite(x: torch.Tensor) -> torch.Tensor:
    largest = torch.finfo(torch.float32).max
    return x.nan_to_num(nan=-largest, posinf=largest, neginf=-largest)


def _scores(logits_TE: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    if rule.scoring == "softmax":
        return F.softmax(logits_TE, dim=-1)
    return logits_TE.sigmoid() if rule.scoring == "sigmoid" else logits_TE


def _choice(
    logits_TE: torch.Tensor, scores_TE: torch.Tensor, rule: RoutingRule, bias_E: torch.Tensor | None
) -> torch.Tensor:
    """What is ranked. Logits where that ranks as scores do: it keeps apart what softmax in float32 rounds to
    one score, so the choice is that of exact arithmetic."""
    if bias_E is not None:
        return _finite(scores_TE + bias_E.float())
    summed = rule.num_groups > 1 and rule.group_score == "top2"
    return scores_TE if summed else logits_TE


def _top_indices(x: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest, largest first, ties by index: a stable sort, since torch.topk leaves ties
    open.
    """
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _keep_top_groups(choice_TE: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    """-inf for experts outside the best groups. (Zero, as some code has it, would beat a negative biased
    score.)
    """
    grouped = choice_TE.unflatten(1, (rule.num_groups, -1))
    best = grouped.topk(min(2 if rule.group_score == "top2" else 1, grouped.shape[2]), dim=-1).values
    kept = torch.zeros_like(best[..., 0], dtype=torch.bool)
    kept.scatter_(1, _top_indices(best.sum(dim=-1), rule.top_groups), True)
    return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)


def _renormalized(weights_TK: torch.Tensor) -> torch.Tensor:
    """Weights divided by their sum; 1e-20 as DeepSeek-V3 has it, which is below fp32 resolution of any
    softmax sum.

    Scores that are all zero (sigmoid of very negative logits) become 1/K each.
    """
    total_T1 = weights_TK.sum(dim=-1, keepdim=True)
    even = torch.full_like(weights_TK, 1 / weights_TK.shape[1])
    return torch.where(total_T1 > 0, weights_TK / (total_T1 + 1e-20), even)


def activate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """[..., 2F] -> [..., F]: the product of activated gate columns (first half) and up columns (second half).

    "silu": silu(g) * u. "gelu": exact (erf) gelu(g) * u. "gpt_oss": g is capped at 7 and u clamped to +-7,
    then (u + 1) * g * sigmoid(1.702 g). Checkpoints that interleave gate and up are separated while they
    load.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "gelu":
        return F.gelu(gate) * up
    if activation == "gpt_oss":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1.0) * gate * torch.sigmoid(1.702 * gate)
    raise ValueError(f"activation {activation!r}: use silu, gelu or gpt_oss")
