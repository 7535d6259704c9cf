"""Recording which experts a model uses: a backend around the real one, so that the layer need not know.

trace = RoutingTrace(num_experts=32, top_k=4)
layer.backend = trace.watch(layer_index, layer.backend)
... run ...
trace.save("trace.npz")      # ids int16 [tokens, layers, K], in the order in which tokens were computed
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from minisgl.moe.backend import MoeBackend, MoeStep
from minisgl.moe.base import Problem, Routing, RoutingRule


class RoutingTrace:
    """Expert ids of every token and layer since the start. Kept on the device until they are asked for."""

    def __init__(self, num_experts: int, top_k: int) -> None:
        self.num_experts, self.top_k = num_experts, top_k
        self._ids: dict[int, list[torch.Tensor]] = {}

    def watch(self, layer: int, backend: MoeBackend) -> MoeBackend:
        """The same backend, seen by this trace as `layer`."""
        self._ids[layer] = []
        return _Watched(backend, self._ids[layer])

    def clear(self) -> None:
        """Forget everything recorded so far."""
        for ids in self._ids.values():
            ids.clear()

    @property
    def layers(self) -> list[int]:
        return sorted(self._ids)

    @property
    def num_tokens(self) -> int:
        first = next(iter(self._ids.values()), [])
        return sum(len(ids) for ids in first)

    def counts(self) -> np.ndarray:
        """How often each expert was chosen: int64 [layers, E]. Padding (-1) does not count."""
        rows = [np.bincount(ids[ids >= 0], minlength=self.num_experts) for ids in self._layer_ids()]
        return np.stack(rows) if rows else np.zeros((0, self.num_experts), dtype=np.int64)

    def ids(self) -> np.ndarray:
        """int16 [tokens, layers, K]."""
        return np.stack(self._layer_ids(), axis=1).astype(np.int16)

    def save(self, path: str | Path) -> None:
        """Write ids, num_experts and layers as a compressed npz file."""
        np.savez_compressed(path, ids=self.ids(), num_experts=self.num_experts, layers=np.array(self.layers))

    def _layer_ids(self) -> list[np.ndarray]:
        empty = torch.zeros((0, self.top_k), dtype=torch.int32)
        return [torch.cat([empty, *(i.cpu() for i in self._ids[layer])]).numpy() for layer in self.layers]


class _Watched:
    """A backend that also remembers what it routed."""

    graph_safe = False  # a replayed graph runs none of this code

    def __init__(self, inner: MoeBackend, ids: list[torch.Tensor]) -> None:
        self._inner, self._ids, self.name = inner, ids, inner.name

    def supports(self, problem: Problem, device: torch.device) -> str | None:
        return self._inner.supports(problem, device)

    def route(
        self,
        logits_TE: torch.Tensor,
        rule: RoutingRule,
        bias_E: torch.Tensor | None = None,
        num_valid: torch.Tensor | None = None,
    ) -> Routing:
        routing = self._inner.route(logits_TE, rule, bias_E, num_valid)
        self._ids.append(routing.ids_TK.clone())  # the backend may reuse the tensor in the next layer
        return routing

    def begin(self, x_TD: torch.Tensor, routing: Routing, problem: Problem) -> MoeStep:
        return self._inner.begin(x_TD, routing, problem)

    def reserve(self, problem: Problem, device: torch.device) -> None:
        self._inner.reserve(problem, device)

    def scratch_bytes(self, device: torch.device) -> int:
        return self._inner.scratch_bytes(device)
