"""Reduce: every rank has every token, so none has to travel. Each computes the routes to its own experts; one all-reduce
adds the partial sums. No host wait and fixed shapes, so a CUDA graph can hold it. It moves [T, D] whatever the routing.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from minisgl.moe.base import Routing
from minisgl.moe.exchange.base import Dispatched, Rows
from minisgl.moe.store.shard import ExpertSpread
from minisgl.parallel import Group

HAS_TRITON = importlib.util.find_spec("triton") is not None  # platforms without it have no CUDA either
kernels: Any = importlib.import_module("minisgl.moe.kernels.local_ids") if HAS_TRITON else None


class Reduce:
    """Expert parallelism over replicated tokens. A replicated expert is computed for token i by rank i % N."""

    def __init__(self, spread: ExpertSpread, group: Group, device: torch.device) -> None:
        assert spread.num_ranks == group.size
        self.num_experts, self.num_local_experts = spread.num_experts, len(spread.experts_of(group.rank))
        self.graph_safe = group.graph_safe
        self._group, self._tables = group, spread.tables(group.rank, device)
        self._replicated = bool(spread.replicated)

    def most_rows(self, num_tokens: int) -> int:
        return num_tokens

    def dispatch(self, x_TD: torch.Tensor, routing: Routing) -> Dispatched:
        tables, group = self._tables, self._group
        if HAS_TRITON and routing.ids_TK.is_cuda:
            local_TK = kernels.local_ids(
                routing.ids_TK, tables.owned_E1, tables.home_E1, group.rank, group.size, self._replicated
            )
        else:
            local_TK = self.local_ids(routing.ids_TK)
        return Dispatched((Rows(x_TD, Routing(local_TK, routing.weights_TK)),))

    def local_ids(self, ids_TK: torch.Tensor) -> torch.Tensor:
        """int32 [T, K]: ids of this rank's store, -1 for what other ranks compute."""
        group = self._group
        at_home_T1 = torch.arange(len(ids_TK), device=ids_TK.device)[:, None] % group.size == group.rank
        return torch.where(at_home_T1, self._tables.home_E1[ids_TK], self._tables.owned_E1[ids_TK])

    def combine(self, ys: Sequence[torch.Tensor], sent: Dispatched) -> torch.Tensor:
        (y_TD,) = ys
        return self._group.all_reduce(y_TD)
