"""Local: one rank holds every expert, or a part of every expert. Nothing moves but the sum at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minisgl.moe.base import Routing
from minisgl.moe.exchange.base import Dispatched, Rows
from minisgl.parallel import SOLO, Group


class Local:
    """Every expert is here. Under tensor parallelism `group` shares each expert's F, and one all-reduce adds the parts up."""

    def __init__(self, num_experts: int, group: Group = SOLO) -> None:
        self.num_experts = self.num_local_experts = num_experts
        self.graph_safe = group.graph_safe
        self._group = group

    def most_rows(self, num_tokens: int) -> int:
        return num_tokens

    def dispatch(self, x_TD: torch.Tensor, routing: Routing) -> Dispatched:
        return Dispatched((Rows(x_TD, routing),))

    def combine(self, ys: Sequence[torch.Tensor], sent: Dispatched) -> torch.Tensor:
        (y_TD,) = ys
        return self._group.all_reduce(y_TD)
