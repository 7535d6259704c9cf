"""Forcing which experts a model uses, through the seam that decides it: a backend whose `route` answers from a buffer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from minisgl.moe.backend import MoeBackend, MoeStep
from minisgl.moe.base import Problem, Routing, RoutingRule
from minisgl.moe.store.records import ExpertRecords


class ForcedRouting:
    """Expert ids of every layer for steps of `batch` tokens; other steps are routed by the model."""

    def __init__(self, num_layers: int, batch: int, top_k: int, device: torch.device) -> None:
        self.batch = batch
        self.ids_LTK = torch.zeros((num_layers, batch, top_k), dtype=torch.int32, device=device)
        self.weights_TK = torch.full((batch, top_k), 1 / top_k, device=device)


class ForcedBackend:
    """A backend whose routing is decided elsewhere: the test double of `route`."""

    def __init__(self, inner: MoeBackend, forced: ForcedRouting, layer: int) -> None:
        self._inner, self._forced, self._layer = inner, forced, layer
        self.name, self.graph_safe = inner.name, inner.graph_safe

    def supports(self, problem: Problem, device: torch.device) -> str | None:
        return self._inner.supports(problem, device)

    def route(
        self,
        logits_TE: torch.Tensor,
        rule: RoutingRule,
        bias_E: torch.Tensor | None = None,
        num_valid: torch.Tensor | None = None,
    ) -> Routing:
        if logits_TE.shape[0] != self._forced.batch:
            return self._inner.route(logits_TE, rule, bias_E, num_valid)
        return Routing(self._forced.ids_LTK[self._layer], self._forced.weights_TK)

    def begin(self, x_TD: torch.Tensor, routing: Routing, problem: Problem) -> MoeStep:
        return self._inner.begin(x_TD, routing, problem)


@contextmanager
def one_layer_of_random_weights() -> Iterator[None]:
    """Every layer gets copies of the first one's experts: drawing and quantizing 29 G weights takes longer than measuring."""
    fill, first = ExpertRecords.fill_random, []

    def fill_once(self: ExpertRecords, seed: int, std: float = 0.02) -> None:
        if first:
            self.records_EB.copy_(first[0].records_EB)
        else:
            fill(self, seed, std)
            first.append(self)

    ExpertRecords.fill_random = fill_once
    try:
        yield
    finally:
        ExpertRecords.fill_random = fill
