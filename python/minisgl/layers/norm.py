"""RMSNorm (arXiv 1910.07467), alone or with the residual addition that always precedes it."""

from __future__ import annotations

import torch
from torch import nn

from minisgl.layers.launch import add_rms_norm, use_kernels
from minisgl.layers.linear import new_parameter


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) over the last dim.

    Computed in float32, rounded to x's dtype and then multiplied by the weight in that dtype: the order of
    Hugging Face's models, so that bf16 results agree bit for bit. (torch.nn.functional.rms_norm multiplies
    before it rounds.) On CUDA one kernel does it, with the same roundings.
    """

    def __init__(self, dim: int, eps: float, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = new_parameter(dim, device=device, dtype=dtype)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if use_kernels(x):
            return add_rms_norm(x, None, self.weight, self.eps)[0]
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); the first layer has no residual yet. Inputs are left alone."""
        if use_kernels(x):
            return add_rms_norm(x, residual, self.weight, self.eps)
        total = x if residual is None else x + residual
        return self(total), total
