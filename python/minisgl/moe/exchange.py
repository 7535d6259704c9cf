"""Where tokens go: how rows reach the rank that holds their expert, and how results come back.

    sent = exchange.dispatch(x_TD, routing)      # ids are global experts
    y_RD = experts(sent.x_RD, sent.routing)      # ids are local to this rank's store, -1 for those elsewhere
    y_TD = exchange.combine(y_RD, sent)          # the rows this rank owns, summed over ranks

An exchange knows ranks and experts; it knows nothing of formats, kernels or slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from minisgl.moe.base import Routing


@dataclass(frozen=True)
class Dispatched:
    """Rows to compute on this rank.

    x_RD: [R, D], own rows and received ones. routing: ids and weights [R, K] for them, ids local to this
    rank.
    owned: which of these rows are this rank's own tokens, and so what `combine` returns. A kind of exchange
    whose way back needs more (counts, order) extends this class.
    """

    x_RD: torch.Tensor
    routing: Routing
    owned: slice


class Exchange(Protocol):
    num_experts: int
    """Experts that routing may name, over all ranks."""
    num_local_experts: int
    """Experts in this rank's store: local ids are 0..num_local_experts - 1."""

    def dispatch(self, x_TD: torch.Tensor, routing: Routing) -> Dispatched:
        """Send rows where their experts are. x_TD are the tokens this rank owns."""
        ...

    def combine(self, y_RD: torch.Tensor, sent: Dispatched) -> torch.Tensor:
        """Weighted sums of local experts [R, D] -> finished rows [T, D] of the tokens this rank owns."""
        ...


class Local:
    """One rank holds every expert: nothing moves."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = self.num_local_experts = num_experts

    def dispatch(self, x_TD: torch.Tensor, routing: Routing) -> Dispatched:
        return Dispatched(x_TD, routing, slice(0, x_TD.shape[0]))

    def combine(self, y_RD: torch.Tensor, sent: Dispatched) -> torch.Tensor:
        return y_RD
