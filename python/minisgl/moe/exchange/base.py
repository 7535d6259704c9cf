"""Contract of an exchange: how rows reach the rank that holds their expert, and how results come back.

    sent = exchange.dispatch(x_TD, routing)           # ids are global experts
    ys = [experts(rows) for rows in sent.parts]       # ids are local to this rank's store, -1 for those elsewhere
    y_TD = exchange.combine(ys, sent)                 # finished rows, summed over ranks

An exchange knows ranks and experts; it knows nothing of formats, kernels or slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from minisgl.moe.base import Routing


@dataclass(frozen=True)
class Rows:
    """Rows to compute on this rank: x_RD [R, D], and their ids and weights [R, K] with ids local to this rank."""

    x_RD: torch.Tensor
    routing: Routing


@dataclass(frozen=True)
class Dispatched:
    """Rows to compute on this rank, in parts. Asking for the next part may wait until it has arrived, so compute one before
    asking for the next. An exchange whose way back needs more (counts, order) extends this class.
    """

    parts: Iterable[Rows]


class Exchange(Protocol):
    num_experts: int
    """Experts that routing may name, over all ranks."""
    num_local_experts: int
    """Experts in this rank's store: local ids are 0..num_local_experts - 1."""
    graph_safe: bool
    """Whether a CUDA graph can hold it: fixed shapes, and the host never waits."""

    def most_rows(self, num_tokens: int) -> int:
        """Rows that a part can have at most where `dispatch` is given so many tokens: what the store places, and scratch
        space holds, at a time. A part of a graph-safe exchange has the same number of rows in every step of so many tokens.
        """
        ...

    def dispatch(self, x_TD: torch.Tensor, routing: Routing) -> Dispatched:
        """Send rows where their experts are."""
        ...

    def combine(self, ys: Sequence[torch.Tensor], sent: Dispatched) -> torch.Tensor:
        """Weighted sums of local experts, one tensor [R, D] a part of `sent` -> finished rows [T, D]."""
        ...
