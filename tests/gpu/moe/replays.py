"""A captured layer beside an eager one, on inputs that change from replay to replay."""

from __future__ import annotations

import torch

from minisgl.moe.base import Placement, RoutingRule
from minisgl.moe.fused import FusedMoeBackend
from tests.interpret.moe.steps import Stored
from tests.moe_oracle import MoeCase


def assert_replays_equal_eager_runs(
    backend: FusedMoeBackend, case: MoeCase, stored: Stored, replays: int, skew: float = 0.0
) -> None:
    """Bit for bit, with new rows and logits every time. skew: how much more one expert is liked at every replay."""
    num_tokens, top_k = case.ids.shape
    num_experts = stored.slab.num_slots
    logits = torch.randn(num_tokens, num_experts, device="cuda")

    def layer() -> torch.Tensor:
        routing = backend.route(logits, RoutingRule(top_k))
        step = backend.begin(case.x, routing, stored.problem(case))
        step.run(Placement(stored.slab, routing.ids_TK))
        return step.finish()

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer()
    for i in range(replays):
        case.x.normal_()
        logits.normal_()[:, i % num_experts] += i * skew
        graph.replay()
        replayed = y.clone()
        assert torch.equal(replayed, layer())
