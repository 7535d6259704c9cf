"""Matrix products with a weight [out, in], alone or several of one input merged into one.

`places` names every tensor a checkpoint fills in, as views of where it finally lives: a loader copies into
them and knows nothing about merging. `shards` says which of them hold only a part of the checkpoint's tensor,
because several ranks share it. Parameters are allocated on the given device and hold whatever was there
(`meta` holds nothing).

Over several ranks a pair of products needs one sum: the first (MergedLinear) holds a part of the output rows,
the second (RowLinear) the same part of the input columns, and adds up what all ranks have.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from minisgl.layers.launch import linear
from minisgl.parallel import Group, Shard

Shards = dict[str, tuple[int, Shard]]
"""Place -> (dim, part of that dim) of the checkpoint's tensor; whole tensors are not listed."""


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
        return linear(x, self.weight, self.bias)

    def shards(self) -> Shards:
        """Places that hold a part of the checkpoint's tensor."""
        return {}


class RowLinear(Linear):
    """x [..., part of in] -> [..., out], summed over the ranks of `group`, which share the input dim."""

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        bias: bool = False,
        device: torch.device,
        dtype: torch.dtype,
        group: Group,
    ) -> None:
        self.columns = group.shard(in_dim)
        super().__init__(self.columns.width, out_dim, bias=bias, device=device, dtype=dtype)
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias if self._group.rank == 0 else None  # once in the sum
        return self._group.all_reduce(linear(x, self.weight, bias))

    def shards(self) -> Shards:
        return {"weight": (1, self.columns)}


class MergedLinear(Linear):
    """Several projections of one input as one product: one launch, and the input is read once.

    parts: name -> this rank's part of its output, in the order of the rows of the merged weight, e.g. {"q":
    Shard(4096), "k": Shard(512), "v": Shard(512)}.
    """

    def __init__(
        self,
        in_dim: int,
        parts: Mapping[str, Shard],
        *,
        bias: bool = False,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.parts = dict(parts)
        self.widths = [part.width for part in parts.values()]
        super().__init__(in_dim, sum(self.widths), bias=bias, device=device, dtype=dtype)

    def split(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The output of `forward` [..., out] as views, one a part."""
        return y.split(self.widths, dim=-1)

    def places(self) -> dict[str, torch.Tensor]:
        """`part.weight` [width, in] and `part.bias` [width]: views into the merged tensors."""
        out, start = {}, 0
        for name, width in zip(self.parts, self.widths):
            out[f"{name}.weight"] = self.weight[start : start + width]
            if self.bias is not None:
                out[f"{name}.bias"] = self.bias[start : start + width]
            start += width
        return out

    def shards(self) -> Shards:
        """As `places`: `part.weight` and `part.bias`."""
        return {
            f"{name}.{kind}": (0, part) for name, part in self.parts.items() for kind in ("weight", "bias")
        }
