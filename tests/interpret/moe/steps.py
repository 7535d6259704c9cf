"""Slabs and steps for kernel tests: a slab whose every byte outside its parts is NaN, and one call that runs a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl.moe.base import ExpertShape, Placement, Problem, Routing, Slab
from minisgl.moe.formats import get_format
from minisgl.moe.fused import FusedMoeBackend
from tests.moe_oracle import MoeCase, moe_oracle


@dataclass(frozen=True)
class Stored:
    """A case's experts in one format: the slab, what its weights mean, and the format's tolerance."""

    slab: Slab
    gate_up: torch.Tensor
    down: torch.Tensor
    tolerance: float
    group_size: int

    def problem(self, case: MoeCase, activation: str = "silu") -> Problem:
        return Problem(
            num_tokens=case.x.shape[0],
            top_k=case.ids.shape[1],
            num_slots=self.slab.num_slots,
            shape=self.slab.shape,
            format=self.slab.format,
            dtype=case.x.dtype,
            activation=activation,
            group_size=self.group_size,
        )

    def oracle(self, case: MoeCase, activation: str = "silu") -> torch.Tensor:
        return moe_oracle(
            case.x, self.gate_up, self.down, case.ids, case.weights, activation=activation,
            gate_up_bias=case.gate_up_bias, down_bias=case.down_bias,
        )  # fmt: skip


def store(
    case: MoeCase,
    format_name: str,
    group: int = 128,
    symmetric: bool = True,
    device: str = "cpu",
    num_slots: int | None = None,
) -> Stored:
    """The case's experts as slots 0 .. E-1 of a slab; all other bytes (padding, further slots) are 0xff, which is NaN."""
    weight_format = get_format(format_name, case.x.dtype, group, symmetric)
    num_experts, model_dim, hidden_dim = case.down.shape
    shape = ExpertShape(model_dim, hidden_dim, case.gate_up_bias is not None)
    layout = weight_format.layout(shape)
    # Slabs around the slab: reads past either end would meet NaN, too.
    around = torch.full(
        ((num_slots or num_experts) + 2, layout.nbytes), 0xFF, dtype=torch.uint8, device=device
    )
    slab = Slab.of_records(weight_format.name, shape, layout, around[1:-1])
    parts = {
        **weight_format.quantize("gate_up", case.gate_up),
        **weight_format.quantize("down", case.down),
    }
    if case.gate_up_bias is not None and case.down_bias is not None:
        parts.update(gate_up_bias=case.gate_up_bias, down_bias=case.down_bias)
    for name, value in parts.items():
        slab.parts[name][:num_experts].copy_(value.float() if name.endswith("bias") else value)
    return Stored(
        slab,
        weight_format.dequantize("gate_up", parts),
        weight_format.dequantize("down", parts),
        max(weight_format.tolerance, 2e-3 if case.x.dtype == torch.float16 else 0.0),
        weight_format.group_size,
    )


def run_step(
    backend: FusedMoeBackend, case: MoeCase, stored: Stored, activation: str = "silu", waves: int = 0
) -> torch.Tensor:
    """One step: resident (slots are the routing's ids), or in `waves` waves that share the routes out among them."""
    routing = Routing(case.ids, case.weights)
    problem = stored.problem(case, activation)
    assert backend.supports(problem, case.x.device) is None
    step = backend.begin(case.x, routing, problem)
    if not waves:
        step.run(Placement(stored.slab, routing.ids_TK))
        return step.finish()
    share = torch.arange(case.ids.numel(), device=case.ids.device).view_as(case.ids) % waves
    for wave in range(waves):
        step.run(Placement(stored.slab, torch.where(share == wave, case.ids, -1).int()))
    return step.finish()
