"""Float64 oracle of the MoE layer and random cases for it: the loop over routes that no backend may disagree
with.

Shared by the unit, interpret and gpu tiers. The oracle reads nothing of the package, so it can't inherit a
mistake.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MoeCase:
    """x [T, D], gate_up [E, 2F, D], down [E, D, F], ids int32 [T, K], weights float32 [T, K]; biases or
    None."""

    x: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    def oracle(self, activation: str = "silu") -> torch.Tensor:
        return moe_oracle(
            self.x,
            self.gate_up,
            self.down,
            self.ids,
            self.weights,
            activation=activation,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
        )


def random_case(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    model_dim: int,
    hidden_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    seed: int = 0,
) -> MoeCase:
    """Weights and inputs of unit output scale; K distinct experts a token; routing weights that sum to 1."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(dtype)

    logits = torch.randn(num_tokens, num_experts, generator=generator)
    weights, ids = logits.softmax(-1).topk(top_k, dim=-1)
    return MoeCase(
        x=normal(num_tokens, model_dim),
        gate_up=normal(num_experts, 2 * hidden_dim, model_dim, std=model_dim**-0.5),
        down=normal(num_experts, model_dim, hidden_dim, std=hidden_dim**-0.5),
        ids=ids.int(),
        weights=weights / weights.sum(-1, keepdim=True),
        gate_up_bias=normal(num_experts, 2 * hidden_dim) if bias else None,
        down_bias=normal(num_experts, model_dim) if bias else None,
    )


def moe_oracle(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    activation: str = "silu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y float64 [T, D]: for each token the sum over its routes of weight * down(activation(gate_up(x))); id
    -1 adds nothing.

    Weights are what the experts mean: pass dequantized ones for a quantized layer.
    """
    x = x.double()
    y = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for k in range(ids.shape[1]):
            expert = int(ids[t, k])
            if expert < 0:
                continue
            hidden = gate_up[expert].double() @ x[t]
            if gate_up_bias is not None:
                hidden = hidden + gate_up_bias[expert].double()
            row = down[expert].double() @ activation_oracle(hidden, activation)
            if down_bias is not None:
                row = row + down_bias[expert].double()
            y[t] += weights[t, k].double() * row
    return y


def activation_oracle(hidden: torch.Tensor, activation: str) -> torch.Tensor:
    half = hidden.shape[-1] // 2
    gate, up = hidden[..., :half], hidden[..., half:]
    if activation == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if activation == "gelu":
        return 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2))) * up
    assert activation == "gpt_oss"
    gate, up = torch.minimum(gate, torch.tensor(7.0)), torch.clamp(up, -7.0, 7.0)
    return (up + 1) * gate / (1 + torch.exp(-1.702 * gate))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the expected; 0 when both are zero, inf when actual holds
    NaN."""
    actual, expected = actual.double(), expected.double()
    difference = float((actual - expected).norm())
    if math.isnan(difference):
        return math.inf
    return difference / max(float(expected.norm()), 1e-300)
