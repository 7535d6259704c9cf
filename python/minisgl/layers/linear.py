"""Matrix products with a weight [out, in], alone or several of one input merged into one.

`places` names every tensor a checkpoint fills in, as views of where it finally lives: a loader copies into
them and knows nothing about merging. Parameters are allocated on the given device and hold whatever was
there (`meta` holds nothing).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn


def new_parameter(*shape: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised weight that never wants a gradient."""
    return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """x [..., in] -> [..., out]: x @ weight.T + bias."""

    bias: nn.Parameter | None

    def __init__(
        self, in_dim: int, out_dim: int, *, bias: bool = False, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = new_parameter(out_dim, in_dim, device=device, dtype=dtype)
        self.bias = new_parameter(out_dim, device=device, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class MergedLinear(Linear):
    """Several projections of one input as one product: one launch, and the input is read once.

    parts: name -> output width, in the order of the rows of the merged weight, e.g. {"q": 4096, "k": 512,
    "v": 512}.
    """

    def __init__(
        self,
        in_dim: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(in_dim, sum(parts.values()), bias=bias, device=device, dtype=dtype)
        self.parts = dict(parts)

    def split(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The output of `forward` [..., out] as views, one a part."""
        return y.split(list(self.parts.values()), dim=-1)

    def places(self) -> dict[str, torch.Tensor]:
        """`part.weight` [width, in] and `part.bias` [width]: views into the merged tensors."""
        out, start = {}, 0
        for name, width in self.parts.items():
            out[f"{name}.weight"] = self.weight[start : start + width]
            if self.bias is not None:
                out[f"{name}.bias"] = self.bias[start : start + width]
            start += width
        return out
