"""Contract of attention over a paged KV cache.

A step's batch is ragged: request b brings q_len new tokens whose keys and values are appended to kv_len -
q_len earlier ones. Decode is q_len == 1 for all; prefill, with or without a cached prefix, is anything else;
a batch may mix both.

    q      [ b0 q0 q1 q2 | b1 q0 | b2 q0 q1 ]        T = sum of q_len rows
    cache  request b's token j lies at page page_table_BP[b, j // page_size], row j % page_size

The cache of one layer is k, v: [num_pages, page_size, num_kv_heads, head_dim]. Page 0 is the dummy page:
padding rows of a captured graph write there, and nobody reads it. Every row of q belongs to some request, a
padding request included.

Shape letters: B requests, T tokens of the step, P pages a request, S rows of a page, H query heads,
G key/value heads, C head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from minisgl.attention.store import store_kv


@dataclass(frozen=True)
class AttentionProblem:
    """What is fixed for all steps of one layer: decides which backend can serve it.

    scale multiplies q.k. window: a token sees at most this many latest positions, itself included (None:
    all).
    has_sinks: a learned logit a head joins the softmax's denominator (gpt-oss). soft_cap:
    cap * tanh(logit / cap).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    scale: float
    window: int | None = None
    has_sinks: bool = False
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed: use at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads do not divide among {self.num_kv_heads} key/value heads: "
                "num_heads must be a multiple of num_kv_heads (after the split over tensor-parallel ranks)"
            )
        if not self.scale > 0:
            raise ValueError(
                f"scale={self.scale} is not allowed: use a positive number, as 1 / sqrt(head_dim)"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"window={self.window} is not allowed: use at least 1, or None for full attention"
            )
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"soft_cap={self.soft_cap} is not allowed: use a positive number, or None")

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class AttentionBatch:
    """What one step asks of attention: the same for all layers.

    cu_q_B1 int32 [B + 1]: row offsets of each request's new tokens. kv_lens_B int32 [B]: tokens in the cache
    once this step's are written (q_len included). page_table_BP int32 [B, P]. write_slots_T int64 [T]: page *
    page_size + row where token t's key and value go. max_q_len and max_kv_len are host numbers: upper bounds
    that may be larger than the data (a captured graph keeps its own). A padding request has kv_len 0 and may
    have any q rows; its output rows are unspecified but finite.
    """

    cu_q_B1: torch.Tensor
    kv_lens_B: torch.Tensor
    page_table_BP: torch.Tensor
    write_slots_T: torch.Tensor
    max_q_len: int
    max_kv_len: int

    @property
    def is_decode(self) -> bool:
        return self.max_q_len == 1

    @property
    def batch_size(self) -> int:
        return self.kv_lens_B.shape[0]


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer: k_PSGC, v_PSGC [num_pages, page_size, num_kv_heads, head_dim]."""

    k_PSGC: torch.Tensor
    v_PSGC: torch.Tensor

    def write(self, k_TGC: torch.Tensor, v_TGC: torch.Tensor, write_slots_T: torch.Tensor) -> None:
        """Store this step's keys and values at their slots. In place; capturable."""
        store_kv(self.k_PSGC, self.v_PSGC, k_TGC, v_TGC, write_slots_T)


class AttentionBackend(Protocol):
    """One way to compute attention. Holds scratch space at most, never request state.

    graph_safe: a decode step may be captured in a CUDA graph, after one call outside of it.
    """

    name: str
    graph_safe: bool

    def supports(self, problem: AttentionProblem, device: torch.device) -> str | None:
        """None if this backend can serve the problem there, else the reason in words."""
        ...

    def plan(self, problem: AttentionProblem, batch: AttentionBatch) -> Any:
        """Once a step, before the first layer: whatever the layers share (split counts, scratch, wrappers).

        For a batch that will be captured, the plan must stay valid for every later content of the batch's
        tensors.
        """
        ...

    def forward(
        self,
        q_THC: torch.Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        plan: Any,
        problem: AttentionProblem,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of the new tokens over cache and themselves (already written): [T, H, C] in q's
        dtype.
        """
        ...
