"""Two backends as one: prompts (and batches that hold any) by one of them, decode steps by the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from minisgl.attention.base import AttentionBackend, AttentionBatch, AttentionProblem, LayerCache


@dataclass(frozen=True)
class MixedPlan:
    """Who serves this step, and what it prepared."""

    backend: AttentionBackend
    plan: Any


class MixedAttention:
    """`AttentionBackend` that is called after the one for prompts, and may be captured where the one for decode may."""

    def __init__(self, prompts: AttentionBackend, decode: AttentionBackend) -> None:
        self._prompts, self._decode = prompts, decode
        self.name = prompts.name
        self.graph_safe = decode.graph_safe

    def supports(self, problem: AttentionProblem, device: torch.device) -> str | None:
        return self._prompts.supports(problem, device) or self._decode.supports(problem, device)

    def plan(self, problem: AttentionProblem, batch: AttentionBatch) -> MixedPlan:
        backend = self._decode if batch.is_decode else self._prompts
        return MixedPlan(backend, backend.plan(problem, batch))

    def forward(
        self,
        q_THC: torch.Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        plan: MixedPlan,
        problem: AttentionProblem,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return plan.backend.forward(q_THC, cache, batch, plan.plan, problem, sinks_H)
