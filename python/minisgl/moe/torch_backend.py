"""TorchMoeBackend: the plain definition of a MoE layer, which every kernel is compared with.

It loops over the slots that occur, dequantizes one expert at a time and computes in float32 from the first
product to the sum over k. It runs on any device and in every format, and it is what serves on a CPU. It asks
the device which slots occur, so a CUDA graph can't hold it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl.moe.backend import PlainForward
from minisgl.moe.base import Placement, Problem, Routing, RoutingRule, Slab, activate, apply_rule
from minisgl.moe.formats import get_format


class TorchMoeBackend(PlainForward):
    name = "torch"
    graph_safe = False

    def supports(self, problem: Problem, device: torch.device) -> str | None:
        return None

    def route(
        self,
        logits_TE: torch.Tensor,
        rule: RoutingRule,
        bias_E: torch.Tensor | None = None,
        num_valid: torch.Tensor | None = None,
    ) -> Routing:
        return apply_rule(logits_TE, rule, bias_E, num_valid)

    def begin(self, x_TD: torch.Tensor, routing: Routing, problem: Problem) -> TorchStep:
        return TorchStep(x_TD, routing, problem)

    def reserve(self, problem: Problem, device: torch.device) -> None:
        pass  # every step allocates what it needs

    def scratch_bytes(self, device: torch.device) -> int:
        return 0


class TorchStep:
    """One layer call. rows_RD float32 collects what the waves compute; row t * K + k is that of route (t, k)."""

    awaits_records = False

    def __init__(self, x_TD: torch.Tensor, routing: Routing, problem: Problem) -> None:
        self.x_TD, self.routing, self.problem = x_TD, routing, problem
        num_routes = routing.ids_TK.numel()
        self.rows_RD = torch.zeros((num_routes, x_TD.shape[1]), dtype=torch.float32, device=x_TD.device)

    def run(self, placement: Placement) -> None:
        placement.before_down()  # both GEMMs of an expert come one after the other
        slots_R = placement.slots_TK.reshape(-1)
        top_k = placement.slots_TK.shape[1]
        for slot in slots_R.unique().tolist():
            if slot < 0:
                continue
            routes = (slots_R == slot).nonzero().squeeze(1)
            x_RD = self.x_TD[routes // top_k].float()
            self.rows_RD[routes] = self._expert(x_RD, placement.slab, slot)

    def _expert(self, x_RD: torch.Tensor, slab: Slab, slot: int) -> torch.Tensor:
        """down(activation(gate_up(x))) of one slot, float32."""
        parts = {name: tensor[slot] for name, tensor in slab.parts.items()}
        weight_format = get_format(slab.format)
        gate_up_RN = F.linear(x_RD, weight_format.dequantize("gate_up", parts), _bias(parts, "gate_up"))
        activated_RF = activate(gate_up_RN, self.problem.activation)
        return F.linear(activated_RF, weight_format.dequantize("down", parts), _bias(parts, "down"))

    def finish(self) -> torch.Tensor:
        ids_TK = self.routing.ids_TK
        num_tokens, top_k = ids_TK.shape
        weights_TK = self.routing.weights_TK.masked_fill(ids_TK < 0, 0.0)
        rows_TKD = self.rows_RD.view(num_tokens, top_k, self.x_TD.shape[1])
        y_TD = torch.zeros_like(self.x_TD, dtype=torch.float32)
        for k in range(top_k):  # a loop, not a sum(): the order of additions is part of the definition
            y_TD += weights_TK[:, k, None] * rows_TKD[:, k]
        return y_TD.to(self.x_TD.dtype)


def _bias(parts: dict[str, torch.Tensor], name: str) -> torch.Tensor | None:
    bias = parts.get(f"{name}_bias")
    return None if bias is None else bias.float()
