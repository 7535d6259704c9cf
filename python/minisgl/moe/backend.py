"""Contract of a MoE backend: the thing that multiplies. It sees a slab and slots, never experts, ranks or caches."""

from __future__ import annotations

from typing import Protocol

import torch

from minisgl.moe.base import Placement, Problem, Routing, RoutingRule


class MoeStep(Protocol):
    """One MoE layer call in flight. `run` may be called for several waves; `finish` exactly once.

    The kernel choice was made when the step began, so that one wave or many give the same bits.
    """

    def run(self, placement: Placement) -> None:
        """Compute the rows of every route whose slot is not -1; rows of other routes are left alone."""
        ...

    def finish(self) -> torch.Tensor:
        """y_TD in the activations' dtype: fp32 sum over k ascending of weight * row; routes that are -1 add exactly zero."""
        ...


class MoeBackend(Protocol):
    """One way to compute the experts, e.g. "torch" or "fused"."""

    name: str

    def supports(self, problem: Problem, device: torch.device) -> str | None:
        """None if this backend can compute the problem on the device, else the reason in words."""
        ...

    def route(
        self, logits_TE: torch.Tensor, rule: RoutingRule, bias_E: torch.Tensor | None = None
    ) -> Routing:
        """select_experts, possibly as one kernel; equal to the definition in `moe.base`."""
        ...

    def begin(self, x_TD: torch.Tensor, routing: Routing, problem: Problem) -> MoeStep:
        """Choose kernels for this step and claim the rows buffer."""
        ...
