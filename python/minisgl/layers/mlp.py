"""The dense feed-forward layer: down(act(gate(x)) * up(x)); also what shared experts are."""

from __future__ import annotations

import torch
from torch import nn

from minisgl.layers.launch import FUSED_ACTIVATIONS, gated_activation, use_kernels
from minisgl.layers.linear import MergedLinear, RowLinear
from minisgl.moe.base import Activation, activate
from minisgl.parallel import SOLO, Group


def check_width(hidden_dim: int, group: Group) -> None:
    """Raise ValueError if the ranks can't share an MLP of this width evenly."""
    if hidden_dim % group.size:
        raise ValueError(
            f"--tp={group.size} does not divide the MLP's hidden dim {hidden_dim}: use another number"
        )


class GatedMLP(nn.Module):
    """x [T, D] -> [T, D] through a hidden width F, which the ranks of `group` share evenly. gate and up are one product.

    Raises ValueError if they can't.
    """

    def __init__(
        self,
        model_dim: int,
        hidden_dim: int,
        activation: Activation,
        *,
        bias: bool = False,
        device: torch.device,
        dtype: torch.dtype,
        group: Group = SOLO,
    ) -> None:
        super().__init__()
        check_width(hidden_dim, group)
        hidden = group.shard(hidden_dim)
        parts = {"gate": hidden, "up": hidden}
        self.gate_up = MergedLinear(model_dim, parts, bias=bias, device=device, dtype=dtype)
        self.down = RowLinear(hidden_dim, model_dim, bias=bias, device=device, dtype=dtype, group=group)
        self.activation: Activation = activation

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        gate_up_TF = self.gate_up(x_TD)
        if use_kernels(gate_up_TF) and self.activation in FUSED_ACTIVATIONS:
            return self.down(gated_activation(gate_up_TF, self.activation))
        return self.down(activate(gate_up_TF, self.activation))
