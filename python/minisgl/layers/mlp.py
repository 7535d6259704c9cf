"""The dense feed-forward layer: down(act(gate(x)) * up(x)); also what shared experts are."""

from __future__ import annotations

import torch
from torch import nn

from minisgl.layers.linear import Linear, MergedLinear
from minisgl.moe.base import Activation, activate


class GatedMLP(nn.Module):
    """x [T, D] -> [T, D] through a hidden width F. gate and up are one product."""

    def __init__(
        self,
        model_dim: int,
        hidden_dim: int,
        activation: Activation,
        *,
        bias: bool = False,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        parts = {"gate": hidden_dim, "up": hidden_dim}
        self.gate_up = MergedLinear(model_dim, parts, bias=bias, device=device, dtype=dtype)
        self.down = Linear(hidden_dim, model_dim, bias=bias, device=device, dtype=dtype)
        self.activation: Activation = activation

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.down(activate(self.gate_up(x_TD), self.activation))
