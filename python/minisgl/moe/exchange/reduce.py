"""Reduce: every rank has every token, so none has to travel. Each computes the routes to its own experts; one all-reduce
adds the partial sums. No host wait and fixed shapes, so a CUDA graph can hold it. It moves [T, D] whatever the routing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minisgl.moe.base import Routing
from minisgl.moe.exchange.base import Dispatched, Rows
from minisgl.moe.store.shard import ExpertSpread
from minisgl.parallel import Group


class Reduce:
    """Expert parallelism over replicated tokens. A replicated expert is computed for token i by rank i % N."""

    def __init__(self, spread: ExpertSpread, group: Group, device: torch.device) -> None:
        assert spread.num_ranks == group.size
        self.num_experts, self.num_local_experts = spread.num_experts, len(spread.experts_of(group.rank))
        self.graph_safe = group.graph_safe
        self._group, self._tables = group, spread.tables(group.rank, device)

    def most_rows(self, num_tokens: int) -> int:
        return num_tokens

    def dispatch(self, x_TD: torch.Tensor, routing: Routing) -> Dispatched:
        ids_TK, group = routing.ids_TK, self._group
        at_home_T1 = torch.arange(len(ids_TK), device=ids_TK.device)[:, None] % group.size == group.rank
        local_TK = torch.where(at_home_T1, self._tables.home_E1[ids_TK], self._tables.owned_E1[ids_TK])
        return Dispatched((Rows(x_TD, Routing(local_TK, routing.weights_TK)),))

    def combine(self, ys: Sequence[torch.Tensor], sent: Dispatched) -> torch.Tensor:
        (y_TD,) = ys
        return self._group.all_reduce(y_TD)
